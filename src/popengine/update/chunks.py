"""Chunks: elements of parameters that an update works on at once, few enough to stay in the shared cache.

On the CPU a parameter is cut at multiples of CHUNK elements from its first element. So the order of additions
in a norm, and with it the norm's bits, depends on this parameter alone. Small neighbours share a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

State = dict[str, Tensor]

# Elements of each tensor: 4 MB of float32. Smaller chunks fit a core's own cache, but an operation costs more
# to start: 2^18 takes 1.15 times as long (benchmarks/updates).
CHUNK = 1 << 20


@dataclass(frozen=True, eq=False)
class Part:
    """One parameter, or a range of its elements, with all tensors that its update reads and writes.

    Args:
        state:  the optimizer state by name
        others: gradient sums of other replicas, to be added to `gradient` in the order of a binary tree
        seed:   seed of the random numbers of stochastic rounding; None: no stochastic rounding
        start:  offset of the range's first element in the parameter
        is_fused: whether torch's fused kernel updates the parameter
        step:   for rules with a trust ratio: a buffer for the step; the gradient itself if it is wide enough
        norms:  for rules with a trust ratio: (norm of the weight, norm of the step) of each range, by the
            range's `start`; None: the parameter has no ratio
    """

    parameter: Tensor
    gradient: Tensor
    state: State
    others: tuple[Tensor, ...] = ()
    seed: int | None = None
    start: int = 0
    is_fused: bool = False
    step: Tensor | None = None
    norms: dict[int, tuple[Tensor, Tensor]] | None = None

    @property
    def has_one_layout(self) -> bool:
        """Whether all tensors but scalars have one dense layout: a range of memory has the same elements."""
        states = (value for name, value in self.state.items() if name not in SCALARS)
        tensors = [self.parameter, self.gradient, *self.others, *states]
        return all(tensor.is_contiguous() for tensor in tensors) or all(
            tensor.stride() == self.parameter.stride()
            and tensor.dim() == 4
            and tensor.is_contiguous(memory_format=torch.channels_last)
            for tensor in tensors
        )

    def elements(self, start: int, stop: int) -> Part:
        """Return a part with 1-d views of elements `start` to `stop` in memory order (0-d: unchanged)."""
        return replace(
            self,
            parameter=_flat_view(self.parameter, start, stop),
            gradient=_flat_view(self.gradient, start, stop),
            state={name: _flat_view(value, start, stop) for name, value in self.state.items()},
            others=tuple(_flat_view(value, start, stop) for value in self.others),
            start=start,
            step=None if self.step is None else _flat_view(self.step, start, stop),
        )


SCALARS = ("step", "trust")  # names of the states that have one number per parameter


def _flat_view(value: Tensor, start: int, stop: int) -> Tensor:
    """Return the elements from `start` to `stop` in memory order, as a 1-d view; a 0-d tensor unchanged."""
    if not value.dim():
        return value
    return value.as_strided((stop - start,), (1,), value.storage_offset() + start)


Span = tuple[
    int, int, int
]  # index of a part, offsets of the first and last element; (index, 0, 0): whole part
Chunk = list[Span]


def chunks(parts: Sequence[Part]) -> list[Chunk]:
    """Return the chunks of all parts. Chunks may be computed in any order, or at the same time.

    On an accelerator all parts are one chunk, because one kernel updates many parameters.
    """
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
