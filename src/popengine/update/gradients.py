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

import torch
from torch import Tensor


def norm(gradient: Tensor) -> Tensor:
    """Return the norm of a gradient, a float32 scalar (float64 gradients: float64) on the gradient's device."""
    # In float32 also for half precision, where the norm may be too large for the gradient's own dtype.
    return torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))


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


def count(gradient: Tensor, scale: float) -> Tensor:
    """Return the number of elements of a gradient, of those above `LARGE`, and of infinities and NaN.

    Args: scale: by which the gradient was divided; elements are compared as they were before
    """
    large, finite = (gradient.abs() > LARGE / scale).sum(), gradient.isfinite().sum()
    return torch.tensor([gradient.numel(), int(large), gradient.numel() - int(finite)])


def all_finite(gradients: Sequence[Tensor]) -> bool:
    """Return whether no element is an infinity or a NaN."""
    return all(
        math.isfinite(bound) for gradient in gradients if gradient.numel() for bound in gradient.aminmax()
    )


def next_factor(factor: float, elements: int, large: int, not_finite: int) -> float:
    """Return the factor on the user's loss scale for the next update, by the numbers that `count` returns."""
    return factor * (2 if not not_finite and large <= SHARE * elements else 0.5)
