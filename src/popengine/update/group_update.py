"""A weight update: runs an optimizer's rule over the parameters of one group on one stage.

It decides what a rule needs and `optimizer_rules.py` leaves out: the states to begin with, which kernels, and what may
be done at the same time. It knows no device, schedule or user's class.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from popengine.settings import Optimizer
from popengine.update.chunks import Part, Span, Spans, State, chunks
from popengine.update.formulas import Rates
from popengine.update.layerwise import measure, with_ratios, with_room
from popengine.update.one_chunk import Prepare, begin_chunk, update_by_kernel, update_in_float
from popengine.update.optimizer_rules import rule_of


def init_state(optimizer: Optimizer, parameter: Tensor) -> State:
    """Return the state of one parameter before its first update."""
    state = {}
    for kept in rule_of(optimizer).kept(optimizer):
        if kept.name == "step":  # the host reads it
            state[kept.name] = torch.zeros((), dtype=torch.float32)
        else:
            state[kept.name] = _zeros(optimizer, kept.name, parameter)
        if optimizer.flags.get(kept.ones_when):
            state[kept.name].fill_(1)
    return state


def has_kernel(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Return whether torch has one kernel for the updates of this parameter."""
    types, rule = (
        {parameter.dtype, optimizer.accumulator_type, *optimizer.state_types.values()},
        rule_of(optimizer),
    )
    return rule.fused is not None and types == {torch.float32} and not rule.changed_flags(optimizer)


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
    step = UpdateStep(optimizer, group, parts, ())
    step.begin()
    if step.is_layerwise:
        for some_chunks in step.chunks:
            step.measure(some_chunks)
        step.trust()
    for some_chunks in step.chunks:
        step.apply(some_chunks)


class UpdateStep:
    """One update of some parameters with the same rates, chunk by chunk.

    First `begin`; for rules that need norms (`is_layerwise`) then `measure` of all chunks and `trust`; then `apply` of
    all chunks. Chunks of one step may be computed at the same time.

    Args:
        prepare: what is done to gradients first
    """

    def __init__(
        self, optimizer: Optimizer, rates: Rates, parts: Sequence[Part], prepare: Sequence[Prepare]
    ) -> None:
        self.optimizer, self.rates, self.prepare, self.rule = optimizer, rates, prepare, rule_of(optimizer)
        self.is_layerwise = self.rule.layers is not None
        for part in parts:
            for state in self.rule.states:
                if state.when == "momentum" and rates.get("momentum") and state.name not in part.state:
                    part.state[state.name] = _zeros(
                        optimizer, state.name, part.parameter
                    )  # it was zero so far
        self.parts = [with_room(part) for part in parts] if self.is_layerwise else list(parts)
        self._fused = [_is_fused(optimizer, rates, part.parameter) for part in parts]

    @property
    def chunks(self) -> list[list[Spans]]:
        """What may be computed at the same time: lists of chunks, each with its elements as (part, start, stop)."""
        return chunks(self.parts)

    def begin(self) -> None:
        """Count this update. All large memory has been made before."""
        steps = [part.state["step"] for part in self.parts if "step" in part.state]
        if steps:
            torch._foreach_add_(steps, 1)

    def measure(self, some: Sequence[Spans]) -> None:
        """The norms of some chunks' weights and steps."""
        assert self.rule.layers is not None
        for spans in some:
            chunk = [Span(self.parts[part], start, stop) for part, start, stop in spans]
            parts = begin_chunk(chunk, self.prepare)
            measure(self.rule.layers, self.optimizer, self.rates, chunk, parts)

    def trust(self) -> None:
        """From the norms of all chunks to each parameter's ratio."""
        assert self.rule.layers is not None
        self.parts, self.prepare = with_ratios(self.rule.layers, self.rates, self.parts), ()

    def apply(self, some: Sequence[Spans]) -> None:
        """Update some chunks."""
        for spans in some:
            views = begin_chunk(
                [Span(self.parts[part], start, stop) for part, start, stop in spans], self.prepare
            )
            fused = [view for view, (part, _, _) in zip(views, spans, strict=True) if self._fused[part]]
            others = [view for view, (part, _, _) in zip(views, spans, strict=True) if not self._fused[part]]
            if fused:
                update_by_kernel(self.rule, self.rates, fused)
            if others:
                update_in_float(self.rule.formula, self.optimizer, self.rates, others)


def _is_fused(optimizer: Optimizer, group: Rates, parameter: Tensor) -> bool:
    return bool(group.get("fused")) and has_kernel(optimizer, parameter)


def _zeros(optimizer: Optimizer, name: str, parameter: Tensor) -> Tensor:
    return torch.zeros_like(
        parameter,
        dtype=optimizer.type_for(parameter.dtype, name),
        requires_grad=False,
        memory_format=torch.preserve_format,
    )
