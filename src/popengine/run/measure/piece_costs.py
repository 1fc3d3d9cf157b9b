"""Measures what each piece of a partition takes, by running all of them on one micro-batch, one after another.

Sources of a cost model: no schedule, no threads, no update; a few rounds, and of each piece the fastest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from popengine.ir import Partition

from ..backends.eager import build


def measure(
    partition: Partition, weights: Mapping[str, Tensor], inputs: Sequence[Tensor], rounds: int = 3
) -> list[float]:
    """Seconds of each piece, in one thread.

    Args:
        weights: parameters and buffers by canonical name; they are only read
        inputs:  one micro-batch
    """
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(1) as apart:  # where no Ctrl-C comes: the number of threads is put back
        return apart.submit(_measured, partition, weights, inputs, rounds, threads).result()


def _measured(
    partition: Partition, weights: Mapping[str, Tensor], inputs: Sequence[Tensor], rounds: int, threads: int
) -> list[float]:
    signature = partition.signature
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
    with torch.no_grad():
        for name, piece in partition.prepared.items():
            (given[name],) = build(piece)([given[read] for read in piece.reads])
    codes = [build(piece, alone=True) for piece in partition.pieces]
    best = [float("inf")] * len(codes)
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            for _ in range(rounds):
                values = dict(given)
                for i, piece in enumerate(partition.pieces):
                    taken: list[Any] = [values[name] for name in piece.reads] + [0] * piece.draws
                    start = perf_counter()
                    made = codes[i](taken)
                    best[i] = min(best[i], perf_counter() - start)
                    values.update(zip(piece.writes, made, strict=True))
    finally:
        torch.set_num_threads(threads)
    return best
