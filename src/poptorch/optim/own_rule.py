"""Optimizers that torch hasn't got: on the host they step by the rule that executors run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from popengine.update.group_update import init_state, update
from poptorch.optim.freeze_optimizer import freeze_optimizer
from poptorch.optim.optimizer_base import Optimizer


class OwnRule(Optimizer, torch.optim.Optimizer):
    """An optimizer whose rule is ours alone."""

    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:  # type: ignore[override]
        """Update the host's weights from their `.grad`, by the rule that executors run."""
        return step_by_own_rule(self, closure)


@torch.no_grad()
def step_by_own_rule(optimizer: torch.optim.Optimizer, closure: Callable[[], Tensor] | None) -> Any:
    """An optimizer's `step` on the host, by the rule that executors run."""
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    everything = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    rule, hyper = freeze_optimizer(
        optimizer, {id(value): str(place) for place, value in enumerate(everything)}
    )
    for group, rates in zip(optimizer.param_groups, hyper.groups, strict=True):
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in parameters:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = init_state(rule, parameter)
        gradients = [parameter.grad.clone() for parameter in parameters]  # a rule may overwrite them
        update(rule, rates, parameters, gradients, [optimizer.state[parameter] for parameter in parameters])
    return loss
