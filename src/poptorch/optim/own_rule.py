"""LAMB and LARS, which torch hasn't got: on the host they step by the rule that executors run."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from popengine.update.group_update import init_state, update
from poptorch.optim.freeze_optimizer import freeze_optimizer
from poptorch.optim.optimizer_base import MAX_WEIGHT_NORM, Optimizer


class OwnRule(Optimizer, torch.optim.Optimizer):
    """An optimizer whose rule is ours alone."""

    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:  # type: ignore[override]
        """Update the host's weights from their `.grad`, by the rule that executors run."""
        return step_by_own_rule(self, closure)


class LAMB(OwnRule):
    """u = m̂ / (√v̂ + eps) + λ·w;  w ← w − lr·u·min(‖w‖, max_weight_norm) / ‖u‖.

    Args: bias_correction: False uses the moments as they are
          max_weight_norm: also a parameter group's key; None is 65500
    Defaults: lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0. Extra arguments as for `Adam`.
    """

    _kind = "lamb"
    _defaults = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, max_weight_norm=MAX_WEIGHT_NORM)
    bias_correction: bool = True
    first_order_momentum_accum_type: torch.dtype = torch.float32
    second_order_momentum_accum_type: torch.dtype = torch.float32

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
        self._construct(locals())


class LARS(OwnRule):
    """λ = η·‖w‖ / (‖g‖ + β·‖w‖ + eps), 1 where a norm is 0;  v ← μ·v + lr·λ·(g + β·w);  w ← w − v.

    Weights of fewer than two dimensions (biases, and the parameters of norms) have λ = 1 and β = 0. From You, Gitman
    and Ginsburg, "Large Batch Training of Convolutional Networks", 2017. PopTorch has no such class.

    Args: lr: mandatory, here or in every parameter group
          momentum, weight_decay, eta: μ, β and η
          accum_type, velocity_accum_type: dtype of the gradient accumulator and of v, float16 or float32
          max_grad_norm: clips the global norm of the gradients, after reduction and unscaling
    """

    _kind = "lars"
    _defaults = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 5e-5, "eta": 1e-3, "eps": 0.0}
    velocity_accum_type: torch.dtype = torch.float32

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
        params = params if lr is not None else self._with_rates(params)
        self._construct(locals())


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
