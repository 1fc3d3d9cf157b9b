"""The formulas of the update rules: in-place arithmetic on lists of float32 (float64) tensors; fused kernels.

The arguments of a formula are parameters of one group (or ranges of their elements), their gradients (reduced, without
loss scale, clipped, for `maximize` negated; formulas may overwrite them) and their states, which formulas update;
"step" counts this update already. On CPUs the results of torch's optimizers are torch's to the last bit.
"""

from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from ..settings import Optimizer
from ..torch_private import fused_sgd_

Rates = Mapping[str, float]
State = dict[str, Tensor]  # of one parameter, by name


class Step(NamedTuple):
    """The arguments of a formula: parameters that are updated together, their gradients, states and rates."""

    optimizer: Optimizer
    group: Rates
    parameters: list[Tensor]
    gradients: list[Tensor]
    states: list[State]

    def state(self, name: str) -> list[Tensor]:
        """Return the state tensor called `name` of each parameter."""
        return [*map(itemgetter(name), self.states)]


Formula = Callable[[Step], None]


def _decay_gradients(step: Step) -> None:
    """Add the L2 penalty, weight_decay · w, to the gradients in place."""
    if step.group["weight_decay"] != 0:
        torch._foreach_add_(step.gradients, step.parameters, alpha=step.group["weight_decay"])


def _counts_of_updates(step: Step) -> list[float]:
    """Return the number of updates of each parameter, this update included, from the state "step"."""
    return [*map(Tensor.item, step.state("step"))]


def sgd(step: Step) -> None:
    """Update the weights by SGD: v ← μ·v + (1 − d)·(g + λ·w); w ← w − lr·v. Nesterov: w ← w − lr·(g + λ·w + μ·v).

    g: gradient, v: velocity, μ: momentum, d: dampening, λ: weight decay. With the flag `torch_dampening`, as in
    torch.optim.SGD, d is 0 in the first update and if μ is 0.
    """
    optimizer, group, parameters, gradients, _ = step
    lr, momentum, dampening = group["lr"], group["momentum"], group.get("dampening", 0.0)
    _decay_gradients(step)
    if momentum != 0:
        velocities = step.state("momentum_buffer")
        torch._foreach_mul_(velocities, momentum)
        torch._foreach_add_(velocities, gradients, alpha=1 - dampening)
        if optimizer.flags.get("torch_dampening"):
            for index, count in enumerate(_counts_of_updates(step)):
                if count == 1:
                    velocities[index].copy_(gradients[index])
        if group.get("nesterov"):
            torch._foreach_add_(gradients, velocities, alpha=momentum)
        else:
            gradients = velocities
    elif dampening != 0 and not optimizer.flags.get("torch_dampening"):
        # Without momentum the step is a velocity of this update alone, which is dampened too.
        torch._foreach_mul_(gradients, 1 - dampening)
    torch._foreach_add_(parameters, gradients, alpha=-lr)


def adam(step: Step) -> None:
    """Update the weights by Adam: w ← w − lr·m̂ / (√v̂ + eps), with bias-corrected moments of g + λ·w."""
    _decay_gradients(step)
    _step_by_moments(step)


def adamw(step: Step) -> None:
    """Update the weights by AdamW: w ← (1 − lr·λ)·w − lr·m̂ / (√v̂ + eps), with weight decay λ."""
    if step.group["weight_decay"] != 0:
        torch._foreach_mul_(step.parameters, 1 - step.group["lr"] * step.group["weight_decay"])
    _step_by_moments(step)


