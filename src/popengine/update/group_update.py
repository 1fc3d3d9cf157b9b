"""A weight update: runs an optimizer's rule over the parameters of one group on one stage.

It decides what a rule needs and `rules.py` leaves out: the states to begin with, what is done block by block, and
the precision. Parameters or states that aren't float32 are computed on in float32 and rounded once at the end. It
knows no device, schedule or user's class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from popengine.settings import Optimizer
from popengine.update.blocks import SCALARS, Block, Part, State, Task, blocks
from popengine.update.formulas import Formula, Rates
from popengine.update.rules import Layers, Rule, rule_of
from popengine.update.stochastic_rounding import stochastic_round_

FUSED_DEVICES = (
    "cuda",
)  # where fused kernels are taken in any case; on CPUs, whose user wants torch's bits, if asked

Prepare = Callable[[list[Tensor]], None]  # what is done to gradients first, in place, element by element


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
    return parameter.device.type in FUSED_DEVICES and _has_kernel(optimizer, parameter)


def reads_numbers(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Whether its updates read how many there were, as numbers of the host."""
    return rule_of(optimizer).counts(optimizer) and not takes_tensors(optimizer, parameter)


def _has_kernel(optimizer: Optimizer, parameter: Tensor) -> bool:
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

    Args: group: the rates, with the keys that `popengine.settings.Hyper` lists; and "lr_tensor", the learning rate
              as a float32 scalar on the parameters' device, for those that `takes_tensors`
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
    """The same update as tasks: those of a phase in any order, or at the same time, and then the next phase."""
    rule = rule_of(optimizer)
    for part in parts:
        for state in rule.states:
            if state.when == "momentum" and group.get("momentum") and state.name not in part.state:
                part.state[state.name] = _zeros(optimizer, state.name, part.parameter)  # it was zero so far
    _count(parts)
    begin = partial(_begin, prepare=prepare)
    if rule.layers is not None:
        yield from _by_layers(rule, rule.layers, optimizer, group, parts, begin)
        return
    fused = [_is_fused(optimizer, group, part.parameter) for part in parts]
    one = partial(_update_by_kernel, rule, group, begin)
    other = partial(_update_in_float, rule.formula, optimizer, group, begin)
    yield [
        partial(_each, run, some)
        for run, is_fused in ((one, True), (other, False))
        for some in blocks([part for part, fits in zip(parts, fused, strict=True) if fits == is_fused])
    ]


def _each(run: Callable[[Block], None], some: Iterable[Block]) -> None:
    for block in some:
        run(block)


def _is_fused(optimizer: Optimizer, group: Rates, parameter: Tensor) -> bool:
    is_wanted = parameter.device.type in FUSED_DEVICES or bool(group.get("fused"))
    return is_wanted and _has_kernel(optimizer, parameter)


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


def _begin(block: Block, prepare: Sequence[Prepare]) -> list[Part]:
    """The elements of a block, with the values that the update begins with."""
    parts = [span.view for span in block]
    old = [
        (part.parameter if name == "weight" else part.state[name], value)
        for part in parts
        for name, value in part.old.items()
        if name not in SCALARS
    ]
    if old:
        torch._foreach_copy_([target for target, _ in old], [value for _, value in old])
    gradients = [part.gradient for part in parts]
    for change in prepare:
        change(gradients)
    return parts


def _update_by_kernel(rule: Rule, group: Rates, begin: Callable[[Block], list[Part]], block: Block) -> None:
    assert rule.fused is not None
    parts = begin(block)
    given: Any = group
    rate = given.get("lr_tensor", group["lr"])
    weights, gradients = [part.parameter for part in parts], [part.gradient for part in parts]
    rule.fused(group, rate, weights, gradients, [part.state for part in parts])


