"""Tensor operations with PopTorch's names: slices at computed offsets, serialized products, point clouds."""

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from popengine.compile.recording.current_capture import current
from popengine.errors import Error

from ..checks import checked
from ..enums import MatMulSerializationMode
from .library import check_tensors, register_computed, register_shorthand

_CASTS = {"FLOAT": torch.float32, "FLOAT16": torch.float16}
_INDEX_TYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def dynamic_slice(tensor: Tensor, dim: int, start: Tensor, size: int, step: int = 1) -> Tensor:
    """Return `tensor[start : start + size : step]` along `dim`.

    >>> poptorch.dynamic_slice(x, 1, torch.tensor([2]), 3)  # x[:, 2:5]

    Args:
        start: integer tensor with one element; a slice that exceeds the dimension raises an error at run time
        size:  number of elements that the slice spans, known at compile time
        step:  distance between the elements that are returned
    """
    _check_slice_arguments("dynamic_slice", tensor, dim, start, size, step)
    return tensor.index_select(dim, _slice_indices(start, size, step, tensor))


def dynamic_update(input: Tensor, src: Tensor, dim: int, start: Tensor, size: int) -> Tensor:
    """Return a copy of `input` in which `[start : start + size]` along `dim` is replaced by `src`.

    Args:
        src:   has the dtype and shape of `input`, but `size` elements along `dim`
        start: integer tensor with one element, as in `dynamic_slice`
    """
    _check_slice_arguments("dynamic_update", input, dim, start, size)
    check_tensors("dynamic_update: src must be a tensor", src)
    expected = list(input.shape)
    expected[dim] = size
    if (src.dtype, list(src.shape)) != (input.dtype, expected):
        raise Error(
            f"dynamic_update: src is {src.dtype} {tuple(src.shape)}; {input.dtype} {tuple(expected)} fits into"
            f" {tuple(input.shape)} along dimension {dim} with size {size}"
        )
    return input.index_copy(dim, _slice_indices(start, size, 1, input), src)


def _check_slice_arguments(name: str, tensor: Any, dim: Any, start: Any, size: Any, step: Any = 1) -> None:
    check_tensors(f"{name} takes a tensor, and its start is an integer tensor", tensor, start)
    has_dim = isinstance(dim, int) and -tensor.dim() <= dim < tensor.dim()
    length = tensor.shape[dim] if has_dim else None
    is_index = start.dtype in _INDEX_TYPES and start.numel() == 1
    has_size = length is not None and isinstance(size, int) and 0 < size <= length
    if not is_index or not has_size or not isinstance(step, int) or step < 1:
        raise Error(
            f"{name} takes one dimension of a tensor of shape {tuple(tensor.shape)}, a start, which is an integer"
            f" tensor with one element, a size from 1 to the dimension's, and a step from 1; found {dim!r},"
            f" {start.dtype} {tuple(start.shape)}, {size!r} and {step!r}\n"
            "  fix: torch.tensor([2]) where the start is known, tensor.narrow needs no tensor"
        )


def _slice_indices(start: Tensor, size: int, step: int, like: Tensor) -> Tensor:
    return start.reshape(()).long() + torch.arange(0, size, step, device=like.device)


def serializedMatMul(
    lhs: Tensor,
    rhs: Tensor,
    mode: MatMulSerializationMode,
    factor: int = 0,
    keep_precision: bool = False,
) -> Tensor:
    """Return `torch.matmul(lhs, rhs)`; a compiled model computes it in `factor` pieces, to need less memory.

    Args:
        lhs, rhs: [..., rows, inner] and [..., inner, columns]
        mode:     the dimension along which the product is cut: the rows of lhs (InputChannels), inner
            (ReducingDim), the columns of rhs (OutputChannels), or none (Disabled)
        factor:   number of pieces, a divisor of that dimension (0: not cut)
        keep_precision: sum the products of ReducingDim in float32 if the operands are narrower
    """
    check_tensors("serializedMatMul: lhs and rhs must be tensors", lhs, rhs, error=AssertionError)
    checked("serializedMatMul", mode, MatMulSerializationMode)
    if mode is MatMulSerializationMode.Disabled or checked("serializedMatMul", factor, int) == 0:
        return torch.matmul(lhs, rhs)
    cut = rhs if mode is MatMulSerializationMode.OutputChannels else lhs
    dim = -2 if mode is MatMulSerializationMode.InputChannels else -1
    length = cut.shape[dim] if cut.dim() >= 2 else None
    if length is None or factor < 1 or length % factor:
        raise Error(
            f"serializedMatMul: factor {factor} can't cut {mode.name} of {tuple(lhs.shape)} @ {tuple(rhs.shape)}\n"
            f"  why: the dimension {'is missing' if length is None else f'has {length} elements'}, and all pieces"
            " must be equal\n  fix: a factor that divides it, or MatMulSerializationMode.Disabled"
        )
    if current() is None or factor == 1:
        return torch.matmul(lhs, rhs)
    if mode is MatMulSerializationMode.InputChannels:
        return torch.cat([torch.matmul(piece, rhs) for piece in lhs.chunk(factor, -2)], -2)
    if mode is MatMulSerializationMode.OutputChannels:
        return torch.cat([torch.matmul(lhs, piece) for piece in rhs.chunk(factor, -1)], -1)
    wide = torch.promote_types(lhs.dtype, torch.float32) if keep_precision else lhs.dtype
    pairs = zip(lhs.to(wide).chunk(factor, -1), rhs.to(wide).chunk(factor, max(-2, -rhs.dim())), strict=True)
    first, *rest = (torch.matmul(left, right) for left, right in pairs)
    return sum(rest, first).to(lhs.dtype)