def _step_by_moments(step: Step) -> None:
    """Update the moments, then the weights: w ← w − lr·m̂ / (√v̂ + eps). The gradients are overwritten."""
    _, group, parameters, gradients, _ = step
    corrections1, corrections2 = _update_moments(step)
    roots = gradients  # no longer needed; an allocation would cost more than the computation
    if roots[0].is_cpu:
        for root, square in zip(roots, step.state("exp_avg_sq"), strict=True):
            torch.sqrt(square, out=root)
    else:
        torch._foreach_copy_(roots, step.state("exp_avg_sq"))
        torch._foreach_sqrt_(roots)
    torch._foreach_div_(roots, [correction**0.5 for correction in corrections2])
    torch._foreach_add_(roots, group["eps"])
    sizes = [-(group["lr"] / correction) for correction in corrections1]
    torch._foreach_addcdiv_(parameters, step.state("exp_avg"), roots, sizes)


def _update_moments(step: Step) -> tuple[list[float], list[float]]:
    """Update both moments in place; return the divisors that correct the first ones' bias, and the second ones'."""
    optimizer, group, _, gradients, states = step
    beta1, beta2 = group["beta1"], group["beta2"]
    torch._foreach_lerp_(step.state("exp_avg"), gradients, 1 - beta1)
    squares = step.state("exp_avg_sq")
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    if not optimizer.flags.get("bias_correction", True):
        return [1.0] * len(states), [1.0] * len(states)
    counts = _counts_of_updates(step)
    return [1 - beta1**count for count in counts], [1 - beta2**count for count in counts]


def rmsprop(step: Step) -> None:
    """Update the weights by RMSprop: b ← μ·b + g / (√s + eps);  w ← w − lr·b.

    Flag `use_tf_variant`: b ← μ·b + lr·g / √(s + eps);  w ← w − b. g: gradient + λ·w; s: running mean of g²,
    minus, if the flag `centered` is on, the square of the running mean of g.
    """
    optimizer, group, parameters, gradients, _ = step
    lr, alpha, eps, momentum = group["lr"], group["alpha"], group["eps"], group["momentum"]
    tf_variant = optimizer.flags.get("use_tf_variant")
    _decay_gradients(step)
    squares = step.state("square_avg")
    torch._foreach_mul_(squares, alpha)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - alpha)
    if optimizer.flags.get("centered"):
        means = step.state("grad_avg")
        torch._foreach_lerp_(means, gradients, 1 - alpha)
        squares = torch._foreach_addcmul(squares, means, means, -1)
    roots = torch._foreach_sqrt(torch._foreach_add(squares, eps) if tf_variant else squares)
    if not tf_variant:
        torch._foreach_add_(roots, eps)
    if momentum > 0:
        buffers = step.state("momentum_buffer")
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_addcdiv_(buffers, gradients, roots, lr if tf_variant else 1)
        torch._foreach_add_(parameters, buffers, alpha=-1 if tf_variant else -lr)
    else:
        torch._foreach_addcdiv_(parameters, gradients, roots, -lr)


def compute_lamb_steps(step: Step) -> None:
    """Update the moments, overwrite gradients with steps u = m̂ / (√v̂ + eps) + λ·w, without trust ratio."""
    _, group, _, gradients, _ = step
    corrections1, corrections2 = _update_moments(step)
    roots = torch._foreach_sqrt(step.state("exp_avg_sq"))
    torch._foreach_div_(roots, [correction**0.5 for correction in corrections2])
    torch._foreach_add_(roots, group["eps"])
    torch._foreach_copy_(gradients, step.state("exp_avg"))
    torch._foreach_div_(gradients, corrections1)
    torch._foreach_div_(gradients, roots)
    _decay_gradients(step)


def lamb_trust_ratios(group: Rates, sizes: Tensor, lengths: Tensor) -> Tensor:
    """Return the LAMB trust ratio of each parameter: min(‖w‖, max_weight_norm) / ‖u‖; 1 if a norm is 0. `sizes` are
    ‖w‖, `lengths` ‖u‖ of the steps that `compute_lamb_steps` computed."""
    sizes = sizes.clamp(max=group["max_weight_norm"])
    return torch.where((sizes == 0) | (lengths == 0), 1.0, sizes / lengths)


