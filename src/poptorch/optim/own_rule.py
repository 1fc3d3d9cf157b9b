"""Optimizers that torch hasn't got: on the host they step by the rule that executors run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from popengine.compile.update import init_state, update
from poptorch.optim.base import Optimizer


class OwnRule(Optimizer, torch.optim.Optimizer):
    """An optimizer whose rule is ours alone."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:  # type: ignore[override]
        """Update the host's weights from their `.grad`, by the rule that executors run."""
        from poptorch.optim.freeze import freeze_optimizer  # which knows all optimizers, this one too

        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        everything = [parameter for group in self.param_groups for parameter in group["params"]]
        rule, hyper = freeze_optimizer(
            self, {id(value): str(place) for place, value in enumerate(everything)}
        )
        for group, rates in zip(self.param_groups, hyper.groups, strict=True):
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter] = init_state(rule, parameter)
            gradients = [parameter.grad.clone() for parameter in parameters]  # a rule may overwrite them
            update(rule, rates, parameters, gradients, [self.state[parameter] for parameter in parameters])
        return loss
