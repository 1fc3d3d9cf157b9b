"""The optimizer with its groups, and the learning rate of each call."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from poptorch.optim import LAMB, Adam, AdamW

KINDS: dict[str, Any] = {"Adam": Adam, "AdamW": AdamW, "LAMB": LAMB, "LAMBNoBiasCorrection": LAMB}


def parameter_groups(model: nn.Module, weight_decay: float, lamb: bool) -> list[dict[str, Any]]:
    """Biases, other one-dimensional parameters, and the rest, which alone decays.

    A `max_weight_norm` of 0 makes LAMB's trust ratio 1: biases get plain Adam steps.
    """
    named = list(model.named_parameters())
    biases = [p for name, p in named if "bias" in name]
    norms = [p for name, p in named if "bias" not in name and p.dim() == 1]
    rest = [p for name, p in named if "bias" not in name and p.dim() > 1]
    groups: list[dict[str, Any]] = [
        {"params": biases, "weight_decay": 0.0},
        {"params": norms, "weight_decay": 0.0},
        {"params": rest, "weight_decay": weight_decay},
    ]
    if lamb:
        groups[0]["max_weight_norm"] = 0.0
    return groups


def make_optimizer(model: nn.Module, flags: Any, bias_correction: bool) -> torch.optim.Optimizer:
    """Args: bias_correction: of AdamW and LAMB"""
    half = flags.precision == "16.16"
    kind = KINDS[flags.optimizer]
    more = {} if kind is Adam else {"bias_correction": bias_correction}
    optimizer = kind(
        parameter_groups(model, flags.weight_decay, lamb=kind is LAMB),
        lr=flags.learning_rate,
        betas=(0.9, 0.999),
        eps=1e-6,
        loss_scaling=flags.loss_scaling,
        accum_type=torch.float16 if half else torch.float32,
        first_order_momentum_accum_type=torch.float16
        if flags.enable_half_first_order_momentum
        else torch.float32,
        second_order_momentum_accum_type=torch.float32,
        **more,
    )
    for name in ("weight_decay", *(["max_weight_norm"] if kind is LAMB else [])):
        optimizer.variable_attrs.markAsConstant(name)  # only the rate moves
    return optimizer


def share_of_rate(schedule: str, warmup: int, steps: int, step: int) -> float:
    """The factor of the learning rate in call `step` of `steps`: grows to 1 over the warm-up, then falls to 0."""
    if schedule == "constant":
        return 1.0
    if step < warmup:
        return step / warmup
    passed = (step - warmup) / (steps - warmup) if step < steps else 1.0
    return 1 - passed if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * passed))


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> float:
    """Give it to all groups."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def stop_at_nan(optimizer: torch.optim.Optimizer, step: int, loss: float) -> None:
    """End the program, if the loss of this step is no number."""
    if math.isfinite(loss):
        return
    scale = optimizer.state_dict()["ipu_param"]["lossScaling_FLOAT"]
    raise SystemExit(
        f"the loss of step {step} is {loss} at a loss scaling of {float(scale):g}: the training stops, and no "
        "checkpoint is written\n  fix: a lower --loss-scaling or --learning-rate, or --precision 32.32"
    )
