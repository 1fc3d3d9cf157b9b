"""What an instance sends and receives in a step, counted where no other is: for trainings larger than the machine.

It runs the sums of `all_reduce.py`, on tensors without memory, and nobody answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from popengine.compile.partition import BUCKET
from popengine.run.instances.all_reduce import AllReduce


@dataclass
class Traffic:
    """Of one instance, in one weight update."""

    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


class _NobodyThere:
    """In place of `Connections`: counts what is begun, and waits for nothing."""

    def __init__(self, place: int, size: int) -> None:
        self.rank, self.size = place, size
        self.peers = [peer for peer in range(size) if peer != place]
        self.traffic = Traffic()

    def send(self, value: Tensor, other: int, tag: int) -> tuple[None, int]:
        self.traffic.messages_sent += 1
        self.traffic.bytes_sent += value.nbytes
        return None, other

    def receive(self, value: Tensor, other: int, tag: int) -> tuple[None, int]:
        self.traffic.messages_received += 1
        self.traffic.bytes_received += value.nbytes
        return None, other

    def wait(self, messages: list[tuple[None, int]], what: str) -> None:
        pass


def of_a_sum(elements: Mapping[torch.dtype, int], place: int, instances: int, replicas: int = 1) -> Traffic:
    """What a sum costs the instance at `place`.

    Args:
        elements: how many gradients there are of each dtype, which are in buckets of equal size
        replicas: in each instance
    """
    nobody: Any = _NobodyThere(place, instances)
    sums = AllReduce(nobody, 0)
    for dtype, count in elements.items():
        bucket = BUCKET // dtype.itemsize
        for start in range(0, count, bucket):
            size = min(bucket, count - start)
            flats = [torch.empty(size, dtype=dtype, device="meta") for _ in range(replicas)]
            sums.all_reduce(flats)
    return nobody.traffic


def of_shared_state(elements: Mapping[torch.dtype, Sequence[int]], place: int) -> Traffic:
    """What the sum costs it, and weights that come back, where instances share the optimizer's state out.

    Args:
        elements: of each dtype, how many gradients each instance has the state of
    """
    instances = len(next(iter(elements.values())))
    nobody: Any = _NobodyThere(place, instances)
    sums = AllReduce(nobody, 0)
    for dtype, shares in elements.items():
        flat, cuts = torch.empty(sum(shares), dtype=dtype, device="meta"), [0, *accumulate(shares)]
        sums.reduce_scatter([flat], cuts)
        weights = [torch.empty(count, dtype=dtype, device="meta") for count in shares]
        sums.broadcast_by_owners(weights, range(instances))
    return nobody.traffic


def connections(place: int, instances: int) -> int:
    """TCP connections of an instance, however many ipus and replicas it has: to each other one for torch's own group
    and one for the sums, and to the store, which instance 0 keeps."""
    to_store = 1 + (instances if place == 0 else 0)
    return 2 * (instances - 1) + to_store
