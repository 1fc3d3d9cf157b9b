"""The optimizers of `poptorch.optim`, with PopTorch's arguments; an argument that is None has torch's default.

Their `step()` is torch's where torch has the optimizer, and else the formula in the class's docstring. Executors call
it, as a plain loop does. `fused=True` chooses torch's fused kernel, whose last bits differ.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from popengine.torch_private import step_without_hooks
from poptorch.logs import logger
from poptorch.optim.optimizer_base import MAX_WEIGHT_NORM, Optimizer, StateKind, VariableAttributes

__all__ = ["LAMB", "LARS", "SGD", "Adam", "AdamW", "Optimizer", "RMSprop", "VariableAttributes"]

_Closure = Callable[[], Tensor] | None
_FIRST, _SECOND = "first_order_momentum_accum_type", "second_order_momentum_accum_type"
_MOMENTS = {
    "exp_avg": StateKind("Accl1", _FIRST),
    "exp_avg_sq": StateKind("Accl2", _SECOND, is_square=True),
    "step": StateKind("Step"),
}
_AT_ONCE = 1 << 20  # elements that a formula updates together: about what fits the cores' caches
_IN_A_SUM = 1 << 15  # elements that torch sums in one thread


class SGD(Optimizer, torch.optim.SGD):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Stochastic gradient descent: v ← μ·v + (1 − d)·(g + λ·w), w ← w − lr·v (momentum μ, weight decay λ).

    The first step is dampened too, and v without momentum, while `torch.optim.SGD` starts at the second step.

    >>> optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, loss_scaling=1024)

    Args: lr: mandatory, here or in every parameter group
          loss_scaling: factor of the loss before backward; gradients are divided by it before the update
          use_combined_accum, velocity_scaling: have no effect; kept for compatibility
          accum_type, velocity_accum_type: dtype of the gradient accumulator and of v, float16 or float32
          max_grad_norm: bound to which the gradients' global norm is clipped, after reduction and unscaling
    """

    _states = {"momentum_buffer": StateKind("Accl1", "velocity_accum_type", "momentum")}
    _needs_lr = True
    _more_rates = ("velocity_scaling",)  # of combined accumulators
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

    def step(self, closure: _Closure = None) -> Any:  # type: ignore[override]
        """Update the weights by torch's `step()`, from velocities of 0."""
        dampened = [group for group in self.param_groups if group["dampening"] and not group["momentum"]]
        rates = [group["lr"] for group in dampened]
        for group in dampened:  # which torch doesn't
            group["lr"] = group["lr"] * (1 - group["dampening"])
        try:
            return step_without_hooks(torch.optim.SGD)(self, closure)
        finally:
            for group, rate in zip(dampened, rates, strict=True):
                group["lr"] = rate


class _Moments(Optimizer):
    _states = _MOMENTS
    first_order_momentum_accum_type: torch.dtype = torch.float32
    second_order_momentum_accum_type: torch.dtype = torch.float32


