"""Comparison of outputs, for tests of models."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["allclose"]


def allclose(ref_outputs: Any, test_outputs: Any, rtol: float = 1e-5, atol: float = 1e-8) -> bool:
    """Return whether two outputs have the same structure of tuples and lists, and close values."""
    if isinstance(ref_outputs, Tensor) and isinstance(test_outputs, Tensor):
        if ref_outputs.shape != test_outputs.shape:
            return False
        kind = torch.promote_types(ref_outputs.dtype, test_outputs.dtype)
        return torch.allclose(ref_outputs.to(kind), test_outputs.to(kind), rtol, atol, equal_nan=True)
    if type(ref_outputs) is not type(test_outputs):
        return False
    if isinstance(ref_outputs, (tuple, list)):
        return len(ref_outputs) == len(test_outputs) and all(
            allclose(ref, test, rtol, atol) for ref, test in zip(ref_outputs, test_outputs, strict=True)
        )
    return bool(ref_outputs == test_outputs)
