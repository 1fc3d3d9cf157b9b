"""Rules that scale each parameter's step by norms: first the steps and their norms, chunk by chunk, then the weights.

The norm of a parameter is that of its chunks' norms, in their order: it depends on nothing that is updated beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from popengine.settings import Optimizer
from popengine.update.chunks import Chunk, Part
from popengine.update.formulas import Rates, Step
from popengine.update.one_chunk import wide_state, write_back
from popengine.update.optimizer_rules import Layers


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