def lamb(step: Step) -> None:
    """Update the weights by LAMB: w ← w − lr·trust·u. `step.gradients` are u, which `compute_lamb_steps` computed."""
    torch._foreach_mul_(step.gradients, step.state("trust"))
    torch._foreach_add_(step.parameters, step.gradients, alpha=-step.group["lr"])


def lars_trust_ratios(group: Rates, sizes: Tensor, lengths: Tensor) -> Tensor:
    """Return the LARS trust ratio of each parameter: η·‖w‖ / (‖g‖ + β·‖w‖ + eps); 1 if a norm is 0. `sizes` are ‖w‖,
    `lengths` ‖g‖; η is "eta", β "weight_decay"."""
    ratios = group["eta"] * sizes / (lengths + group["weight_decay"] * sizes + group["eps"])
    return torch.where((sizes == 0) | (lengths == 0), 1.0, ratios)


def lars(step: Step) -> None:
    """Update the weights by LARS: v ← μ·v + lr·trust·(g + β·w);  w ← w − v.

    For parameters without the state "trust" (biases and norm layers): v ← μ·v + lr·g.
    """
    _, group, parameters, gradients, states = step
    chosen = [i for i, state in enumerate(states) if "trust" in state]
    steps = [gradients[i] for i in chosen]
    if chosen:
        _decay_gradients(step._replace(parameters=[parameters[i] for i in chosen], gradients=steps))
        torch._foreach_mul_(steps, [states[i]["trust"] for i in chosen])
    velocities = step.state("momentum_buffer")
    torch._foreach_mul_(velocities, group["momentum"])
    torch._foreach_add_(velocities, gradients, alpha=group["lr"])
    torch._foreach_sub_(parameters, velocities)


# ---- torch's fused kernels -----------------------------------------------------------------------------------

# One kernel updates all parameters; its results differ from those of the formula above by rounding.


def _run_fused_adam(kernel: str, step: Step) -> None:
    _, rates, parameters, gradients, _ = step
    counts = step.state("step")
    if not parameters[0].is_cpu:  # one upload, for which the host does not wait
        counts = list(torch.stack(counts).to(parameters[0].device, non_blocking=True).unbind())
    tensors = parameters, gradients, step.state("exp_avg"), step.state("exp_avg_sq"), [], counts
    given = {name: rates[name] for name in ("lr", "beta1", "beta2", "weight_decay", "eps")}
    getattr(torch, kernel)(*tensors, **given, amsgrad=False, maximize=bool(rates.get("maximize")))


fused_adam, fused_adamw = (partial(_run_fused_adam, name) for name in ("_fused_adam_", "_fused_adamw_"))


def fused_sgd(step: Step) -> None:
    optimizer, rates, parameters, gradients, _ = step
    rate, momentum, dampening = rates["lr"], rates["momentum"], rates.get("dampening", 0.0)
    is_as_torch = bool(optimizer.flags.get("torch_dampening"))
    if momentum == 0 and dampening != 0 and not is_as_torch:
        rate = rate * (1 - dampening)  # the kernel dampens velocities only; see `sgd`
    velocities = step.state("momentum_buffer") if momentum != 0 else []
    # Velocities start as zeros. Only torch's optimizer leaves the first gradient undampened.
    is_first = [count == 1 for count in _counts_of_updates(step)] if velocities and is_as_torch else [False]
    for first in set(is_first):
        same = [i for i in range(len(parameters)) if is_first[i % len(is_first)] == first]
        fused_sgd_(
            [parameters[i] for i in same],
            [gradients[i] for i in same],
            [velocities[i] for i in same] if velocities else [],
            weight_decay=rates["weight_decay"],
            momentum=momentum,
            lr=rate,
            dampening=dampening if momentum != 0 else 0.0,
            nesterov=bool(rates.get("nesterov")),
            maximize=bool(rates.get("maximize")),
            is_first_step=first,
        )
