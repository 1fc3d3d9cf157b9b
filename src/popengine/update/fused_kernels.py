"""The rules that torch has as one kernel for all parameters: Adam and AdamW with bias correction, and SGD.

They differ from `formulas.py` by rounding. The steps count this update already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

Group = Mapping[str, Any]
Kernel = Callable[[Group, list[Tensor], list[Tensor], list[dict[str, Tensor]]], None]


def _by_moments(
    kernel: str,
    group: Group,
    parameters: list[Tensor],
    gradients: list[Tensor],
    states: list[dict[str, Tensor]],
) -> None:
    getattr(torch, kernel)(
        parameters,
        gradients,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"].to(parameters[0].device) for state in states],
        lr=group["lr"],
        beta1=group["beta1"],
        beta2=group["beta2"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=bool(group.get("maximize")),
    )


# One step of `formulas.adam`, and of `formulas.adamw`, in place.
adam, adamw = partial(_by_moments, "_fused_adam_"), partial(_by_moments, "_fused_adamw_")


def sgd(
    group: Group,
    parameters: list[Tensor],
    gradients: list[Tensor],
    states: list[dict[str, Tensor]],
) -> None:
    """One step of `formulas.sgd`, in place."""
    rate, momentum, dampening = group["lr"], group["momentum"], group.get("dampening", 0.0)
    if momentum == 0 and dampening != 0:
        # The kernel dampens velocities only, and our velocity is all there is of a step (see formulas.py).
        rate = rate * (1 - dampening)
    torch._fused_sgd_(
        parameters,
        gradients,
        [state["velocity"] for state in states] if momentum != 0 else [],
        weight_decay=group["weight_decay"],
        momentum=momentum,
        lr=rate,
        dampening=dampening if momentum != 0 else 0.0,
        nesterov=bool(group.get("nesterov")),
        maximize=bool(group.get("maximize")),
        is_first_step=False,  # a velocity begins as zeros, and its first gradient is dampened like any other
    )
