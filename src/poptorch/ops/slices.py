"""Slices whose start is a tensor, so that it may depend on data."""

from typing import Any

import torch
from torch import Tensor

from popengine.errors import Error

_INDEX_TYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def dynamic_slice(tensor: Tensor, dim: int, start: Tensor, size: int, step: int = 1) -> Tensor:
    """Return `tensor[start : start + size : step]` along `dim`.

    Args:
        start: integer tensor with one element; beyond the last possible start the run fails
        size:  how many elements the slice spans
        step:  every step-th of them is taken
    """
    _checked("dynamic_slice", tensor, dim, start, size)
    if not isinstance(step, int) or step < 1:
        raise Error(f"dynamic_slice: step must be an integer from 1; found {step!r}")
    return tensor.index_select(dim, _indexes(start, size, step, tensor))


def dynamic_update(input: Tensor, src: Tensor, dim: int, start: Tensor, size: int) -> Tensor:
    """Return a copy of `input` with `src` in `[start : start + size]` along `dim`.

    Args:
        src:   of the input's type and shape, but `size` elements along `dim`
        start: integer tensor with one element
    """
    _checked("dynamic_update", input, dim, start, size)
    if not isinstance(src, Tensor):
        raise Error(f"dynamic_update: src must be a tensor; found {type(src).__name__}")
    if src.dtype != input.dtype:
        raise Error(
            f"dynamic_update: src is {src.dtype} and input {input.dtype}; they must have the same type\n"
            f"  fix: src.to({input.dtype})"
        )
    expected = list(input.shape)
    expected[dim] = size
    if list(src.shape) != expected:
        raise Error(
            f"dynamic_update: src has shape {tuple(src.shape)}; {tuple(expected)} fits into {tuple(input.shape)}"
            f" along dimension {dim} with size {size}"
        )
    return input.index_copy(dim, _indexes(start, size, 1, input), src)


def _checked(name: str, tensor: Any, dim: Any, start: Any, size: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise Error(f"{name}: takes a tensor; found {type(tensor).__name__}")
    if not isinstance(dim, int) or not -tensor.dim() <= dim < tensor.dim():
        raise Error(
            f"{name}: dim must be a dimension of a tensor of shape {tuple(tensor.shape)}; found {dim!r}"
        )
    if not isinstance(start, Tensor) or start.dtype not in _INDEX_TYPES or start.numel() != 1:
        found = f"{start.dtype} {tuple(start.shape)}" if isinstance(start, Tensor) else repr(start)
        raise Error(
            f"{name}: start must be an integer tensor with one element; found {found}\n"
            "  fix: torch.tensor([2]) where the start is known, tensor.narrow needs no tensor"
        )
    length = tensor.shape[dim]
    if not isinstance(size, int) or not 0 < size <= length:
        raise Error(f"{name}: size must be an integer from 1 to {length}, the dimension; found {size!r}")


def _indexes(start: Tensor, size: int, step: int, like: Tensor) -> Tensor:
    return start.reshape(()).long() + torch.arange(0, size, step, device=like.device)
