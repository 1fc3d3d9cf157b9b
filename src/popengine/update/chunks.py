"""Chunks: what an update does is cut into pieces that stay in a cache from one operation to the next.

A parameter is cut at multiples of CHUNK elements from its own beginning: so the order of
the sums within norms, and with it their bits, depends on the parameter alone. Small neighbours share a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

State = dict[str, Tensor]

# Of each tensor: 1 MB of float32. Less would be in a core's own cache, but cores would wait more for Python's lock.
CHUNK = 1 << 18


@dataclass(frozen=True, eq=False)
class Part:
    """One parameter, or a range of its elements, with all tensors that its update reads and writes.

    Args:
        others: gradient sums of other replicas, added to `gradient` in the order of a binary tree
        seed:   of the random numbers of stochastic rounding; None: no stochastic rounding
        start:  the first element of a range
        is_fused: torch's own kernel updates the parameter
        step:   for rules with a trust ratio: a buffer for the unscaled step; the gradient itself if its dtype fits
        norms:  for these rules (norm of the weight, norm of the step) of each chunk, by its first element; None: the
            parameter has no ratio
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
    def is_flat(self) -> bool:
        """Whether one order of elements is that of the memory of all its tensors."""
        states = (value for name, value in self.state.items() if name not in SCALARS)
        tensors = [self.parameter, self.gradient, *self.others, *states]
        return all(tensor.is_contiguous() for tensor in tensors) or all(
            tensor.stride() == self.parameter.stride()
            and tensor.dim() == 4
            and tensor.is_contiguous(memory_format=torch.channels_last)
            for tensor in tensors
        )

    def elements(self, start: int, stop: int) -> Part:
        """Return views of some elements, in the order of the memory."""
        return replace(
            self,
            parameter=_view(self.parameter, start, stop),
            gradient=_view(self.gradient, start, stop),
            state={name: _view(value, start, stop) for name, value in self.state.items()},
            others=tuple(_view(value, start, stop) for value in self.others),
            start=start,
            step=None if self.step is None else _view(self.step, start, stop),
        )


SCALARS = ("step", "trust")  # one number a parameter


def _view(value: Tensor, start: int, stop: int) -> Tensor:
    """Elements by their place in memory; a single number as it is."""
    if not value.dim():
        return value
    return value.as_strided((stop - start,), (1,), value.storage_offset() + start)


Span = tuple[int, int, int]  # (part, start, stop) of elements; `stop` 0: all of the part, as it is
Chunk = list[Span]


def chunks(parts: Sequence[Part]) -> list[Chunk]:
    """Return chunks that may be computed in any order, or at the same time.

    On other devices than CPUs all is one chunk, as one kernel updates many.
    """
    if not all(part.parameter.is_cpu for part in parts):
        return [[(number, 0, 0) for number in range(len(parts))]]
    found: list[Chunk] = []
    elements = 0  # of the last chunk
    for span in (span for number, part in enumerate(parts) for span in _spans(number, part)):
        number, start, stop = span
        size = stop - start or parts[number].parameter.numel()
        if not found or elements + size > CHUNK:
            found.append([])
            elements = 0
        found[-1].append(span)
        elements += size
    return found


def _spans(number: int, part: Part) -> list[Span]:
    size = part.parameter.numel()
    if size <= CHUNK or not part.is_flat:
        return [(number, 0, 0)]
    return [(number, start, min(start + CHUNK, size)) for start in range(0, size, CHUNK)]
