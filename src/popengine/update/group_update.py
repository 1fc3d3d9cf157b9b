"""A weight update: runs an optimizer's rule over the parameters of one group on one ipu, chunk by chunk.

Parameters or states that aren't float32 are computed on in float32 and rounded once at the end. Rules that scale each
parameter's step by norms (LAMB, LARS) first compute the steps and their norms, then the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..settings import Optimizer
from .chunks import SCALARS, Chunk, Part, State, chunks
from .formulas import Rates, Step
from .optimizer_rules import Layers, rule_of


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
    rule = rule_of(optimizer)
    types = {parameter.dtype, optimizer.accumulator_type, *optimizer.state_types.values()}
    return rule.fused is not None and types == {torch.float32} and not rule.changed_flags(optimizer)


def update(
    optimizer: Optimizer,
    group: Rates,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    states: Sequence[State],
    seeds: Sequence[int] | None = None,
) -> None:
    """Update parameters and states in place, by one step. Under no_grad; gradients may be overwritten.

    Args: group: the rates, with the keys that `popengine.settings.Hyper` lists
          seeds: one a parameter. Half precision parameters are then rounded stochastically, with numbers
              that depend on the parameter alone, not on what shares its stage. None: to nearest.
    """
    columns = zip(parameters, gradients, states, seeds or [None] * len(parameters), strict=True)
    step = UpdateStep(optimizer, group, [Part(p, g, s, seed=seed) for p, g, s, seed in columns])
    step.begin()
    if step.layers is not None:
        for chunk in step.chunks:
            step.measure(step.views(chunk))
        step.trust()
    for chunk in step.chunks:
        step.apply(step.views(chunk))


class UpdateStep:
    """One update of some parameters with the same rates, chunk by chunk.

    First `begin`; for rules that need norms (those with `layers`) then `measure` of all chunks and `trust`; then
    `apply` of all chunks. The caller reduces and clips the gradients in the `views` of a chunk before its first use.
    """

    def __init__(self, optimizer: Optimizer, rates: Rates, parts: Sequence[Part]) -> None:
        self.optimizer, self.rates, self.rule = optimizer, rates, rule_of(optimizer)
        self.layers: Layers | None = self.rule.layers
        for part in parts:
            for state in self.rule.states:
                if state.when == "momentum" and rates.get("momentum") and state.name not in part.state:
                    # There was no momentum so far: the state is zero.
                    part.state[state.name] = _zeros(optimizer, state.name, part.parameter)
        if self.layers is not None:
            parts = [_with_room(part, part.parameter.dim() >= self.layers.least) for part in parts]
        elif rates.get("fused"):
            parts = [replace(part, is_fused=has_kernel(optimizer, part.parameter)) for part in parts]
        self.parts = parts

    @property
    def chunks(self) -> list[Chunk]:
        """What may be computed at the same time."""
        return chunks(self.parts)

    def views(self, chunk: Chunk) -> list[Part]:
        """Return the elements of a chunk."""
        return [
            self.parts[part].elements(start, stop) if stop else self.parts[part]
            for part, start, stop in chunk
        ]

    def begin(self) -> None:
        """Count this update. All large memory has been made before."""
        steps = [part.state["step"] for part in self.parts if "step" in part.state]
        if steps:
            torch._foreach_add_(steps, 1)

    def measure(self, views: Sequence[Part]) -> None:
        """Compute the steps of a chunk's elements, and the norms of these and of the weights."""
        assert self.layers is not None
        steps = [view.step for view in views if view.step is not None]
        for view, step in zip(views, steps, strict=True):
            if step.dtype != view.gradient.dtype:
                step.copy_(view.gradient)
        weights = [view.parameter.to(step.dtype) for view, step in zip(views, steps, strict=True)]
        wide = [_wide(view.state, step.dtype) for view, step in zip(views, steps, strict=True)]
        self.layers.steps(Step(self.optimizer, self.rates, weights, steps, wide))
        for view, results in zip(views, wide, strict=True):
            _write_back(view.state, results)
        chosen = [i for i, view in enumerate(views) if view.norms is not None]
        if chosen:
            sizes = torch._foreach_norm([weights[i] for i in chosen])
            lengths = torch._foreach_norm([steps[i] for i in chosen])
            for i, size, length in zip(chosen, sizes, lengths, strict=True):
                views[i].norms[views[i].start] = size, length  # pyright: ignore[reportOptionalSubscript]

    def trust(self) -> None:
        """Add the ratio of the norms to each parameter's state."""
        assert self.layers is not None
        measured = [part for part in self.parts if part.norms]
        if measured:
            sizes, lengths = (torch.stack([_norm(part, which) for part in measured]) for which in (0, 1))
            ratios = self.layers.trust(self.rates, sizes, lengths)
            for part, ratio in zip(measured, ratios.unbind(), strict=True):
                part.state["trust"] = ratio

    def apply(self, views: Sequence[Part]) -> None:
        """Update the weights and states of a chunk."""
        fused = [view for view in views if view.is_fused]
        if fused:
            assert self.rule.fused is not None
            weights, gradients = [part.parameter for part in fused], [part.gradient for part in fused]
            self.rule.fused(self.rates, weights, gradients, [part.state for part in fused])
        if len(fused) < len(views):
            self._apply_formula([view for view in views if not view.is_fused])

    def _apply_formula(self, parts: Sequence[Part]) -> None:
        """Run the formula on float32 (for float64 parameters: float64) copies of what isn't, then write back."""
        types = [torch.promote_types(part.parameter.dtype, torch.float32) for part in parts]
        # .to returns the tensor itself where the dtype is right already: then there is nothing to write back.
        floats = [part.parameter.to(dtype) for part, dtype in zip(parts, types, strict=True)]
        wide = [_wide(part.state, dtype) for part, dtype in zip(parts, types, strict=True)]
        steps = (part.gradient if part.step is None else part.step for part in parts)
        gradients = [step.to(dtype) for step, dtype in zip(steps, types, strict=True)]
        self.rule.formula(Step(self.optimizer, self.rates, floats, gradients, wide))
        for part, result, results in zip(parts, floats, wide, strict=True):
            if result is not part.parameter:
                if part.seed is None:
                    part.parameter.copy_(result)
                else:
                    generator = torch.Generator(result.device).manual_seed(part.seed + part.start)
                    stochastic_round_(part.parameter, result, generator)
            _write_back(part.state, results)


def _zeros(optimizer: Optimizer, name: str, parameter: Tensor) -> Tensor:
    dtype = optimizer.type_for(parameter.dtype, name)
    return torch.zeros_like(parameter, dtype=dtype, requires_grad=False, memory_format=torch.preserve_format)


def _wide(state: State, dtype: torch.dtype) -> State:
    return {name: value if name in SCALARS else value.to(dtype) for name, value in state.items()}


def _write_back(state: State, results: State) -> None:
    for name, value in state.items():
        if results[name] is not value:
            value.copy_(results[name])


def _with_room(part: Part, has_ratio: bool) -> Part:
    """Return a part with memory for its step and its norms, and a state of its own for the ratio."""
    dtype, gradient = torch.promote_types(part.parameter.dtype, torch.float32), part.gradient
    step = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    return replace(part, step=step, norms={} if has_ratio else None, state=dict(part.state))


def _norm(part: Part, which: int) -> Tensor:
    """Return the norm of a parameter (0) or of its step (1) from those of its chunks, in their order: it depends on
    nothing that is updated beside."""
    norms = [pair[which] for _, pair in sorted((part.norms or {}).items())]
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
