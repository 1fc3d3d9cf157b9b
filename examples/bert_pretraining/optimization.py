"""The optimizer's groups, and the learning rate of each call."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from poptorch.optim import LAMB, AdamW


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


def make_optimizer(model: nn.Module, flags: Any) -> torch.optim.Optimizer:
    half = flags.precision == "16.16"
    first = torch.float16 if flags.enable_half_first_order_momentum else torch.float32
    groups = parameter_groups(model, flags.weight_decay, lamb=flags.optimizer != "AdamW")
    kind = AdamW if flags.optimizer == "AdamW" else LAMB
    optimizer = kind(
        groups,
        lr=flags.learning_rate,
        betas=(0.9, 0.999),
        eps=1e-6,
        loss_scaling=flags.loss_scaling,
        bias_correction=flags.optimizer == "LAMB",
        accum_type=torch.float16 if half else torch.float32,
        first_order_momentum_accum_type=first,
        second_order_momentum_accum_type=torch.float32,
    )
    for name in ("weight_decay", *(["max_weight_norm"] if kind is LAMB else [])):
        optimizer.variable_attrs.markAsConstant(name)  # only the rate moves
    return optimizer


def share_of_rate(schedule: str, warmup: float, steps: int, step: int) -> float:
    """The factor of the learning rate in call `step` of `steps`: grows to 1 over the warm-up, then falls to 0."""
    if schedule == "constant":
        return 1.0
    grown = int(warmup * steps)
    if step < grown:
        return step / grown
    return (steps - step) / (steps - grown) if steps > grown else 1.0


def set_rate(optimizer: torch.optim.Optimizer, flags: Any, step: int) -> float:
    """Give all groups the rate of this call, and return it."""
    rate = flags.learning_rate * share_of_rate(flags.lr_schedule, flags.lr_warmup, flags.training_steps, step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate
