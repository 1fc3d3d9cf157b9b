"""The formulas of the update rules: arithmetic on lists of float32 tensors, in place.

A formula sees some parameters of one group, their gradients (reduced, unscaled and clipped; it may overwrite
them) and their states. On CPU tensors each runs torch.optim's own sequence of operations, so that the results
are torch's to the last bit. `rules.py` says what each needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from popengine.settings import Optimizer

State = dict[str, Tensor]
Rates = Mapping[str, float]
Formula = Callable[[Optimizer, Rates, list[Tensor], list[Tensor], list[State]], None]


def _column(states: list[State], name: str) -> list[Tensor]:
    return [state[name] for state in states]


def _signed(group: Rates, gradients: list[Tensor]) -> None:
    if group.get("maximize"):
        torch._foreach_neg_(gradients)


def _decay_gradients(group: Rates, parameters: list[Tensor], gradients: list[Tensor]) -> None:
    """The L2 penalty, as a part of the gradient."""
    if group["weight_decay"] != 0:
        torch._foreach_add_(gradients, parameters, alpha=group["weight_decay"])


def _count(states: list[State]) -> list[float]:
    """Advance the steps; they are on the CPU, so that reading them waits for no device."""
    steps = _column(states, "step")
    torch._foreach_add_(steps, 1)
    return [step.item() for step in steps]


def _trust(steps: list[Tensor] | tuple[Tensor, ...], sizes: Tensor, lengths: Tensor, ratios: Tensor) -> None:
    """Scale each layer's step by its trust ratio: 1, where the norm of its weight or of its step is 0."""
    ratios = torch.where((sizes == 0) | (lengths == 0), torch.ones_like(ratios), ratios)
    torch._foreach_mul_(steps, list(ratios.unbind()))


def sgd(
    optimizer: Optimizer,
    group: Rates,
    parameters: list[Tensor],
    gradients: list[Tensor],
    states: list[State],
) -> None:
    """v ← μ·v + (1 − d)·(g + λ·w);  w ← w − lr·v,  nesterov: w ← w − lr·(g + λ·w + μ·v)."""
    lr, momentum, dampening = group["lr"], group["momentum"], group.get("dampening", 0.0)
    _signed(group, gradients)
    _decay_gradients(group, parameters, gradients)
    if momentum != 0:
        velocities = _column(states, "velocity")
        torch._foreach_mul_(velocities, momentum)
        torch._foreach_add_(velocities, gradients, alpha=1 - dampening)
        if optimizer.torch_dampening:
            for state, gradient, step in zip(states, gradients, _count(states), strict=True):
                if step == 1:
                    state["velocity"].copy_(gradient)
        if group.get("nesterov"):
            torch._foreach_add_(gradients, velocities, alpha=momentum)
        else:
            gradients = velocities
    elif dampening != 0 and not optimizer.torch_dampening:
        # The velocity is all there is of the step, also when nothing of it is carried over.
        torch._foreach_mul_(gradients, 1 - dampening)
    torch._foreach_add_(parameters, gradients, alpha=-lr)


def adam(
    optimizer: Optimizer,
    group: Rates,
    parameters: list[Tensor],
    gradients: list[Tensor],
    states: list[State],
) -> None:
    """w ← w − lr·m̂ / (√v̂ + eps); the weight decay is a part of the gradient."""
    _signed(group, gradients)
    _decay_gradients(group, parameters, gradients)
    _step_by_moments(optimizer, group, parameters, gradients, states)


def adamw(
    optimizer: Optimizer,
    group: Rates,
    parameters: list[Tensor],
    gradients: list[Tensor],
    states: list[State],
) -> None:
    """w ← (1 − lr·λ)·w − lr·m̂ / (√v̂ + eps)."""
    _signed(group, gradients)
    if group["weight_decay"] != 0:
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
    _step_by_moments(optimizer, group, parameters, gradients, states)


def _step_by_moments(
    optimizer: Optimizer,
    group: Rates,
    parameters: list[Tensor],
    gradients: list[Tensor],
    states: list[State],
) -> None:
    corrections1, corrections2 = _moments(optimizer, group, gradients, states)
    roots = torch._foreach_sqrt(_column(states, "exp_avg_sq"))
    torch._foreach_div_(roots, [correction**0.5 for correction in corrections2])
    torch._foreach_add_(roots, group["eps"])
    sizes = [-(group["lr"] / correction) for correction in corrections1]
    torch._foreach_addcdiv_(parameters, _column(states, "exp_avg"), roots, sizes)


