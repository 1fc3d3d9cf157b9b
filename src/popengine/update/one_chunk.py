"""One chunk of an update: the values it begins with, the precision, and the formula or the kernel.

Parameters or states that aren't float32 are computed on in float32 and rounded once at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from popengine.settings import Optimizer
from popengine.update.chunks import SCALARS, Chunk, Part, State
from popengine.update.formulas import Formula, Rates, Step
from popengine.update.optimizer_rules import Rule
from popengine.update.stochastic_rounding import stochastic_round_

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
