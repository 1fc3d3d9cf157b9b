"""Gradients before an update: norms, clipping, and automatic loss scaling.

Clipping has the results of torch.nn.utils' functions in every layout: the total norm is the norm of the norms
of all gradients, stacked in an order that doesn't depend on the parameters' stages.

Automatic loss scaling keeps half precision gradients large, but within their range. Each step counts the
gradient elements above an eighth of float16's largest value: if they are at most 1e-7 of all elements, the
loss scale doubles, otherwise it halves. *Pando*: an update whose gradients overflowed is skipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def norm(gradient: Tensor) -> Tensor:
    """Return the norm of a gradient, a float32 scalar (of float64 gradients float64) on the same device."""
    # In float32 also for half precision, where the norm may be too large for the gradient's own dtype.
    return torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))


def clipping_factor(total: Tensor, max_norm: float) -> Tensor:
    """Return the factor, at most 1, that reduces the global norm `total` of the gradients to `max_norm`."""
    # torch's own epsilon. A factor of 1 changes no bits, so the host need not wait for the norm.
    return torch.clamp(max_norm / (total + 1e-6), max=1.0)


def scale_(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply all gradients by a 0-d tensor, in place."""
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device))


def clamp_(gradients: Sequence[Tensor], max_value: float) -> None:
    """Clamp every element to [-max_value, max_value], in place, as `torch.nn.utils.clip_grad_value_` does."""
    torch._foreach_clamp_min_(list(gradients), -max_value)
    torch._foreach_clamp_max_(list(gradients), max_value)


LARGE = 0.125 * torch.finfo(torch.float16).max
SHARE = 1e-7  # of all elements: if more are large, the loss scale halves


def element_counts(gradient: Tensor, scale: float) -> Tensor:
    """Return three counts as int64 [3]: all elements, large elements, and elements that are not finite.

    Args: scale: the loss scale, by which the gradient was divided; an element is large if its absolute value
        was above `LARGE` before this division
    """
    large, finite = (gradient.abs() > LARGE / scale).sum(), gradient.isfinite().sum()
    return torch.tensor([gradient.numel(), int(large), gradient.numel() - int(finite)])


def all_finite(gradients: Sequence[Tensor]) -> bool:
    """Return whether no element of the gradients is an infinity or a NaN."""
    return all(
        math.isfinite(bound) for gradient in gradients if gradient.numel() for bound in gradient.aminmax()
    )


def next_loss_factor(factor: float, elements: int, large: int, not_finite: int) -> float:
    """Return the number by which the user's loss scale is multiplied in the next update: twice `factor`; half
    of it if a gradient element is not finite, or if more than `SHARE` of the elements are large.

    Args: factor: this number in the current update; elements, large, not_finite: the three `element_counts`,
        summed over all gradients
    """
    return factor * (2 if not not_finite and large <= SHARE * elements else 0.5)
