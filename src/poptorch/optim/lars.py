"""LARS, which torch hasn't got: momentum, with a rate for each layer by the norms of its weight and gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from poptorch.optim.optimizer_base import given
from poptorch.optim.own_rule import OwnRule


class LARS(OwnRule):
    """λ = η·‖w‖ / (‖g‖ + β·‖w‖ + eps), 1 where a norm is 0;  v ← μ·v + lr·λ·(g + β·w);  w ← w − v.

    Weights of fewer than two dimensions (biases, and the parameters of norms) have λ = 1 and β = 0. From You, Gitman
    and Ginsburg, "Large Batch Training of Convolutional Networks", 2017. PopTorch has no such class.

    Args: lr: mandatory, here or in every parameter group
          momentum, weight_decay, eta: μ, β and η
          accum_type, velocity_accum_type: dtype of the gradient accumulator and of v, float16 or float32
          max_grad_norm: clips the global norm of the gradients, after reduction and unscaling
    """

    velocity_accum_type: torch.dtype

    _kind = "lars"

    def __init__(
        self,
        params: ParamsT,
        lr: float | None = None,
        momentum: float | None = None,
        weight_decay: float | None = None,
        eta: float | None = None,
        eps: float | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        velocity_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        rates = given(lr=lr, momentum=momentum, weight_decay=weight_decay, eta=eta, eps=eps)
        defaults = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 5e-5, "eta": 1e-3, "eps": 0.0}
        if lr is None:
            groups: Any = list(params)
            params = groups
            if not all(isinstance(group, dict) and "lr" in group for group in groups):
                raise ValueError(
                    "LARS needs a learning rate; fix: give lr to it, or to every parameter group"
                )
        torch.optim.Optimizer.__init__(self, params, defaults | rates)
        self._extend(
            rates,
            loss_scaling,
            max_grad_norm,
            accum_type=accum_type,
            velocity_accum_type=velocity_accum_type,
        )
