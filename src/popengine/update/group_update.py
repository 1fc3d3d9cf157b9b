"""A weight update: runs an optimizer's rule over the parameters of one group on one stage.

It decides what a rule needs and `optimizer_rules.py` leaves out: the states to begin with, which kernels, and what may
be done at the same time. It knows no device, schedule or user's class.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from popengine.settings import Optimizer
from popengine.update.chunks import Part, State, Task, chunks
from popengine.update.formulas import Rates
from popengine.update.layerwise import by_layers, with_room
from popengine.update.one_chunk import Prepare, begin_chunk, each, update_by_kernel, update_in_float
from popengine.update.optimizer_rules import rule_of


def init_state(optimizer: Optimizer, parameter: Tensor) -> State:
    """The state of one parameter before its first update: zeros, but ones for the TensorFlow RMSprop."""
    state = {}
    for name in (kept.name for kept in rule_of(optimizer).kept(optimizer)):
        if name == "step":  # the host reads it
            state[name] = torch.zeros((), dtype=torch.float32)
        else:
            state[name] = _zeros(optimizer, name, parameter)
    if optimizer.tf_variant:
        state["square_avg"].fill_(1)
    return state


def has_kernel(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Whether torch has one kernel for the updates of this parameter."""
    types = {parameter.dtype, optimizer.accumulator_type, *optimizer.state_types.values()}
    return (
        rule_of(optimizer).fused is not None
        and types == {torch.float32}
        and optimizer.bias_correction
        and not optimizer.torch_dampening
    )


def update(
    optimizer: Optimizer,
    group: Rates,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    states: Sequence[State],
    generators: Sequence[torch.Generator] | None = None,
) -> None:
    """Update parameters and states in place, by one step. Under no_grad; gradients may be overwritten.

    Args: group: the rates, with the keys that `popengine.settings.Hyper` lists
          generators: one a parameter. Half precision parameters are then rounded stochastically, with numbers
              that depend on the parameter alone, not on what shares its stage. None: to nearest.
    """
    some = generators or [None] * len(parameters)
    parts = [
        Part(parameter, gradient, state, generator=generator)
        for parameter, gradient, state, generator in zip(parameters, gradients, states, some, strict=True)
    ]
    for phase in phases(optimizer, group, parts):
        for task in phase:
            task()


def phases(
    optimizer: Optimizer, group: Rates, parts: Sequence[Part], prepare: Sequence[Prepare] = ()
) -> Iterator[list[Task]]:
    """The same update as tasks: those of a phase in any order, or at the same time, and then the next phase.

    Once there is a first phase, large memory has been made, and nothing is written to yet.
    """
    rule = rule_of(optimizer)
    for part in parts:
        for state in rule.states:
            if state.when == "momentum" and group.get("momentum") and state.name not in part.state:
                part.state[state.name] = _zeros(optimizer, state.name, part.parameter)  # it was zero so far
    if rule.layers is not None:
        parts = [with_room(part) for part in parts]
    yield [partial(_count, parts)]
    begin = partial(begin_chunk, prepare=prepare)
    if rule.layers is not None:
        yield from by_layers(rule, rule.layers, optimizer, group, parts, begin)
        return
    fused = [_is_fused(optimizer, group, part.parameter) for part in parts]
    one = partial(update_by_kernel, rule, group, begin)
    other = partial(update_in_float, rule.formula, optimizer, group, begin)
    yield [
        partial(each, run, some)
        for run, is_fused in ((one, True), (other, False))
        for some in chunks([part for part, fits in zip(parts, fused, strict=True) if fits == is_fused])
    ]


def _is_fused(optimizer: Optimizer, group: Rates, parameter: Tensor) -> bool:
    return bool(group.get("fused")) and has_kernel(optimizer, parameter)


def _zeros(optimizer: Optimizer, name: str, parameter: Tensor) -> Tensor:
    return torch.zeros_like(
        parameter,
        dtype=optimizer.type_for(parameter.dtype, name),
        requires_grad=False,
        memory_format=torch.preserve_format,
    )


def _count(parts: Sequence[Part]) -> None:
    """This is one more update."""
    steps = [part.state["step"] for part in parts if "step" in part.state]
    moved = [part for part in parts if "step" in part.old]
    if moved:
        torch._foreach_copy_([part.state["step"] for part in moved], [part.old["step"] for part in moved])
    if steps:
        torch._foreach_add_(steps, 1)