def _moments(
    optimizer: Optimizer, group: Rates, gradients: list[Tensor], states: list[State]
) -> tuple[list[float], list[float]]:
    """Advance both moments; returns what each is to be divided by, all ones without bias correction."""
    beta1, beta2 = group["beta1"], group["beta2"]
    torch._foreach_lerp_(_column(states, "exp_avg"), gradients, 1 - beta1)
    squares = _column(states, "exp_avg_sq")
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    if not optimizer.bias_correction:
        torch._foreach_add_(_column(states, "step"), 1)
        return [1.0] * len(states), [1.0] * len(states)
    steps = _count(states)
    return [1 - beta1**step for step in steps], [1 - beta2**step for step in steps]


def rmsprop(
    optimizer: Optimizer,
    group: Rates,
    parameters: list[Tensor],
    gradients: list[Tensor],
    states: list[State],
) -> None:
    """b ← μ·b + g / (√s + eps);  w ← w − lr·b.  TensorFlow: b ← μ·b + lr·g / √(s + eps);  w ← w − b."""
    lr, alpha, eps, momentum = group["lr"], group["alpha"], group["eps"], group["momentum"]
    _signed(group, gradients)
    _decay_gradients(group, parameters, gradients)
    squares = _column(states, "square_avg")
    torch._foreach_mul_(squares, alpha)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - alpha)
    if optimizer.centered:
        means = _column(states, "grad_avg")
        torch._foreach_lerp_(means, gradients, 1 - alpha)
        squares = torch._foreach_addcmul(squares, means, means, -1)
    if optimizer.tf_variant:
        roots = torch._foreach_sqrt(torch._foreach_add(squares, eps))
    else:
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, eps)
    if momentum > 0:
        buffers = _column(states, "momentum_buffer")
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_addcdiv_(buffers, gradients, roots, lr if optimizer.tf_variant else 1)
        torch._foreach_add_(parameters, buffers, alpha=-1 if optimizer.tf_variant else -lr)
    else:
        torch._foreach_addcdiv_(parameters, gradients, roots, -lr)


def lamb(
    optimizer: Optimizer,
    group: Rates,
    parameters: list[Tensor],
    gradients: list[Tensor],
    states: list[State],
) -> None:
    """u = m̂ / (√v̂ + eps) + λ·w;  w ← w − lr·u·min(‖w‖, max) / ‖u‖, the ratio 1 where either is 0."""
    _signed(group, gradients)
    corrections1, corrections2 = _moments(optimizer, group, gradients, states)
    roots = torch._foreach_sqrt(_column(states, "exp_avg_sq"))
    torch._foreach_div_(roots, [correction**0.5 for correction in corrections2])
    torch._foreach_add_(roots, group["eps"])
    directions = torch._foreach_div(_column(states, "exp_avg"), corrections1)
    torch._foreach_div_(directions, roots)
    if group["weight_decay"] != 0:
        torch._foreach_add_(directions, parameters, alpha=group["weight_decay"])
    sizes = torch.stack(torch._foreach_norm(parameters))
    lengths = torch.stack(torch._foreach_norm(directions))
    sizes.clamp_(max=group["max_weight_norm"])
    _trust(directions, sizes, lengths, sizes / lengths)
    torch._foreach_add_(parameters, directions, alpha=-group["lr"])


def lars(
    optimizer: Optimizer,
    group: Rates,
    parameters: list[Tensor],
    gradients: list[Tensor],
    states: list[State],
) -> None:
    """λ = η·‖w‖ / (‖g‖ + β·‖w‖ + eps), 1 where a norm is 0;  v ← μ·v + lr·λ·(g + β·w);  w ← w − v.

    Weights of fewer than two dimensions (biases, parameters of norms): λ = 1 and β = 0.
    """
    _signed(group, gradients)
    decay = group["weight_decay"]
    layers = [place for place, parameter in enumerate(parameters) if parameter.dim() > 1]
    if layers:
        weights, steps = [parameters[place] for place in layers], [gradients[place] for place in layers]
        sizes = torch.stack(torch._foreach_norm(weights))
        lengths = torch.stack(torch._foreach_norm(steps))
        trusted = group["eta"] * sizes / (lengths + decay * sizes + group["eps"])
        _decay_gradients(group, weights, steps)
        _trust(steps, sizes, lengths, trusted)
    velocities = _column(states, "velocity")
    torch._foreach_mul_(velocities, group["momentum"])
    torch._foreach_add_(velocities, gradients, alpha=group["lr"])
    torch._foreach_sub_(parameters, velocities)
