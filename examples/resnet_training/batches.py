"""Batches: rows of each global batch are divided among the replicas so that all layouts update with the same rows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from common.sampling import Layout
from torch.utils.data import Sampler


class Dealing(Sampler[int]):
    """Keys (epoch × rows + index) of one instance's rows, in the order in which its executor reads them.

    Each instance draws the whole permutation of an epoch, from seed and epoch, and takes its own rows of each call.

    Args:
        rows:  of the dataset
        epoch: the first one
        calls: of an epoch, at most
    """

    def __init__(self, rows: int, layout: Layout, seed: int, epoch: int, calls: int | None = None) -> None:
        self.rows, self.layout, self.seed, self.epoch = rows, layout, seed, epoch
        self.calls = min(rows // layout.call, calls or rows)
        if not self.calls:
            raise SystemExit(
                f"{rows} images don't fill one call of {layout.call}: lower --micro-batch-size,"
                " --gradient-accumulation, --device-iterations or the number of replicas"
            )

    def __len__(self) -> int:
        return self.calls * self.layout.call * self.layout.local // self.layout.replicas

    def __iter__(self) -> Iterator[int]:
        random = torch.Generator().manual_seed(self.seed + 1_000_003 * self.epoch)
        order = torch.randperm(self.rows, generator=random) + self.epoch * self.rows
        self.epoch += 1
        for call in order[: self.calls * self.layout.call].view(self.calls, -1):
            yield from self.layout.share(call).tolist()


class Waits:
    """The batches of a loader; measures how long the program waits for them."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.seconds = loader, 0.0

    def __iter__(self) -> Iterator[Any]:
        batches, done = iter(self.loader), object()
        while True:
            start = time.perf_counter()
            batch = next(batches, done)
            self.seconds += time.perf_counter() - start
            if batch is done:
                return
            yield batch
