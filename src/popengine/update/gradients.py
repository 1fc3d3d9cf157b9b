"""What is measured of gradients before an update, and done to them: norms and clipping, and automatic loss scaling.

Clipping has the results of torch.nn.utils' functions in every layout: the total norm is that of the norms of all
gradients, stacked in an order that doesn't depend on where the parameters live.

Automatic loss scaling keeps half precision gradients large, but within their range. After each update the share of
gradient elements above an eighth of float16's largest value decides: at most 1e-7, and the scale doubles; more, and it
halves. An update whose gradients overflowed is skipped (our addition).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return the norm of each gradient, a float32 scalar (float64 gradients: float64) on the gradient's device."""
    # In float32 also for half precision, where the norm may be too large for the gradient's own dtype.
    return [
        torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
        for gradient in gradients
    ]


def clipping_factor(total: Tensor, max_norm: float) -> Tensor:
    """Return what gradients are to be multiplied with so that their global norm, now `total`, is at most `max_norm`."""
    # torch's own epsilon; multiplying by a clamped 1 leaves the bits alone and needs no wait for the norm.
    return torch.clamp(max_norm / (total + 1e-6), max=1.0)


def scale_(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply all with one number, in place."""
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device))


def clamp_(gradients: Sequence[Tensor], max_value: float) -> None:
    """Bring every element into [-max_value, max_value], in place, as `torch.nn.utils.clip_grad_value_` does."""
    torch._foreach_clamp_min_(list(gradients), -max_value)
    torch._foreach_clamp_max_(list(gradients), max_value)


LARGE = 0.125 * torch.finfo(torch.float16).max
SHARE = 1e-7


@dataclass(frozen=True)
class Count:
    """Statistics of gradients: the number of elements, of scaled ones above `LARGE`, and whether all are finite."""

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
    """Return whether no element is an infinity or a NaN."""
    return all(
        math.isfinite(bound) for gradient in gradients if gradient.numel() for bound in gradient.aminmax()
    )


def next_factor(factor: float, seen: Count) -> float:
    """Return the factor on the user's loss scale for the next update."""
    fits = seen.finite and seen.large <= SHARE * seen.elements
    return factor * (2 if fits else 0.5)
