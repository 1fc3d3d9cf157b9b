"""Stochastic rounding: to half precision up or down at random, right on average.

Small updates of half precision weights vanish when rounded to nearest; rounded this way they add up.
"""

from __future__ import annotations

import torch
from torch import Tensor


def stochastic_round_(target: Tensor, source: Tensor, generator: torch.Generator) -> Tensor:
    """Write float32 `source` into half precision `target`, without bias: add noise, then floor.

    Infinities and NaN stay what they are. A target that isn't half precision is copied to as it is.
    """
    if target.dtype not in (torch.float16, torch.bfloat16):
        return target.copy_(source)
    narrow, wide = torch.finfo(target.dtype), torch.finfo(torch.float32)
    source = source.float()
    # The power of two at or below |source|: a float32 with its mantissa cleared.
    power = (source.view(torch.int32) & 0x7F80_0000).view(torch.float32)
    # The distance of neighbours in the target there; below its smallest normal number it grows no finer.
    spacing = power.clamp(min=narrow.smallest_normal) * narrow.eps
    # Noise has exactly the bits that rounding drops, so that adding it is exact.
    dropped = int(narrow.eps / wide.eps)
    noise = torch.randint(
        dropped, source.shape, generator=generator, dtype=torch.float32, device=source.device
    ).div_(dropped)
    rounded = torch.floor(source / spacing + noise) * spacing
    return target.copy_(torch.where(torch.isfinite(source), rounded, source))
