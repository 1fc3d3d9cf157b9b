"""A weight update: runs an optimizer's rule over the parameters of one group on one ipu, chunk by chunk.

Parameters or states that aren't float32 are computed on in float32 and rounded once at the end. Rules that scale each
parameter's step by norms (LAMB, LARS) first compute the steps and their norms, then the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..settings import Optimizer
from .chunks import SCALARS, Chunk, Part, Span, Spans, State, chunks
from .formulas import Formula, Rates, Step
from .optimizer_rules import Layers, Rule, rule_of


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


Prepare = Callable[[Sequence[Part]], None]  # what is done to gradients first, in place, element by element


def begin_chunk(chunk: Chunk, prepare: Sequence[Prepare]) -> list[Part]:
    """The elements of a chunk, with gradients as the rule reads them."""
    parts = [span.view for span in chunk]
    for change in prepare:
        change(parts)
    return parts


def update_by_kernel(rule: Rule, group: Rates, parts: Sequence[Part]) -> None:
    """Run torch's one kernel for the whole rule."""
    assert rule.fused is not None
    weights, gradients = [part.parameter for part in parts], [part.gradient for part in parts]
    rule.fused(group, weights, gradients, [part.state for part in parts])


def update_in_float(formula: Formula, optimizer: Optimizer, group: Rates, parts: Sequence[Part]) -> None:
    """Run the formula on float32 (for float64 parameters: float64) copies of whatever isn't, then write back."""
    types = [torch.promote_types(part.parameter.dtype, torch.float32) for part in parts]
    # .to returns the tensor itself where the dtype is right already: then there is nothing to write back.
    floats = [part.parameter.to(dtype) for part, dtype in zip(parts, types, strict=True)]
    wide = [wide_state(part.state, dtype) for part, dtype in zip(parts, types, strict=True)]
    gradients = [part.gradient.to(dtype) for part, dtype in zip(parts, types, strict=True)]
    formula(Step(optimizer, group, floats, gradients, wide))
    for part, result, results in zip(parts, floats, wide, strict=True):
        if result is not part.parameter:
            if part.generator is None:
                part.parameter.copy_(result)
            else:
                stochastic_round_(part.parameter, result, part.generator)
        write_back(part.state, results)


def wide_state(state: State, dtype: torch.dtype) -> State:
    return {name: value if name in SCALARS else value.to(dtype) for name, value in state.items()}


def write_back(state: State, results: State) -> None:
    for name, value in state.items():
        if results[name] is not value:
            value.copy_(results[name])


def with_ratios(layers: Layers, rates: Rates, parts: Sequence[Part]) -> list[Part]:
    """The measured parts, each with its step as gradient, and its ratio where its rule has one."""
    measured = [part for part in parts if part.norms]
    ratios: dict[int, Tensor] = {}
    if measured:
        sizes = torch.stack([_total(part, 0) for part in measured])
        lengths = torch.stack([_total(part, 1) for part in measured])
        found = layers.trust(rates, sizes, lengths)
        ratios = {id(part): ratio for part, ratio in zip(measured, found.unbind(), strict=True)}
    return [
        replace(
            part,
            gradient=part.gradient if part.step is None else part.step,
            state=part.state | ({"trust": ratios[id(part)]} if id(part) in ratios else {}),
        )
        for part in parts
    ]


def with_room(part: Part) -> Part:
    """A part with memory for its step."""
    dtype, gradient = torch.promote_types(part.parameter.dtype, torch.float32), part.gradient
    step = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    return replace(part, step=step, norms={})


def measure(layers: Layers, optimizer: Optimizer, group: Rates, chunk: Chunk, parts: Sequence[Part]) -> None:
    """Compute the steps of a chunk, whose elements are `parts`, and the norms of these and of the weights."""
    steps = [part.step for part in parts if part.step is not None]
    for part, step in zip(parts, steps, strict=True):
        if step.dtype != part.gradient.dtype:
            step.copy_(part.gradient)
    weights = [part.parameter.to(step.dtype) for part, step in zip(parts, steps, strict=True)]
    wide = [wide_state(part.state, step.dtype) for part, step in zip(parts, steps, strict=True)]
    layers.steps(Step(optimizer, group, weights, steps, wide))
    for part, results in zip(parts, wide, strict=True):
        write_back(part.state, results)
    chosen = [place for place, span in enumerate(chunk) if span.part.parameter.dim() >= layers.least]
    if chosen:
        sizes = torch._foreach_norm([weights[place] for place in chosen])
        lengths = torch._foreach_norm([steps[place] for place in chosen])
        for place, size, length in zip(chosen, sizes, lengths, strict=True):
            chunk[place].part.norms[chunk[place].start] = size, length


def _total(part: Part, which: int) -> Tensor:
    """The norm of a parameter or its step from those of its chunks, in their order."""
    norms = [part.norms[start][which] for start in sorted(part.norms)]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def stochastic_round_(target: Tensor, source: Tensor, generator: torch.Generator) -> Tensor:
    """Write float32 `source` into half precision `target`, without bias: add noise, then floor.

    Infinities and NaN stay what they are. A target that isn't half precision is copied to as it is.
    """
    if target.dtype not in (torch.float16, torch.bfloat16):
        return target.copy_(source)
    narrow, wide = torch.finfo(target.dtype), torch.finfo(torch.float32)
    source = source.float()
    # The power of two at or below |source|: a float32 with its mantissa cleared.
    power = (source.view(torch.int32) & 0x7F80_0000).view(torch.float32)
    # The distance of neighbours in the target there; below its smallest normal number it grows no finer.
    spacing = power.clamp(min=narrow.smallest_normal) * narrow.eps
    # Noise has exactly the bits that rounding drops, so that adding it is exact.
    dropped = int(narrow.eps / wide.eps)
    noise = torch.randint(
        dropped, source.shape, generator=generator, dtype=torch.float32, device=source.device
    ).div_(dropped)
    rounded = torch.floor(source / spacing + noise) * spacing
    return target.copy_(torch.where(torch.isfinite(source), rounded, source))
