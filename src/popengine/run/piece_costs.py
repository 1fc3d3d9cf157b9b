"""Measures the time of each piece of a partition, by running the pieces in order on one micro-batch.

The times are inputs of a cost model: each is the fastest of a few rounds, without schedule or updates.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..ir import Partition
from .backends.eager import build

_ROUNDS = 3  # of which the fastest run of each piece counts
T = TypeVar("T")


def call_in_one_thread(work: Callable[[], T]) -> T:
    """Call `work` in a new thread, in which operations use no other threads, and return its result."""
    before = torch.get_num_threads()
    # Ctrl-C does not interrupt a thread other than the main one.
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as executor:
        try:
            return executor.submit(work).result()
        finally:
            torch.set_num_threads(before)  # some libraries have one number of threads for the process


def seconds_of_pieces(
    partition: Partition, weights: Mapping[str, Tensor], inputs: Sequence[Tensor]
) -> list[float]:
    """Return the seconds of each piece of a partition. `inputs`: one micro-batch of each input of the model."""
    signature, pieces = partition.signature, partition.pieces
    given: dict[str, Tensor] = {}
    for slot in signature.slots:
        if slot.role == "input":
            given[slot.name] = inputs[int(slot.key)].detach()
        elif slot.role == "constant":
            given[slot.name] = signature.constants[slot.key]
        elif slot.role == "loss_scale":
            given[slot.name] = torch.ones(slot.shape, dtype=slot.dtype)
        else:
            given[slot.name] = weights[slot.key].detach()
    codes, last = [*map(build, pieces)], {name: i for i, piece in enumerate(pieces) for name in piece.reads}
    seconds = [math.inf] * len(pieces)
    with torch.inference_mode():
        for name, piece in partition.prepared.items():
            (given[name],) = build(piece)([given[read] for read in piece.reads])
        for _ in range(_ROUNDS):
            values = dict(given)
            for i, (code, piece) in enumerate(zip(codes, pieces, strict=True)):
                taken: list[Any] = [values[name] for name in piece.reads] + [0] * bool(piece.draws)
                for name in piece.reads:
                    if last[name] == i:
                        del values[name]
                start = perf_counter()
                made = code(taken)
                seconds[i] = min(seconds[i], perf_counter() - start)
                values.update(pair for pair in zip(piece.writes, made, strict=True) if pair[0] in last)
                del made
    return seconds
