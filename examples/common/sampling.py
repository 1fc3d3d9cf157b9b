"""Which rows each call reads: the same ones in each weight update, however replicas and instances are laid out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import Sampler


@dataclass(frozen=True)
class Layout:
    """How a call's rows are shared out. `replicas`: of all instances; `local`: of this one."""

    micro_batch: int
    accumulation: int
    iterations: int
    replicas: int
    local: int
    instance: int = 0

    @property
    def global_batch(self) -> int:
        """Rows of one weight update."""
        return self.micro_batch * self.accumulation * self.replicas

    @property
    def call(self) -> int:
        """Rows of one call, of all instances."""
        return self.global_batch * self.iterations

    def share(self, rows: torch.Tensor) -> torch.Tensor:
        """This instance's rows of a call, in the order in which the executor reads them."""
        shape = (self.iterations, self.accumulation, self.replicas, self.micro_batch)
        first = self.instance * self.local
        return rows.view(shape)[:, :, first : first + self.local].flatten()


class GlobalBatches(Sampler[int]):
    """The rows of calls `start` to `stop`, over as many epochs as that takes.

    Each epoch is a permutation drawn from the seed and the epoch's number; an incomplete call at its end is left out.
    So the rows of call n follow from n alone, and a training that goes on in the middle reads what it would have read.
    """

    def __init__(
        self, rows: int, layout: Layout, start: int, stop: int, seed: int, shuffle: bool = True
    ) -> None:
        self.rows, self.layout, self.start, self.stop = rows, layout, start, stop
        self.seed, self.shuffle = seed, shuffle
        self.calls_an_epoch = rows // layout.call

    def __len__(self) -> int:
        return (self.stop - self.start) * self.layout.call * self.layout.local // self.layout.replicas

    def __iter__(self) -> Iterator[int]:
        order, epoch = torch.arange(self.rows), -1
        for call in range(self.start, self.stop):
            wanted, place = divmod(call, self.calls_an_epoch)
            if self.shuffle and wanted != epoch:
                random = torch.Generator().manual_seed(hash((self.seed, wanted)) % 2**63)
                order, epoch = torch.randperm(self.rows, generator=random), wanted
            yield from self.layout.share(order[place * self.layout.call :][: self.layout.call]).tolist()