def _update_in_float(
    formula: Formula,
    optimizer: Optimizer,
    group: Rates,
    begin: Callable[[Block], list[Part]],
    block: Block,
) -> None:
    """Run the formula on float32 (for float64 parameters: float64) copies of whatever isn't, then write back."""
    parts = begin(block)
    types = [torch.promote_types(part.parameter.dtype, torch.float32) for part in parts]
    # .to returns the tensor itself where the dtype is right already: then there is nothing to write back.
    floats = [part.parameter.to(dtype) for part, dtype in zip(parts, types, strict=True)]
    wide = [_wide(part.state, dtype) for part, dtype in zip(parts, types, strict=True)]
    gradients = [part.gradient.to(dtype) for part, dtype in zip(parts, types, strict=True)]
    formula(optimizer, group, floats, gradients, wide)
    for part, result, results in zip(parts, floats, wide, strict=True):
        if result is not part.parameter:
            if part.generator is None:
                part.parameter.copy_(result)
            else:
                stochastic_round_(part.parameter, result, part.generator)
        _write_back(part.state, results)


def _wide(state: State, dtype: torch.dtype) -> State:
    return {name: value if name in SCALARS else value.to(dtype) for name, value in state.items()}


def _write_back(state: State, results: State) -> None:
    for name, value in state.items():
        if results[name] is not value:
            value.copy_(results[name])


def _by_layers(
    rule: Rule,
    layers: Layers,
    optimizer: Optimizer,
    group: Rates,
    parts: Sequence[Part],
    begin: Callable[[Block], list[Part]],
) -> Iterator[list[Task]]:
    """First the steps and their norms, then the weights."""
    parts = [replace(part, step=_room_for_step(part), norms={}) for part in parts]
    measure = partial(_measure, layers, optimizer, group, begin)
    yield [partial(_each, measure, some) for some in blocks(parts)]
    measured = [part for part in parts if part.norms]
    ratios: dict[int, Tensor] = {}
    if measured:
        sizes = torch.stack([_total(part, 0) for part in measured])
        lengths = torch.stack([_total(part, 1) for part in measured])
        found = layers.trust(group, sizes, lengths)
        ratios = {id(part): ratio for part, ratio in zip(measured, found.unbind(), strict=True)}
    parts = [
        replace(
            part,
            gradient=part.step,
            state=part.state | ({"trust": ratios[id(part)]} if id(part) in ratios else {}),
            old={},
        )
        for part in parts
    ]
    run = partial(_update_in_float, rule.formula, optimizer, group, partial(_begin, prepare=()))
    yield [partial(_each, run, some) for some in blocks(parts)]


def _room_for_step(part: Part) -> Tensor:
    dtype = torch.promote_types(part.parameter.dtype, torch.float32)
    return part.gradient if part.gradient.dtype == dtype else torch.empty_like(part.gradient, dtype=dtype)


def _measure(
    layers: Layers, optimizer: Optimizer, group: Rates, begin: Callable[[Block], list[Part]], block: Block
) -> None:
    parts = begin(block)
    steps = [part.step for part in parts if part.step is not None]
    for part, step in zip(parts, steps, strict=True):
        if step.dtype != part.gradient.dtype:
            step.copy_(part.gradient)
    weights = [part.parameter.to(step.dtype) for part, step in zip(parts, steps, strict=True)]
    wide = [_wide(part.state, step.dtype) for part, step in zip(parts, steps, strict=True)]
    layers.steps(optimizer, group, weights, steps, wide)
    for part, results in zip(parts, wide, strict=True):
        _write_back(part.state, results)
    chosen = [place for place, span in enumerate(block) if span.part.parameter.dim() >= layers.least]
    if chosen:
        sizes = torch._foreach_norm([weights[place] for place in chosen])
        lengths = torch._foreach_norm([steps[place] for place in chosen])
        for place, size, length in zip(chosen, sizes, lengths, strict=True):
            block[place].part.norms[block[place].start] = size, length


def _total(part: Part, which: int) -> Tensor:
    """The norm of a parameter or its step from those of its blocks, in their order."""
    norms = [part.norms[start][which] for start in sorted(part.norms)]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
