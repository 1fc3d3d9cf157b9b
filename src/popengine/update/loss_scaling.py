"""Automatic loss scaling: keeps half precision gradients large, but within their range.

After each update the share of gradient elements above an eighth of float16's largest value decides: at most
1e-7, and the scale doubles; more, and it halves. An update whose gradients overflowed is skipped (our addition).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LARGE = 0.125 * torch.finfo(torch.float16).max
SHARE = 1e-7


@dataclass(frozen=True)
class Count:
    """Of some gradients: how many elements, how many are large, and whether all are finite."""

    elements: int = 0
    large: int = 0
    finite: bool = True

    def __add__(self, other: Count) -> Count:
        return Count(self.elements + other.elements, self.large + other.large, self.finite and other.finite)


def count(gradients: Sequence[Tensor], scale: float) -> Count:
    """Count over gradients that were divided by `scale`, as if they were not."""
    total = Count()
    for gradient in gradients:
        large = int((gradient.abs() > LARGE / scale).sum())
        total += Count(gradient.numel(), large, bool(gradient.isfinite().all()))
    return total


def all_finite(gradients: Sequence[Tensor]) -> bool:
    """Whether no element is an infinity or a NaN."""
    return all(
        math.isfinite(bound) for gradient in gradients if gradient.numel() for bound in gradient.aminmax()
    )


def next_factor(factor: float, seen: Count) -> float:
    """The factor on the user's loss scale for the next update."""
    fits = seen.finite and seen.large <= SHARE * seen.elements
    return factor * (2 if fits else 0.5)
