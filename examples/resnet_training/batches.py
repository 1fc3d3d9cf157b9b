"""Batches: each global batch is dealt out, so that a weight update sees the same rows in every layout."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Sampler


class Dealing(Sampler[int]):
    """Keys (epoch × rows + index) of one instance's rows, in the order in which its executor reads them.

    Micro-batch m of a weight update belongs to accumulation step m // replicas and replica m % replicas, where
    replicas are those of all instances. Each instance draws the whole permutation of an epoch, from seed and epoch,
    and takes its own rows.

    Args:
        rows:      of the dataset
        micro:     rows of a micro-batch
        steps:     accumulation × device iterations
        replicas:  of this instance
        epoch:     the first one
        calls:     of an epoch, at most
    """

    def __init__(
        self,
        rows: int,
        micro: int,
        steps: int,
        replicas: int,
        instance: int,
        instances: int,
        seed: int,
        epoch: int,
        calls: int | None = None,
    ) -> None:
        self.rows, self.instance, self.instances = rows, instance, instances
        self.here, self.seed, self.epoch = micro * replicas, seed, epoch
        call = self.here * instances * steps
        self.used = min(rows // call, calls or rows) * call
        if not self.used:
            raise SystemExit(
                f"{rows} images don't fill one call of {call}: lower --micro-batch-size, --gradient-accumulation,"
                " --device-iterations or the number of replicas"
            )

    def __len__(self) -> int:
        return self.used // self.instances

    def __iter__(self) -> Iterator[int]:
        random = torch.Generator().manual_seed(self.seed + 1_000_003 * self.epoch)
        order = torch.randperm(self.rows, generator=random)[: self.used] + self.epoch * self.rows
        self.epoch += 1
        return iter(order.view(-1, self.instances, self.here)[:, self.instance].flatten().tolist())


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
