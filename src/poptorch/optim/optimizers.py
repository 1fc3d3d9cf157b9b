"""The optimizers of `poptorch.optim`, with PopTorch's arguments; an argument that is None has torch's default.

`foreach`, `capturable` and `differentiable` change `step()` on the host and have no effect on executors. With
`fused=True` executors call torch's fused kernel, whose last bits differ from those of the default formula.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from popengine.update.group_update import init_state, update
from poptorch.logs import logger
from poptorch.optim.freeze_optimizer import freeze_optimizer
from poptorch.optim.optimizer_base import MAX_WEIGHT_NORM, Optimizer, VariableAttributes, parameters_of

__all__ = ["LAMB", "LARS", "SGD", "Adam", "AdamW", "Optimizer", "RMSprop", "VariableAttributes"]


@torch.no_grad()
def step_by_engine_rule(optimizer: torch.optim.Optimizer, closure: Callable[[], Tensor] | None = None) -> Any:
    """Update the host's weights, from their `.grad`, and `optimizer.state` in place, by the executors' rule.
    Return the result of `closure`, which is called first; None without a closure."""
    with torch.enable_grad():
        loss = None if closure is None else closure()
    names = {id(value): str(id(value)) for value in parameters_of(optimizer)}
    rule, hyper = freeze_optimizer(optimizer, names)
    for group, rates in zip(optimizer.param_groups, hyper.groups, strict=True):
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        gradients = [parameter.grad.clone() for parameter in parameters]  # a rule may overwrite them
        for parameter in parameters:
            optimizer.state[parameter] = optimizer.state[parameter] or init_state(rule, parameter)
        update(rule, rates, parameters, gradients, [optimizer.state[parameter] for parameter in parameters])
    return loss


class SGD(Optimizer, torch.optim.SGD):
    """Stochastic gradient descent: v ← μ·v + (1 − d)·(g + λ·w), w ← w − lr·v (momentum μ, weight decay λ).

    Executors apply the dampening d from the first step on, while `torch.optim.SGD` starts at the second.

    >>> optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, loss_scaling=1024)

    Args: lr: mandatory, here or in every parameter group
          loss_scaling: factor of the loss before backward; gradients are divided by it before the update
          use_combined_accum, velocity_scaling: have no effect; kept for compatibility
          accum_type, velocity_accum_type: dtype of the gradient accumulator and of v, float16 or float32
          max_grad_norm: bound to which the gradients' global norm is clipped, after reduction and unscaling
    """

    _kind = "sgd"
    _needs_lr = True
    _more_rates = ("velocity_scaling",)  # of combined accumulators
    dampens_first_step = True
    use_combined_accum: bool = False
    velocity_accum_type: torch.dtype = torch.float32
    _arguments = """
        lr momentum dampening weight_decay nesterov maximize foreach differentiable loss_scaling
        velocity_scaling use_combined_accum accum_type velocity_accum_type max_grad_norm * fused
    """

    def _init_from_arguments(self, arguments: dict[str, Any]) -> None:
        scaling, is_combined = arguments.get("velocity_scaling"), arguments.get("use_combined_accum")
        if scaling is not None and not is_combined:
            logger.warning(
                "SGD ignores velocity_scaling=%s: it needs use_combined_accum=True; "
                "with separate accumulators loss_scaling alone scales",
                scaling,
            )
            arguments["velocity_scaling"] = scaling = None
        super()._init_from_arguments(arguments)
        if is_combined:
            self.defaults["velocity_scaling"] = 1.0 if scaling is None else scaling
            for group in self.param_groups:
                group.setdefault("velocity_scaling", self.defaults["velocity_scaling"])


class _Moments(Optimizer):
    first_order_momentum_accum_type: torch.dtype = torch.float32
    second_order_momentum_accum_type: torch.dtype = torch.float32


class Adam(_Moments, torch.optim.Adam):
    """Adam, with weight decay as an L2 penalty in the gradient. `SGD` describes the common arguments.
    Defaults: lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.

    Args: first_order_momentum_accum_type, second_order_momentum_accum_type: dtypes of the two moments
    """

    _kind = "adam"
    _arguments = """
        lr betas eps weight_decay amsgrad foreach maximize capturable differentiable fused loss_scaling
        accum_type first_order_momentum_accum_type second_order_momentum_accum_type max_grad_norm *
        decoupled_weight_decay
    """


class AdamW(_Moments, torch.optim.AdamW):
    """Adam with decoupled weight decay. `Adam` and `SGD` describe the common arguments.
    Defaults: as for `Adam`, but weight_decay=1e-2.

    Args: bias_correction: False uses the moments without dividing them by 1 − β^step
    """

    _kind = "adamw"
    bias_correction: bool = True
    _arguments = """
        lr betas eps weight_decay amsgrad maximize foreach capturable differentiable fused loss_scaling
        bias_correction accum_type first_order_momentum_accum_type second_order_momentum_accum_type
        max_grad_norm
    """

    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:  # type: ignore[override]
        """Update the host's weights by torch's `step`, or (`bias_correction` off) by the executors' rule."""
        return super().step(closure) if self.bias_correction else step_by_engine_rule(self, closure)


