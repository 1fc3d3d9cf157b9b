"""Point clouds: farthest point sampling, and the nearest neighbour."""

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from popengine.errors import Error

from .library import computed


def fps(src: Tensor, ptr: list[int], ratio: float = 0.5, random_start: bool = False) -> Tensor:
    """Sample points of each cloud, each as far as possible from those before it (farthest point sampling).

    Args:
        src:   points of all clouds, [N, F]
        ptr:   where each cloud begins, and the end of the last: cloud i is src[ptr[i]:ptr[i + 1]]
        ratio: the share of a cloud's points that is sampled, rounded up
        random_start: begin with a random point of the cloud, and not with its first
    Returns: the rows of the sampled points, cloud after cloud
    """
    if not isinstance(src, Tensor):
        raise Error(f"fps: src must be a tensor of points [N, F]; found {type(src).__name__}")
    if not isinstance(ptr, list) or len(ptr) < 2 or not all(isinstance(value, int) for value in ptr):
        raise Error(
            f"fps: ptr must be a list of at least two integers, the boundaries of the clouds; found {ptr!r}\n"
            "  fix: [0, len(src)] for a single cloud"
        )
    if sorted(ptr) != ptr or ptr[0] < 0 or ptr[-1] > len(src):
        raise Error(f"fps: ptr must rise from 0 to at most {len(src)}, the number of points; found {ptr}")
    if not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
        raise Error(f"fps: ratio must be a number above 0 and up to 1; found {ratio!r}")
    # Drawn outside of the opaque operation, so that the numbers are drawn as the model's other random numbers.
    make = torch.rand if random_start else torch.zeros
    return torch.ops.poptorch.fps(src, ptr, ratio, make(len(ptr) - 1, device=src.device))


def _counts(ptr: list[int], ratio: float) -> list[int]:
    return [math.ceil(ratio * (end - begin)) for begin, end in itertools.pairwise(ptr)]


def _sample(src: Tensor, ptr: list[int], ratio: float, starts: Tensor) -> Tensor:
    chosen = []
    for begin, end, count, start in zip(ptr, ptr[1:], _counts(ptr, ratio), starts.tolist(), strict=False):
        chosen.append(begin + _farthest(src[begin:end].flatten(1), count, int(start * (end - begin))))
    return torch.cat(chosen)


def _farthest(points: Tensor, count: int, start: int) -> Tensor:
    chosen = torch.empty(count, dtype=torch.int64)
    distance = torch.full((len(points),), math.inf, device=points.device)
    for position in range(count):
        chosen[position] = start
        distance = torch.minimum(distance, (points - points[start]).float().square().sum(1))
        start = int(distance.argmax())
    return chosen.to(points.device)


computed(
    "fps(Tensor src, int[] ptr, float ratio, Tensor starts) -> Tensor",
    _sample,
    lambda src, ptr, ratio, starts: src.new_empty(sum(_counts(ptr, ratio)), dtype=torch.int64),
)


def nearest(x: Tensor, y: Tensor, batch_x: Any = None, batch_y: Any = None) -> Tensor:
    """Return, for each point of x, the row of the nearest point of y.

    Args:
        x, y: [N, F] and [M, F], or [N] and [M]
        batch_x, batch_y: for each point the number of its cloud, sorted; only points of the same cloud are
            near each other. Lists or tensors, both or none
    """
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        raise Error(f"nearest takes tensors; found {type(x).__name__} and {type(y).__name__}")
    if (batch_x is None) != (batch_y is None):
        raise Error("nearest: give batch_x and batch_y both, or none of them")
    x, y = (points.reshape(len(points), -1) for points in (x, y))
    if x.shape[1] != y.shape[1]:
        raise Error(f"nearest: points of x have {x.shape[1]} coordinates, those of y {y.shape[1]}")
    distance = (x[:, None] - y[None]).square().sum(2)
    if batch_x is not None:
        of_x, of_y = _batch("batch_x", batch_x, x), _batch("batch_y", batch_y, y)
        distance = distance.masked_fill(of_x[:, None] != of_y[None], math.inf)
    return distance.argmin(1)


def _batch(name: str, value: Any, points: Tensor) -> Tensor:
    if isinstance(value, (list, tuple)):
        if list(value) != sorted(value):
            raise Error(f"nearest: {name} must be sorted; found {value}")
        value = torch.tensor(value, device=points.device)
    if not isinstance(value, Tensor) or value.shape != points.shape[:1]:
        raise Error(f"nearest: {name} must hold one number for each of the {len(points)} points")
    return value
