"""Identities that stay in the compiled graph under their own name: `nop`, checkpoints, memory proportions."""

from typing import Any

import torch
from torch import Tensor

from popengine.errors import Error

from .library import mark

mark("nop(Tensor input) -> Tensor")
mark("recomputation_checkpoint(Tensor input) -> Tensor")
mark("set_available_memory(Tensor input, float proportion) -> Tensor")
mark("set_matmul_serialization(Tensor matmul, str mode, int factor, bool keep_precision) -> Tensor")


def nop(tensor: Tensor) -> Tensor:
    """The tensor itself, by an operation that is kept in the graph."""
    if not isinstance(tensor, Tensor):
        raise Error(f"nop takes a tensor; found {type(tensor).__name__}\n  fix: poptorch.nop(x)")
    return torch.ops.poptorch.nop(tensor)


def recomputationCheckpoint(*tensors: Any) -> Any:
    """The tensors themselves; with recomputation on they are stored and not computed again.

    Args:
        tensors: one tensor (returns a tensor), several (returns a tuple), or one list or tuple (returns
            the same kind)
    Raises:
        ValueError: something is not a tensor
    """
    if len(tensors) == 1 and isinstance(tensors[0], Tensor):
        return torch.ops.poptorch.recomputation_checkpoint(tensors[0])
    many = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)) else tensors
    wrong = [type(value).__name__ for value in many if not isinstance(value, Tensor)]
    if wrong:
        raise ValueError(
            f"All inputs must be tensors: recomputationCheckpoint found {', '.join(wrong)}\n"
            "  fix: give it the tensors only: poptorch.recomputationCheckpoint(x, y)"
        )
    kept = [torch.ops.poptorch.recomputation_checkpoint(value) for value in many]
    return kept if isinstance(many, list) else tuple(kept)


def set_available_memory(tensor: Tensor, available_memory_proportion: float) -> Tensor:
    """The tensor itself; the proportion is recorded in the graph and has no effect here: memory is shared.

    Args:
        tensor: what a matrix product or convolution has returned
        available_memory_proportion: how much of an IPU's tile memory it might have used, 0 to 1
    """
    if not isinstance(tensor, Tensor):
        raise Error(
            "poptorch.set_available_memory: you may only set available memory on a tensor, the result of a matmul"
            f" or convolution; found {type(tensor).__name__}\n"
            "  fix: y = poptorch.set_available_memory(torch.matmul(a, b), 0.3)"
        )
    return torch.ops.poptorch.set_available_memory(tensor, float(available_memory_proportion))