class RMSprop(_Moments, torch.optim.RMSprop):
    """RMSprop, centered or not. `SGD` describes the common arguments; there is none for clipping.
    Defaults: lr=1e-2, alpha=0.99, eps=1e-8, weight_decay=0, momentum=0, centered=False.

    Args: use_tf_variant: use TensorFlow's rule: the square average starts at 1, eps is inside the root, and
              the learning rate inside the momentum buffer
          first_order_momentum_accum_type: dtype of the momentum buffer and of the centered mean
          second_order_momentum_accum_type: dtype of the square average
    """

    _kind = "rmsprop"
    use_tf_variant: bool = False
    _arguments = """
        lr alpha eps weight_decay momentum centered foreach maximize differentiable loss_scaling accum_type
        first_order_momentum_accum_type second_order_momentum_accum_type use_tf_variant * capturable
    """


class OwnRule(Optimizer, torch.optim.Optimizer):
    """Base class of optimizers that torch lacks. On the host, `step()` runs the rule of executors."""

    def __init__(self, params: ParamsT, **rates: Any) -> None:
        self._init_from_arguments({"params": params, **rates})

    step = step_by_engine_rule  # type: ignore[assignment]


class LAMB(OwnRule, _Moments):
    """Adam with steps scaled layer by layer: w ← w − lr·u·min(‖w‖, max_weight_norm) / ‖u‖.

    The step is u = m̂ / (√v̂ + eps) + λ·w, with the moments m̂ and v̂ and the weight decay λ.

    Args: bias_correction: False uses the moments without dividing them by 1 − β^step
          max_weight_norm: may also be a key of a parameter group; None is 65500
    Defaults: lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0. `Adam` describes the common arguments.
    """

    _kind = "lamb"
    _defaults = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, max_weight_norm=MAX_WEIGHT_NORM)
    bias_correction: bool = True
    _arguments = """
        lr betas eps weight_decay bias_correction loss_scaling max_weight_norm accum_type
        first_order_momentum_accum_type second_order_momentum_accum_type
    """


class LARS(OwnRule):
    """SGD with steps scaled layer by layer: v ← μ·v + lr·λ·(g + β·w), w ← w − v. (Pando.)

    λ = η·‖w‖ / (‖g‖ + β·‖w‖ + eps), or 1 where a norm is 0. Weights of fewer than two dimensions (biases, and
    the parameters of norms) have λ = 1 and β = 0. From You, Gitman and Ginsburg, "Large Batch Training of
    Convolutional Networks", 2017.

    Args: momentum, weight_decay, eta: μ, β and η. `SGD` describes the common arguments.
    """

    _kind = "lars"
    _needs_lr = True
    _defaults = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 5e-5, "eta": 1e-3, "eps": 0.0}
    velocity_accum_type: torch.dtype = torch.float32
    _arguments = """
        lr momentum weight_decay eta eps loss_scaling accum_type velocity_accum_type max_grad_norm
    """
