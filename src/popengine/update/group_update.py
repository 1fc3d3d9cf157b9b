"""A weight update: runs an optimizer's rule over the parameters of one group on one stage.

It decides what a rule needs and `rules.py` leaves out: the states to begin with, how many parameters go
together, and the precision. Parameters or states that aren't float32 are computed on in float32 and rounded
once at the end. It knows no device, schedule or user's class.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress

import torch
from torch import Tensor

from popengine.settings import Optimizer
from popengine.update.formulas import Rates, State
from popengine.update.rules import Rule, rule_of
from popengine.update.stochastic_rounding import stochastic_round_

FUSED_DEVICES = ("cuda",)  # CPUs have such kernels too; theirs would not be torch.optim's bits

# Elements updated together on a CPU: few enough to stay in cache from one operation to the next, many enough
# that small parameters share one Python call. AdamW takes a fifth to a third less time than in torch's loop.
CHUNK = 1 << 16


def init_state(optimizer: Optimizer, parameter: Tensor) -> State:
    """The state of one parameter before its first update: zeros, but ones for the TensorFlow RMSprop."""
    state = {}
    for name in (kept.name for kept in rule_of(optimizer).kept(optimizer)):
        if name == "step":
            home = "cpu" if reads_numbers(optimizer, parameter) else parameter.device
            state[name] = torch.zeros((), dtype=torch.float32, device=home)
        else:
            state[name] = _zeros(optimizer, name, parameter)
    if optimizer.tf_variant:
        state["square_avg"].fill_(1)
    return state


def takes_tensors(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Whether the learning rate of this parameter's updates may be a tensor, on its device."""
    return _is_fused(optimizer, parameter)


def reads_numbers(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Whether its updates read how many there were, as numbers of the host."""
    return rule_of(optimizer).counts(optimizer) and not _is_fused(optimizer, parameter)


def _is_fused(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Whether torch's one kernel makes the updates of this parameter."""
    types = {parameter.dtype, optimizer.accumulator_type, *optimizer.state_types.values()}
    return (
        rule_of(optimizer).fused is not None
        and parameter.device.type in FUSED_DEVICES
        and types == {torch.float32}
        and optimizer.bias_correction
        and not optimizer.torch_dampening
    )


def update(
    optimizer: Optimizer,
    group: Rates,
    parameters: list[Tensor],
    gradients: list[Tensor],
    states: list[State],
    generators: Sequence[torch.Generator] | None = None,
) -> None:
    """Update parameters and states in place, by one step. Under no_grad; gradients may be overwritten.

    Args: group: the rates, with the keys that `popengine.settings.Hyper` lists; and "lr_tensor", the learning rate
              as a float32 scalar on the parameters' device, for those that `takes_tensors`
          generators: one a parameter. Half precision parameters are then rounded stochastically, with numbers
              that depend on the parameter alone, not on what shares its stage. None: to nearest.
    """
    rule = rule_of(optimizer)
    for name in _needed(rule, group):
        for state, parameter in zip(states, parameters, strict=True):
            if name not in state:  # the momentum was zero so far
                state[name] = _zeros(optimizer, name, parameter)
    is_fused = [_is_fused(optimizer, parameter) for parameter in parameters]
    if rule.fused is not None and any(is_fused):
        rate = group.get("lr_tensor")
        if rate is None:
            rate = torch.tensor(group["lr"], dtype=torch.float32, device=parameters[0].device)
        rule.fused(
            group,
            rate,
            list(compress(parameters, is_fused)),
            list(compress(gradients, is_fused)),
            list(compress(states, is_fused)),
        )
        others = [not fits for fits in is_fused]
        parameters, gradients = list(compress(parameters, others)), list(compress(gradients, others))
        states = list(compress(states, others))
        generators = None if generators is None else list(compress(generators, others))
    for chunk in _chunks(parameters):
        chosen = generators[chunk] if generators is not None else None
        _update_in_float(rule, optimizer, group, parameters[chunk], gradients[chunk], states[chunk], chosen)


def _needed(rule: Rule, group: Rates) -> list[str]:
    """The states of which there is need only now."""
    return [state.name for state in rule.states if state.when == "momentum" and group.get("momentum")]


def _zeros(optimizer: Optimizer, name: str, parameter: Tensor) -> Tensor:
    return torch.zeros_like(
        parameter,
        dtype=optimizer.type_for(parameter.dtype, name),
        requires_grad=False,
        memory_format=torch.preserve_format,
    )


def _chunks(parameters: Sequence[Tensor]) -> Iterator[slice]:
    """Neighbours of at most CHUNK elements together; on other devices all, as one kernel updates many."""
    start, elements = 0, 0
    for index, parameter in enumerate(parameters):
        if index > start and parameter.is_cpu and elements + parameter.numel() > CHUNK:
            yield slice(start, index)
            start, elements = index, 0
        elements += parameter.numel()
    if start < len(parameters):
        yield slice(start, len(parameters))


def _update_in_float(
    rule: Rule,
    optimizer: Optimizer,
    group: Rates,
    parameters: list[Tensor],
    gradients: list[Tensor],
    states: list[State],
    generators: Sequence[torch.Generator] | None,
) -> None:
    """Run the rule on float32 (for float64 parameters: float64) copies of whatever isn't, then write back."""
    types = [torch.promote_types(parameter.dtype, torch.float32) for parameter in parameters]
    # .to returns the tensor itself where the dtype is right already: then there is nothing to write back.
    floats = [parameter.to(dtype) for parameter, dtype in zip(parameters, types, strict=True)]
    rule.formula(
        optimizer,
        group,
        floats,
        [gradient.to(dtype) for gradient, dtype in zip(gradients, types, strict=True)],
        wide := [
            {name: value if name == "step" else value.to(dtype) for name, value in state.items()}
            for state, dtype in zip(states, types, strict=True)
        ],
    )
    for index, (parameter, result) in enumerate(zip(parameters, floats, strict=True)):
        if result is not parameter:
            if generators is None:
                parameter.copy_(result)
            else:
                stochastic_round_(parameter, result, generators[index])
    for state, results in zip(states, wide, strict=True):
        for name, value in state.items():
            if results[name] is not value:
                value.copy_(results[name])
