"""Backends: what makes the pieces of a plan callable. Choosing another changes how fast a piece runs, no more.

eager     the source of a piece, run as it is: no wait, and the same bits in every layout
inductor  each piece compiled by torch._inductor into fused C++ kernels, on CPUs; results differ by rounding
"""

from __future__ import annotations

import torch

from ...ir import Plan
from ...settings import Settings
from ..devices import CPU
from .eager import Code, build


def load(plan: Plan, settings: Settings, device: torch.device = CPU) -> tuple[Code, ...]:
    """Return the functions of all pieces of a plan, in their order."""
    if settings.is_eager:
        return tuple(build(piece, device=device) for piece in plan.partition.pieces)
    from . import inductor

    return inductor.load(plan.partition, device)