class Adam(_Moments, torch.optim.Adam):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Adam, with weight decay as an L2 penalty in the gradient. `SGD` describes the common arguments.
    Defaults: lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.

    Args: first_order_momentum_accum_type, second_order_momentum_accum_type: dtypes of the two moments
    """

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

    bias_correction: bool = True
    _arguments = """
        lr betas eps weight_decay amsgrad maximize foreach capturable differentiable fused loss_scaling
        bias_correction accum_type first_order_momentum_accum_type second_order_momentum_accum_type
        max_grad_norm
    """

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        has_complex, steps = super()._init_group(group, *lists), lists[-1]
        if not self.bias_correction:  # torch divides the moments by 1 - beta ** step
            torch._foreach_add_(steps, 1.0)
            steps[:] = [torch.full_like(step, math.inf) for step in steps]
        return has_complex


class RMSprop(_Moments, torch.optim.RMSprop):  # pyright: ignore[reportIncompatibleMethodOverride]
    """RMSprop, centered or not. `SGD` describes the common arguments; there is none for clipping.
    Defaults: lr=1e-2, alpha=0.99, eps=1e-8, weight_decay=0, momentum=0, centered=False.

    Args: use_tf_variant: use TensorFlow's rule: the square average starts at 1, eps is inside the root, and
              the learning rate inside the momentum buffer
          first_order_momentum_accum_type: dtype of the momentum buffer and of the centered mean
          second_order_momentum_accum_type: dtype of the square average
    """

    _states = {
        "square_avg": StateKind("Accl1", _SECOND, is_square=True),
        "momentum_buffer": StateKind("Accl2", _FIRST, "momentum"),
        "grad_avg": StateKind("Accl3", _FIRST, "centered"),
        "step": StateKind(""),
    }
    use_tf_variant: bool = False
    _arguments = """
        lr alpha eps weight_decay momentum centered foreach maximize differentiable loss_scaling accum_type
        first_order_momentum_accum_type second_order_momentum_accum_type use_tf_variant * capturable
    """

    def _first_state(self, name: str, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        state = super()._first_state(name, parameter, group)
        return state.fill_(1) if self.use_tf_variant and name == "square_avg" else state

    def step(self, closure: _Closure = None) -> Any:  # type: ignore[override]
        """Update the weights by torch's `step()`, or TensorFlow's rule: with s the running mean of g², minus, if
        centered, the square of the running mean of g: b ← μ·b + lr·g / √(s + eps);  w ← w − b."""
        if not self.use_tf_variant:
            return step_without_hooks(torch.optim.RMSprop)(self, closure)
        return _step_by_formula(self, closure, self._update)

    def _update(self, group: dict[str, Any], chunk: "_Parameters") -> None:
        lr, alpha, momentum = group["lr"], group["alpha"], group["momentum"]
        gradients, squares = chunk.gradients(group), chunk.states("square_avg")
        torch._foreach_mul_(squares, alpha)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - alpha)
        if group["centered"]:
            means = chunk.states("grad_avg")
            torch._foreach_lerp_(means, gradients, 1 - alpha)
            squares = torch._foreach_addcmul(squares, means, means, -1)
        roots = torch._foreach_sqrt(torch._foreach_add(squares, group["eps"]))
        if momentum > 0:
            buffers = chunk.states("momentum_buffer")
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_addcdiv_(buffers, gradients, roots, lr)
            torch._foreach_sub_(chunk.weights, buffers)
        else:
            torch._foreach_addcdiv_(chunk.weights, gradients, roots, -lr)


class LAMB(_Moments, torch.optim.Optimizer):
    """Adam with steps scaled layer by layer: w ← w − lr·u·min(‖w‖, max_weight_norm) / ‖u‖, or w − lr·u if a norm is 0.

    The step is u = m̂ / (√v̂ + eps) + λ·w, with the moments m̂ and v̂ and the weight decay λ. From You et al., "Large Batch
    Optimization for Deep Learning", 2019. A norm is that of one weight.

    Args: bias_correction: False uses the moments without dividing them by 1 − β^step
          max_weight_norm: may also be a key of a parameter group; None is 65500
    Defaults: lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0. `Adam` describes the common arguments.
    """

    _defaults = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, max_weight_norm=MAX_WEIGHT_NORM)
    bias_correction: bool = True
    _arguments = """
        lr betas eps weight_decay bias_correction loss_scaling max_weight_norm accum_type
        first_order_momentum_accum_type second_order_momentum_accum_type
    """

    def step(self, closure: _Closure = None) -> Any:  # type: ignore[override]
        """Update the weights that have gradients; return the result of `closure`, which is called first."""
        return _step_by_formula(self, closure, self._update)

    def _update(self, group: dict[str, Any], chunk: "_Parameters") -> None:
        (beta1, beta2), gradients = group["betas"], chunk.gradients({})
        means, squares = chunk.states("exp_avg"), chunk.states("exp_avg_sq")
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        counts = [step.item() if self.bias_correction else math.inf for step in chunk.states("step")]
        # m̂ / (√v̂ + eps) = m / (√v + r·eps) · r / (1 − β₁^step), with r = √(1 − β₂^step).
        roots, factors = torch._foreach_sqrt(squares), [(1 - beta2**count) ** 0.5 for count in counts]
        torch._foreach_add_(roots, [group["eps"] * factor for factor in factors])
        steps = torch._foreach_mul(chunk.weights, group["weight_decay"])
        scales = [factor / (1 - beta1**count) for factor, count in zip(factors, counts, strict=True)]
        torch._foreach_addcdiv_(steps, means, roots, scales)
        bound = group["max_weight_norm"]
        sizes = chunk.norms(chunk.weights).clamp(max=MAX_WEIGHT_NORM if bound is None else bound)
        lengths = chunk.norms(steps)
        trust = torch.where((sizes == 0) | (lengths == 0), 1.0, sizes / lengths)
        torch._foreach_mul_(steps, chunk.by_weight(trust))
        torch._foreach_add_(chunk.weights, steps, alpha=-group["lr"])


class LARS(Optimizer, torch.optim.Optimizer):
    """SGD with steps scaled layer by layer: v ← μ·v + lr·λ·(g + β·w), w ← w − v. (Pando.)

    λ = η·‖w‖ / (‖g‖ + β·‖w‖ + eps), or 1 where a norm is 0. Weights of fewer than two dimensions (biases, and
    the parameters of norms) have λ = 1 and β = 0. From You, Gitman and Ginsburg, "Large Batch Training of
    Convolutional Networks", 2017.

    Args: momentum, weight_decay, eta: μ, β and η. `SGD` describes the common arguments.
    """

    _states = {"momentum_buffer": StateKind("Accl1", "velocity_accum_type")}
    _needs_lr = True
    _defaults = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 5e-5, "eta": 1e-3, "eps": 0.0}
    velocity_accum_type: torch.dtype = torch.float32
    _arguments = """
        lr momentum weight_decay eta eps loss_scaling accum_type velocity_accum_type max_grad_norm
    """

    def step(self, closure: _Closure = None) -> Any:  # type: ignore[override]
        """Update the weights that have gradients; return the result of `closure`, which is called first."""
        return _step_by_formula(self, closure, self._update)

    def _update(self, group: dict[str, Any], chunk: "_Parameters") -> None:
        decay, velocities, weights = group["weight_decay"], chunk.states("momentum_buffer"), chunk.weights
        gradients = chunk.gradients({})
        sizes, lengths = chunk.norms(weights), chunk.norms(gradients)
        rates = group["eta"] * sizes / (lengths + decay * sizes + group["eps"])
        rates = chunk.by_weight(torch.where((sizes == 0) | (lengths == 0), 1.0, rates))
        scaled = [i for i, weight in enumerate(weights) if weight.dim() - chunk.has_rows[i] > 1]
        if scaled:
            steps = torch._foreach_add(
                [gradients[i] for i in scaled], [weights[i] for i in scaled], alpha=decay
            )
            torch._foreach_mul_(steps, [rates[i] for i in scaled])
            gradients = [*gradients]
            for i, step in zip(scaled, steps, strict=True):
                gradients[i] = step
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, gradients, alpha=group["lr"])
        torch._foreach_sub_(weights, velocities)


# ---- formulas ------------------------------------------------------------------------------------------------


class _Parameters:
    """Some parameters of a group that a formula updates together; complex ones as real numbers."""

    def __init__(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        self._parameters, self._states = parameters, [optimizer.state[parameter] for parameter in parameters]
        # By parameter, whether it has a row for each group of replicas, which are weights of their own.
        self.has_rows = [id(parameter) in optimizer._per_replica for parameter in parameters]
        self.weights = [*map(_as_real, parameters)]

    def gradients(self, group: dict[str, Any]) -> list[Tensor]:
        """Return the gradients, with the sign and the L2 penalty, λ·w, that a group asks for; not to be written to."""
        gradients: Any = [_as_real(p.grad) for p in self._parameters if p.grad is not None]
        if group.get("maximize"):
            gradients = torch._foreach_neg(gradients)
        decay = group.get("weight_decay", 0)
        return list(torch._foreach_add(gradients, self.weights, alpha=decay)) if decay else gradients

    def states(self, name: str) -> list[Tensor]:
        """Return the state of this name of each parameter."""
        return [_as_real(state[name]) for state in self._states]

    def norms(self, values: Sequence[Tensor]) -> Tensor:
        """Return the norm of each of these values of the parameters, and of each row of those with rows: [norms]."""
        parts = [v.unbind() if rows else [v] for v, rows in zip(values, self.has_rows, strict=True)]
        return torch.stack([_norm(row) for part in parts for row in part])

    def by_weight(self, values: Tensor) -> list[Tensor]:
        """Return numbers in the order of `norms` as those of each parameter, which broadcast to it."""
        numbers = values.split(
            [len(weight) if rows else 1 for weight, rows in zip(self.weights, self.has_rows, strict=True)]
        )
        return [
            number.reshape(-1, *[1] * (weight.dim() - 1)) if rows else number.reshape(())
            for number, weight, rows in zip(numbers, self.weights, self.has_rows, strict=True)
        ]


@torch.no_grad()
def _step_by_formula(
    optimizer: Any, closure: _Closure, update: Callable[[dict[str, Any], _Parameters], None]
) -> Any:
    """Update the weights that have gradients by a formula; return the result of `closure`, which is called first."""
    with torch.enable_grad():
        loss = None if closure is None else closure()
    for group in optimizer.param_groups:
        optimizer._complete_states(group)
        for parameters in _in_parts([p for p in group["params"] if p.grad is not None]):
            chunk = _Parameters(optimizer, parameters)
            if "step" in optimizer._states:
                torch._foreach_add_(chunk.states("step"), 1)
            update(group, chunk)
    return loss


def _in_parts(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield neighbours on one device: on the CPU about `_AT_ONCE` elements together."""
    part, count = list[Tensor](), 0
    for parameter in parameters:
        is_full = parameter.is_cpu and count + parameter.numel() > _AT_ONCE
        if part and (is_full or parameter.device != part[0].device):
            yield part
            part, count = [], 0
        part.append(parameter)
        count += parameter.numel()
    if part:
        yield part


def _norm(value: Tensor) -> Tensor:
    """Return the norm of a tensor: with the same bits for each number of threads."""
    flat = value.reshape(-1)
    if value.is_cpu and len(flat) > _IN_A_SUM:  # a norm of norms of parts, each by one thread
        whole = len(flat) // _IN_A_SUM * _IN_A_SUM
        norms = torch.linalg.vector_norm(flat[:whole].view(-1, _IN_A_SUM), dim=1)
        flat = torch.cat([norms, torch.linalg.vector_norm(flat[whole:]).view(1)])
    return torch.linalg.vector_norm(flat)


def _as_real(value: Tensor) -> Tensor:
    return torch.view_as_real(value) if value.is_complex() else value
