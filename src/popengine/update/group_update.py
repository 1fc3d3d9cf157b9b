"""A weight update: applies an optimizer's rule to the parameters of one group on one ipu, chunk by chunk.

Half precision parameters and states are converted to float32, and their new values are rounded once, at the end. Rules
that scale each parameter's step by norms (LAMB, LARS) compute all norms before any weight changes.

On the CPU a parameter is cut at multiples of CHUNK elements from its first element. So the order of additions in a
norm, and with it the norm's bits, depends on this parameter alone. Small neighbours share a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..settings import Optimizer
from .formulas import Formula, Rates, State, Step
from .optimizer_rules import RULES, RuleState, TrustRatios

SCALARS = {"step", "trust"}  # names of the states that have one number per parameter
# Elements of each tensor: 4 MB of float32. Smaller chunks fit a core's own cache, but an operation costs more
# to start: 2^18 takes 1.15 times as long (benchmarks/updates).
CHUNK = 1 << 20


def init_state(optimizer: Optimizer, parameter: Tensor) -> State:
    """Return the optimizer state of one parameter before its first update."""
    kept = RULES[optimizer.kind].states_of(optimizer)
    return {state.name: fitting_state(optimizer, state, parameter) for state in kept}


def fitting_state(
    optimizer: Optimizer, state: RuleState, parameter: Tensor, value: Tensor | None = None
) -> Tensor:
    """Return `value`, or a copy with the dtype and layout that updates need; None: the first state."""
    if state.name == "step":  # on the CPU: the host reads it
        like, dtype = torch.empty(()), torch.float32
    else:
        like, dtype = parameter, optimizer.state_dtype(parameter.dtype, state.name)
    wanted = dtype, like.device, like.stride()
    if value is not None and (value.dtype, value.device, value.stride()) == wanted:
        return value
    new = torch.zeros_like(like, dtype=dtype, requires_grad=False, memory_format=torch.preserve_format)
    if value is not None:
        return new.copy_(value.detach())
    return new.fill_(1) if optimizer.flags.get(state.ones_when) else new


def has_fused_kernel(optimizer: Optimizer) -> bool:
    """Return whether the rule has a fused kernel for these flags, and sums and states are float32."""
    rule = RULES[optimizer.kind]
    types = {torch.float32, optimizer.accumulator_type, *optimizer.state_types.values()}
    return (
        rule.fused is not None
        and types == {torch.float32}
        and not {*rule.nondefault_flags(optimizer)} - {"torch_dampening", "use_combined_accum"}
    )


def update(
    optimizer: Optimizer,
    group: Rates,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    states: Sequence[State],
    seeds: Sequence[int] | None = None,
) -> None:
    """Apply one update to parameters and states, in place. Call it under no_grad; it may overwrite gradients.

    Args: group: the rates, as in `popengine.settings.Hyper`; seeds: for stochastic rounding; None: round to nearest
    """
    for parameter, state in zip(parameters, states, strict=True):
        for kept in RULES[optimizer.kind].states_of(optimizer, group):
            if kept.name not in state:  # a momentum that was 0 until now
                state[kept.name] = fitting_state(optimizer, kept, parameter)
    columns = zip(parameters, gradients, states, seeds or [None] * len(parameters), strict=True)
    step = UpdateStep(optimizer, group, [ParameterUpdate(p, g, s, seed=seed) for p, g, s, seed in columns])
    step.increment_counts()
    chunks = cut_into_chunks(step.parts)
    if step.trust_ratios is not None:
        for chunk in chunks:
            step.measure_norms(step.views(chunk))
        step.compute_trust_ratios()
    for chunk in chunks:
        step.apply(step.views(chunk))


@dataclass(frozen=True, eq=False)
class ParameterUpdate:
    """One parameter, or a range of its elements, with all tensors that its update reads and writes."""

    parameter: Tensor
    gradient: Tensor
    state: State
    others: tuple[Tensor, ...] = ()  # gradient sums of other replicas, added to `gradient` before the update
    seed: int | None = None  # of stochastic rounding; None: no stochastic rounding
    start: int = 0  # offset of the range's first element in the parameter
    # For rules with a trust ratio: a buffer for the step (the gradient itself if not half precision), and (norm of the
    # weight, norm of the step) of each range, by the range's `start`; None: the parameter has no ratio.
    step: Tensor | None = None
    norms: dict[int, tuple[Tensor, Tensor]] | None = None

    def __post_init__(self) -> None:
        if self.parameter.is_complex():  # rules update real and imaginary parts as torch's optimizers do
            for name in ("parameter", "gradient"):
                object.__setattr__(self, name, torch.view_as_real(getattr(self, name)))
            real = {k: torch.view_as_real(v) if v.is_complex() else v for k, v in self.state.items()}
            object.__setattr__(self, "state", real)
            object.__setattr__(self, "others", tuple(map(torch.view_as_real, self.others)))

    @property
    def has_one_layout(self) -> bool:
        """Whether all tensors but scalars are contiguous, or all channels_last: equal in element order."""
        states = (value for name, value in self.state.items() if name not in SCALARS)
        tensors = [self.parameter, self.gradient, *self.others, *states]
        return any(
            all(tensor.is_contiguous(memory_format=order) for tensor in tensors)
            for order in (torch.contiguous_format, torch.channels_last)
        )

    def elements(self, start: int, stop: int) -> ParameterUpdate:
        """Return the update of elements `start` to `stop` in memory order, as 1-d views (0-d: unchanged)."""
        return replace(
            self,
            parameter=_flat_view(self.parameter, start, stop),
            gradient=_flat_view(self.gradient, start, stop),
            state={name: _flat_view(value, start, stop) for name, value in self.state.items()},
            others=tuple(_flat_view(value, start, stop) for value in self.others),
            seed=None if self.seed is None else self.seed + start,
            start=start,
            step=None if self.step is None else _flat_view(self.step, start, stop),
        )


def _flat_view(value: Tensor, start: int, stop: int) -> Tensor:
    """Return the elements from `start` to `stop` in memory order, as a 1-d view; a 0-d tensor unchanged."""
    if not value.dim():
        return value
    return value.as_strided((stop - start,), (1,), value.storage_offset() + start)


Chunk = list[tuple[int, int, int]]  # (index of a parameter, first element, end); (index, 0, 0): all of it


def cut_into_chunks(parts: Sequence[ParameterUpdate]) -> list[Chunk]:
    """Return chunks of about `CHUNK` elements, which may be updated in any order, or at the same time. On an
    accelerator all parameters are one chunk, because one kernel updates many parameters."""
    if not all(part.parameter.is_cpu for part in parts):
        return [[(number, 0, 0) for number in range(len(parts))]]
    found: list[Chunk] = []
    elements = 0  # of the last chunk
    for number, part in enumerate(parts):
        size = part.parameter.numel()
        is_cut = size > CHUNK and part.has_one_layout
        for start in range(0, size, CHUNK) if is_cut else (0,):
            stop = min(start + CHUNK, size)
            if not found or elements + stop - start > CHUNK:
                found.append([])
                elements = 0
            found[-1].append((number, start, stop if is_cut else 0))
            elements += stop - start
    return found


class UpdateStep:
    """One update of parameters with the same rates: `increment_counts`; then, if the rule has `trust_ratios`,
    `measure_norms` for each chunk and `compute_trust_ratios`; then `apply` for each chunk."""

    def __init__(self, optimizer: Optimizer, rates: Rates, parts: Sequence[ParameterUpdate]) -> None:
        self.optimizer, self.rates, self.rule = optimizer, rates, RULES[optimizer.kind]
        self.trust_ratios: TrustRatios | None = self.rule.trust_ratios
        self._is_fused = bool(rates.get("fused")) and has_fused_kernel(optimizer)
        if self.trust_ratios is not None:
            parts = [_with_step_buffer(part, self.trust_ratios.min_dims) for part in parts]
        self.parts = parts

    def views(self, chunk: Chunk) -> list[ParameterUpdate]:
        """Return a `ParameterUpdate` of each parameter in a chunk, with views of the chunk's elements."""
        found = [self.parts[number] for number, _, _ in chunk]
        for index, (_, start, stop) in enumerate(chunk):
            if stop:
                found[index] = found[index].elements(start, stop)
        return found

    def increment_counts(self) -> None:
        """Add 1 to the state "step" of each parameter, in place; do nothing if the rule has no such state."""
        steps = [part.state["step"] for part in self.parts if "step" in part.state]
        if steps:
            torch._foreach_add_(steps, 1)

    def measure_norms(self, views: Sequence[ParameterUpdate]) -> None:
        """For each parameter of a chunk: update the moments (LAMB), write the step without trust ratio into `step`, and
        store the norms of the weight and of this step in `norms`, if it has ratios."""
        assert self.trust_ratios is not None
        self._use_gradients(views)
        weights, steps = self._run_formula(self.trust_ratios.steps, views, [view.gradient for view in views])
        norms = zip(torch._foreach_norm(weights), torch._foreach_norm(steps), strict=True)
        for view, step, pair in zip(views, steps, norms, strict=True):
            if view.step is not None and view.step.dtype != view.gradient.dtype:
                view.step.copy_(step)
            if view.norms is not None:
                view.norms[view.start] = pair

    def compute_trust_ratios(self) -> None:
        """Set the state "trust" of each parameter that has `norms` to the trust ratio."""
        assert self.trust_ratios is not None
        measured = [part for part in self.parts if part.norms]
        if measured:
            norms = [torch.stack([_total_norm(part, which) for part in measured]) for which in (0, 1)]
            ratios = self.trust_ratios.trust(self.rates, *norms)
            for part, ratio in zip(measured, ratios.unbind(), strict=True):
                part.state["trust"] = ratio

    def apply(self, views: Sequence[ParameterUpdate]) -> None:
        """Update the weights and states of a chunk, in place, by the fused kernel or by the formula."""
        others, fused = views, []
        if self._is_fused:
            fused = [view for view in views if view.parameter.dtype == torch.float32]
            others = [view for view in views if view.parameter.dtype != torch.float32]
        if fused:
            assert self.rule.fused is not None
            weights, gradients = [view.parameter for view in fused], [view.gradient for view in fused]
            states = [view.state for view in fused]
            self.rule.fused(Step(self.optimizer, self.rates, weights, gradients, states))
        if others:
            if self.trust_ratios is None:  # else `measure_norms` did it
                self._use_gradients(others)
            steps = [view.gradient if view.step is None else view.step for view in others]
            weights, _ = self._run_formula(self.rule.formula, others, steps)
            for view, weight in zip(others, weights, strict=True):
                if weight is not view.parameter:
                    round_into(view.parameter, weight, view.seed)

    def _use_gradients(self, views: Sequence[ParameterUpdate]) -> None:
        """Negate the gradients in place if the rate `maximize` is on; in the first update, copy them to states that
        start as the first gradient."""
        if self.rates.get("maximize"):
            torch._foreach_neg_([view.gradient for view in views])
        for kept in self.rule.states:
            for view in views if kept.is_gradient_first else ():
                if view.state["step"].item() == 1:
                    view.state[kept.name].copy_(view.gradient)

    def _run_formula(
        self, formula: Formula, views: Sequence[ParameterUpdate], gradients: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Run a formula in float32 (of float64 parameters: float64). Update the states in place; return the new
        weights and gradients, which are the tensors themselves unless they are of half precision."""
        weights, wide, states = list[Tensor](), list[Tensor](), list[State]()
        for view, gradient in zip(views, gradients, strict=True):
            dtype = torch.promote_types(view.parameter.dtype, torch.float32)
            # .to returns the tensor itself if it has the dtype already: then nothing is to be written back.
            weights.append(view.parameter.to(dtype))
            wide.append(gradient.to(dtype))
            states.append(dict(view.state))
            for name in view.state.keys() - SCALARS:
                states[-1][name] = view.state[name].to(dtype)
        formula(Step(self.optimizer, self.rates, weights, wide, states))
        for view, results in zip(views, states, strict=True):
            for name, value in view.state.items():
                if results[name] is not value:
                    value.copy_(results[name])
        return weights, wide


def _with_step_buffer(part: ParameterUpdate, min_dims: int) -> ParameterUpdate:
    """Return a copy of `part` with a buffer `step`, an own state dictionary and, for a trust ratio, `norms`."""
    dtype, gradient = torch.promote_types(part.parameter.dtype, torch.float32), part.gradient
    step = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    return replace(
        part, step=step, norms={} if part.parameter.dim() >= min_dims else None, state=dict(part.state)
    )


def _total_norm(part: ParameterUpdate, which: int) -> Tensor:
    """Return the norm of a whole weight (if `which` is 0) or of its step (if 1), from the norms of ranges."""
    norms = [pair[which] for _, pair in sorted((part.norms or {}).items())]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def round_into(target: Tensor, source: Tensor, seed: int | None) -> Tensor:
    """Copy `source` into `target`, and return it. With a seed, round half types stochastically: add noise, floor."""
    if seed is None or target.dtype not in (torch.float16, torch.bfloat16):
        return target.copy_(source)
    generator = torch.Generator(source.device).manual_seed(seed)
    narrow, wide = torch.finfo(target.dtype), torch.finfo(torch.float32)
    source = source.float()
    # The power of two at or below |source|: a float32 with its mantissa cleared.
    power = (source.view(torch.int32) & 0x7F80_0000).view(torch.float32)
    # The distance of neighbouring numbers in the target's dtype; constant below its smallest normal number.
    spacing = power.clamp(min=narrow.smallest_normal) * narrow.eps
    # Noise has exactly the bits that rounding drops, so that adding it is exact.
    dropped, like = int(narrow.eps / wide.eps), {"dtype": torch.float32, "device": source.device}
    noise = torch.randint(dropped, source.shape, generator=generator, **like).div_(dropped)
    rounded = torch.floor(source / spacing + noise) * spacing
    return target.copy_(torch.where(torch.isfinite(source), rounded, source))
