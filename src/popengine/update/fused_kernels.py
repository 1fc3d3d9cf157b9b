"""The rules that GPUs have as one kernel for all parameters: Adam and AdamW with bias correction, and SGD.

They differ from `rules.py` by rounding. The learning rate is a tensor and so are the steps, so that nothing has to be
known when the kernel is started: a CUDA graph of it serves every rate and every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from popengine.settings import Optimizer

DEVICES = ("cuda",)  # CPUs have such kernels too; theirs would not be torch.optim's bits


def fits(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Whether there is a fused kernel for updates of this parameter."""
    if parameter.device.type not in DEVICES or parameter.dtype != torch.float32:
        return False
    if any(dtype != torch.float32 for dtype in optimizer.state_types.values()):
        return False
    if optimizer.accumulator_type != torch.float32:
        return False
    if optimizer.kind == "sgd":
        return not optimizer.torch_dampening
    return optimizer.kind in ("adam", "adamw") and optimizer.bias_correction


def update(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    parameters: list[Tensor],
    gradients: list[Tensor],
    states: list[dict[str, Tensor]],
) -> None:
    """One step of parameters that all fit, in place."""
    rate = group.get("lr_tensor")
    if rate is None:
        rate = torch.tensor(group["lr"], dtype=torch.float32, device=parameters[0].device)
    if optimizer.kind == "sgd":
        _sgd(group, rate, parameters, gradients, states)
        return
    steps = [state["step"] for state in states]
    torch._foreach_add_(steps, 1)
    kernel = torch._fused_adamw_ if optimizer.kind == "adamw" else torch._fused_adam_
    kernel(
        parameters,
        gradients,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        steps,
        lr=rate,
        beta1=group["beta1"],
        beta2=group["beta2"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=bool(group.get("maximize")),
    )


def _sgd(
    group: Mapping[str, Any],
    rate: Tensor,
    parameters: list[Tensor],
    gradients: list[Tensor],
    states: list[dict[str, Tensor]],
) -> None:
    momentum, dampening = group["momentum"], group.get("dampening", 0.0)
    if momentum == 0 and dampening != 0:
        # The kernel dampens velocities only, and our velocity is all there is of a step (see rules.py).
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