def fps(src: Tensor, ptr: list[int], ratio: float = 0.5, random_start: bool = False) -> Tensor:
    """Sample points of each cloud by farthest point sampling, and return their indices.

    The first sample of a cloud is its first or a random point; each further sample is the point with the
    largest distance from the nearest of the samples before.

    Args:
        src:   points of all clouds, [N, F]
        ptr:   offsets of the clouds in `src`: cloud i is src[ptr[i]:ptr[i + 1]]
        ratio: share of a cloud's points that is sampled; the number is rounded up
        random_start: begin with a random point of the cloud instead of its first point
    Returns: indices into dimension 0 of `src`, int64, cloud after cloud
    """
    check_tensors("fps: src must be a tensor of points [N, F]", src)
    is_list = isinstance(ptr, list) and len(ptr) >= 2 and all(isinstance(value, int) for value in ptr)
    if not is_list or sorted(ptr) != ptr or ptr[0] < 0 or ptr[-1] > len(src):
        raise Error(
            f"fps: ptr must be a list of at least two integers, the boundaries of the clouds, which rise from 0 to at"
            f" most {len(src)}, the number of points; found {ptr!r}\n  fix: [0, len(src)] for a single cloud"
        )
    if not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
        raise Error(f"fps: ratio must be a number above 0 and up to 1; found {ratio!r}")
    # Random starts are drawn outside of the opaque operation, with the engine's generators.
    starts = (torch.rand if random_start else torch.zeros)(len(ptr) - 1, device=src.device)
    chosen = []
    for start, (begin, end) in zip(starts, itertools.pairwise(ptr), strict=True):
        count = math.ceil(ratio * (end - begin))
        chosen.append(begin + torch.ops.poptorch.fps(src[begin:end].flatten(1), count, start))
    return torch.cat(chosen)


def _sample_cloud(points: Tensor, count: int, start: Tensor) -> Tensor:
    """Return the indices of `count` points: the first is `start` times their number, then always the farthest."""
    chosen, latest = torch.empty(count, dtype=torch.int64), int(start.item() * len(points))
    distance = torch.full((len(points),), math.inf, device=points.device)
    for position in range(count):
        chosen[position] = latest
        distance = torch.minimum(distance, (points - points[latest]).float().square().sum(1))
        latest = int(distance.argmax())
    return chosen.to(points.device)


register_computed(
    "fps", _sample_cloud, lambda points, count, start: points.new_empty(count, dtype=torch.int64)
)


def nearest(x: Tensor, y: Tensor, batch_x: Any = None, batch_y: Any = None) -> Tensor:
    """Return, for each point of x, the index of the nearest point of y: [N], int64.

    Args:
        x, y: points, [N, F] and [M, F], or [N] and [M]
        batch_x, batch_y: the cloud of each point, as sorted numbers in lists or tensors, [N] and [M]; give
            both or neither. Only points of the same cloud are compared
    """
    check_tensors("nearest takes tensors", x, y)
    if (batch_x is None) != (batch_y is None):
        raise Error("nearest: give batch_x and batch_y both, or none of them")
    x, y = (points.reshape(len(points), -1) for points in (x, y))
    if x.shape[1] != y.shape[1]:
        raise Error(f"nearest: points of x have {x.shape[1]} coordinates, those of y {y.shape[1]}")
    distance = (x[:, None] - y[None]).square().sum(2)
    if batch_x is not None:
        of_x, of_y = _as_cloud_numbers("batch_x", batch_x, x), _as_cloud_numbers("batch_y", batch_y, y)
        distance = distance.masked_fill(of_x[:, None] != of_y[None], math.inf)
    return distance.argmin(1)


def _as_cloud_numbers(name: str, value: Any, points: Tensor) -> Tensor:
    """Return an argument of `nearest`, the cloud number of each point, as a tensor [N]."""
    is_sorted = not isinstance(value, (list, tuple)) or list(value) == sorted(value)
    numbers = torch.as_tensor(value, device=points.device)
    if not is_sorted or numbers.shape != points.shape[:1]:
        raise Error(
            f"nearest: {name} must be sorted and hold one number for each of the {len(points)} points; found {value}"
        )
    return numbers


def _internal_cast(tensor: Tensor, dtype: str) -> Tensor:
    return tensor.to(_CASTS[checked("internal_cast", dtype, tuple(_CASTS), Error)])


register_shorthand("internal_cast(Tensor input, str dtype) -> Tensor", _internal_cast)
register_shorthand(
    "dynamic_slice(Tensor input, int dim, Tensor start, int size, int step) -> Tensor", dynamic_slice
)
register_shorthand(
    "dynamic_update(Tensor input, Tensor src, int dim, Tensor start, int size) -> Tensor", dynamic_update
)
