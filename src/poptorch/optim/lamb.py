"""LAMB, which torch hasn't got: Adam's step, scaled for each parameter by the norm of its weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from popengine import settings
from popengine.compile.update import init_state, update
from poptorch.optim.base import Optimizer, given

MAX_WEIGHT_NORM = 65500.0


class LAMB(Optimizer, torch.optim.Optimizer):
    """u = m̂ / (√v̂ + eps) + λ·w;  w ← w − lr·u·min(‖w‖, max_weight_norm) / ‖u‖.

    Args: bias_correction: False uses the moments as they are
          max_weight_norm: also a parameter group's key; None is 65500
    Defaults: lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0. Extra arguments as for `Adam`.
    """

    first_order_momentum_accum_type: torch.dtype
    second_order_momentum_accum_type: torch.dtype

    _attributes = ("lr", "betas", "eps", "weight_decay", "max_weight_norm")

    def __init__(
        self,
        params: ParamsT,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        bias_correction: bool | None = None,
        loss_scaling: float | None = None,
        max_weight_norm: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
    ) -> None:
        rates = given(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, max_weight_norm=max_weight_norm)
        defaults = {
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 0.0,
            "max_weight_norm": MAX_WEIGHT_NORM,
        }
        torch.optim.Optimizer.__init__(self, params, defaults | rates)
        self.bias_correction = True if bias_correction is None else bias_correction
        self._extend(
            rates,
            loss_scaling,
            accum_type=accum_type,
            first_order_momentum_accum_type=first_order_momentum_accum_type,
            second_order_momentum_accum_type=second_order_momentum_accum_type,
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:  # type: ignore[override]
        """Update the host's weights from their `.grad`, by the rule that executors run."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rule = settings.Optimizer(
            kind="lamb",
            group_of={},
            state_types={
                "exp_avg": self.first_order_momentum_accum_type,
                "exp_avg_sq": self.second_order_momentum_accum_type,
            },
            bias_correction=self.bias_correction,
        )
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter] = init_state(rule, parameter)
            limit = group["max_weight_norm"]
            rates = {
                "lr": group["lr"],
                "beta1": group["betas"][0],
                "beta2": group["betas"][1],
                "eps": group["eps"],
                "weight_decay": group["weight_decay"],
                "max_weight_norm": MAX_WEIGHT_NORM if limit is None else limit,
            }
            gradients = [parameter.grad for parameter in parameters]
            update(rule, rates, parameters, gradients, [self.state[parameter] for parameter in parameters])
        return loss
