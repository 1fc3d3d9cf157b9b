"""LAMB, which torch hasn't got: Adam's step, scaled for each parameter by the norm of its weight."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from poptorch.optim.optimizer_base import MAX_WEIGHT_NORM, given
from poptorch.optim.own_rule import OwnRule


class LAMB(OwnRule):
    """u = m̂ / (√v̂ + eps) + λ·w;  w ← w − lr·u·min(‖w‖, max_weight_norm) / ‖u‖.

    Args: bias_correction: False uses the moments as they are
          max_weight_norm: also a parameter group's key; None is 65500
    Defaults: lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0. Extra arguments as for `Adam`.
    """

    first_order_momentum_accum_type: torch.dtype
    second_order_momentum_accum_type: torch.dtype

    _kind = "lamb"

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
