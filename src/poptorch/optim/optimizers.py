"""The optimizers of `poptorch.optim`, with PopTorch's arguments; an argument that is None has torch's default.

`foreach`, `capturable` and `differentiable` change `step()` on the host, not executors. With `fused=True` executors
update by torch's single kernel, as plain PyTorch does, and not by the formula that torch uses by default.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from popengine.update.group_update import init_state, update
from poptorch.optim.freeze_optimizer import freeze_optimizer
from poptorch.optim.optimizer_base import Optimizer, VariableAttributes
from poptorch.optim.rates import MAX_WEIGHT_NORM

__all__ = ["LAMB", "LARS", "SGD", "Adam", "AdamW", "Optimizer", "RMSprop", "VariableAttributes"]

logger = logging.getLogger("poptorch::python")


class SGD(Optimizer, torch.optim.SGD):
    """Stochastic gradient descent: v ← μ·v + (1 − d)·(g + λ·w), w ← w − lr·v.

    Executors apply the dampening d from the first step on, where `torch.optim.SGD` starts at the second.

    Args: lr: mandatory, here or in every parameter group
          loss_scaling: the loss is multiplied by it before backward, the gradients divided before the update
          use_combined_accum: recorded: one tensor for accumulator and velocity gives the same results
          velocity_scaling: recorded, and read with `use_combined_accum` only
          accum_type, velocity_accum_type: dtype of the gradient accumulator and of v, float16 or float32
          max_grad_norm: clips the global norm of the gradients, after reduction and unscaling
    """

    _kind = "sgd"
    _more_rates = ("velocity_scaling",)  # of combined accumulators
    dampens_first_step = True
    use_combined_accum: bool = False
    velocity_accum_type: torch.dtype = torch.float32

    def __init__(
        self,
        params: ParamsT,
        lr: float | None = None,
        momentum: float | None = None,
        dampening: float | None = None,
        weight_decay: float | None = None,
        nesterov: bool | None = None,
        maximize: bool | None = None,
        foreach: bool | None = None,
        differentiable: bool | None = None,
        loss_scaling: float | None = None,
        velocity_scaling: float | None = None,
        use_combined_accum: bool | None = None,
        accum_type: torch.dtype | None = None,
        velocity_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
        *,
        fused: bool | None = None,
    ) -> None:
        params = params if lr is not None else self._with_rates(params)
        combined = bool(use_combined_accum)
        if velocity_scaling is not None and not combined:
            logger.warning(
                "SGD ignores velocity_scaling=%s: it needs use_combined_accum=True; "
                "with separate accumulators loss_scaling alone scales",
                velocity_scaling,
            )
            velocity_scaling = None
        self._construct(locals())
        self.use_combined_accum = combined
        if combined:
            self.defaults["velocity_scaling"] = 1.0 if velocity_scaling is None else velocity_scaling
            for group in self.param_groups:
                group.setdefault("velocity_scaling", self.defaults["velocity_scaling"])


class _Moments(Optimizer):
    """Base class of optimizers with two states whose dtypes can be chosen."""

    first_order_momentum_accum_type: torch.dtype = torch.float32
    second_order_momentum_accum_type: torch.dtype = torch.float32


class Adam(_Moments, torch.optim.Adam):
    """Adam, with its weight decay as an L2 penalty in the gradient. Extra arguments as for `SGD`.

    Args: first_order_momentum_accum_type, second_order_momentum_accum_type: dtypes of the two moments
    """

    _kind = "adam"

    def __init__(
        self,
        params: ParamsT,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool | None = None,
        foreach: bool | None = None,
        maximize: bool | None = None,
        capturable: bool | None = None,
        differentiable: bool | None = None,
        fused: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
        *,
        decoupled_weight_decay: bool | None = None,
    ) -> None:
        self._construct(locals())


class AdamW(_Moments, torch.optim.AdamW):
    """Adam with decoupled weight decay. Extra arguments as for `Adam`.

    Args: bias_correction: False uses the moments without dividing them by 1 − β^step
    """

    _kind = "adamw"
    bias_correction: bool = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool | None = None,
        maximize: bool | None = None,
        foreach: bool | None = None,
        capturable: bool | None = None,
        differentiable: bool | None = None,
        fused: bool | None = None,
        loss_scaling: float | None = None,
        bias_correction: bool | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        self._construct(locals())

    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:  # type: ignore[override]
        """Update the host's weights by torch's step; without bias correction, by the rule that executors run."""
        return super().step(closure) if self.bias_correction else step_by_own_rule(self, closure)


class RMSprop(_Moments, torch.optim.RMSprop):
    """RMSprop, centered or not. Extra arguments as for `Adam`; gradients aren't clipped.

    Args: use_tf_variant: TensorFlow's: the square average starts at 1, eps is inside the root and the
              learning rate inside the momentum buffer
          first_order_momentum_accum_type: dtype of the momentum buffer and of the centered mean
          second_order_momentum_accum_type: dtype of the square average
    """

    _kind = "rmsprop"
    use_tf_variant: bool = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | None = None,
        alpha: float | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        momentum: float | None = None,
        centered: bool | None = None,
        foreach: bool | None = None,
        maximize: bool | None = None,
        differentiable: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        use_tf_variant: bool | None = None,
        *,
        capturable: bool | None = None,
    ) -> None:
        self._construct(locals())
        self.use_tf_variant = bool(use_tf_variant)


class OwnRule(Optimizer, torch.optim.Optimizer):
    """Base class of optimizers that torch doesn't have: `step()` on the host runs the rule that executors run."""

    def __init__(self, params: ParamsT, **rates: Any) -> None:
        self._construct({"params": params, **rates})

    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:  # type: ignore[override]
        """Update the host's weights from their `.grad`."""
        return step_by_own_rule(self, closure)


class LAMB(OwnRule, _Moments):
    """Adam with steps scaled layer by layer: u = m̂ / (√v̂ + eps) + λ·w;  w ← w − lr·u·min(‖w‖, max_weight_norm) / ‖u‖.

    Args: bias_correction: False uses the moments without dividing them by 1 − β^step
          max_weight_norm: may also be a key of a parameter group; None is 65500
    Defaults: lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0. Extra arguments as for `Adam`.
    """

    _kind = "lamb"
    _defaults = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, max_weight_norm=MAX_WEIGHT_NORM)
    bias_correction: bool = True

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
    """SGD with steps scaled layer by layer: v ← μ·v + lr·λ·(g + β·w);  w ← w − v;  λ = η·‖w‖ / (‖g‖ + β·‖w‖ + eps).

    λ is 1 where a norm is 0. Weights of fewer than two dimensions (biases, and the parameters of norms) have λ = 1 and
    β = 0. From You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks", 2017. PopTorch has no such
    class.

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
    """Update the host's weights by the optimizer's rule in `RULES`. Returns the loss of `closure`."""
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    everything = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    rule, hyper = freeze_optimizer(optimizer, {id(value): str(n) for n, value in enumerate(everything)})
    for group, rates in zip(optimizer.param_groups, hyper.groups, strict=True):
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in parameters:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = init_state(rule, parameter)
        gradients = [parameter.grad.clone() for parameter in parameters]  # a rule may overwrite them
        update(rule, rates, parameters, gradients, [optimizer.state[parameter] for parameter in parameters])
    return loss
