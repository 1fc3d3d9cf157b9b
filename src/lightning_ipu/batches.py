"""Batches as executors take them, and short ones filled up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from poptorch.nested_values import tensors_of, with_tensors


def spread(value: Any, n: int) -> Any:
    """The same value, with a tensor of n equal elements for each number in it."""
    if isinstance(value, (int, float)):
        return torch.tensor(value).repeat(n)
    if isinstance(value, (list, tuple)):
        parts = [spread(part, n) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if type(value) is dict:
        return {key: spread(part, n) for key, part in value.items()}
    return value


def rows_of(batch: Any) -> int | None:
    """The first dimension that all tensors of a batch have; None if they have none in common."""
    counts = {tensor.shape[0] if tensor.dim() else None for tensor in tensors_of(batch)}
    return counts.pop() if len(counts) == 1 else None


def padded(batch: Any, rows: int) -> Any:
    """The batch with copies of its last row, so that it has so many."""

    def whole(tensor: Tensor) -> Tensor:
        missing = rows - len(tensor)
        return torch.cat([tensor, tensor[-1:].expand(missing, *tensor.shape[1:])])

    return with_tensors(batch, iter([whole(tensor) for tensor in tensors_of(batch)]))


def cut(output: Any, rows: int, wanted: int) -> Any:
    """The first `wanted` rows of every tensor that has `rows`."""
    tensors = [t[:wanted] if t.dim() and len(t) == rows else t for t in tensors_of(output)]
    return with_tensors(output, iter(tensors))


def shapes_of(value: Any) -> list[Any]:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors_of(value)]
