"""SGD, Adam, AdamW and RMSprop with PopTorch's arguments; None says: not given, torch's default.

`foreach`, `capturable` and `differentiable` matter to `step()` on the host, not to an executor. `fused=True` does: an
update is torch's one kernel then, as it is in plain PyTorch, and not the formula that torch takes by default.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from poptorch.optim.optimizer_base import Optimizer
from poptorch.optim.own_rule import step_by_own_rule

logger = logging.getLogger("poptorch::python")


class SGD(Optimizer, torch.optim.SGD):
    """Stochastic gradient descent: v ← μ·v + (1 − d)·(g + λ·w), w ← w − lr·v.

    On devices the dampening d counts from the first step on, where `torch.optim.SGD` starts at the second.

    Args: lr: mandatory, here or in every parameter group
          loss_scaling: the loss is multiplied by it before backward, the gradients divided before the update
          use_combined_accum: recorded: one tensor for accumulator and velocity gives the same results
          velocity_scaling: recorded, and read with `use_combined_accum` only
          accum_type, velocity_accum_type: dtype of the gradient accumulator and of v, float16 or float32
          max_grad_norm: clips the global norm of the gradients, after reduction and unscaling
    """

    _kind = "sgd"
    use_combined_accum: bool = False
    velocity_accum_type: torch.dtype = torch.float32

    @property
    def _attributes(self) -> tuple[str, ...]:
        return (*super()._attributes, "velocity_scaling")  # read with combined accumulators only

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


class Adam(Optimizer, torch.optim.Adam):
    """Adam, with its weight decay as an L2 penalty in the gradient. Extra arguments as for `SGD`.

    Args: first_order_momentum_accum_type, second_order_momentum_accum_type: dtypes of the two moments
    """

    _kind = "adam"
    first_order_momentum_accum_type: torch.dtype = torch.float32
    second_order_momentum_accum_type: torch.dtype = torch.float32

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


class AdamW(Optimizer, torch.optim.AdamW):
    """Adam with decoupled weight decay. Extra arguments as for `Adam`.

    Args: bias_correction: False uses the moments as they are
    """

    _kind = "adamw"
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
        """torch's step on the host; without bias correction by the rule that executors run."""
        return super().step(closure) if self.bias_correction else step_by_own_rule(self, closure)


class RMSprop(Optimizer, torch.optim.RMSprop):
    """RMSprop, centered or not. Extra arguments as for `Adam`; gradients aren't clipped.

    Args: use_tf_variant: TensorFlow's: the square average starts at 1, eps is inside the root and the
              learning rate inside the momentum buffer
          first_order_momentum_accum_type: dtype of the momentum buffer and of the centered mean
          second_order_momentum_accum_type: dtype of the square average
    """

    _kind = "rmsprop"
    use_tf_variant: bool = False
    first_order_momentum_accum_type: torch.dtype = torch.float32
    second_order_momentum_accum_type: torch.dtype = torch.float32

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
