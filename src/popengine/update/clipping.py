"""Clipping by the global norm and by value, with the results of torch.nn.utils' functions in every layout.

For the norm, each stage gives the norm of each of its gradients, and scales them by the total's factor: the norm of all
norms, stacked in an order that doesn't depend on where the parameters live. Adding up the totals of stages
instead would give other bits in every layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The norm of each gradient, a float32 scalar (float64 gradients: float64) on the gradient's device."""
    # In float32 also for half precision, where the norm may be too large for the gradient's own dtype.
    return [
        torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
        for gradient in gradients
    ]


def clipping_factor(total: Tensor, max_norm: float) -> Tensor:
    """What gradients are to be multiplied with so that their global norm, now `total`, is at most `max_norm`."""
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
