"""Backends: they make the pieces of a plan callable. The choice changes only speed and rounding.

eager     runs the Python source of a piece: no compilation time, and the same bits in every layout
inductor  compiles each piece into fused C++ kernels by torch._inductor, on CPUs; results differ by rounding
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
