"""Measures what a partition takes, by running its pieces on one micro-batch, one after another.

Sources of a cost model: no schedule, no update; a few rounds, and of each piece the fastest. And how well threads
compute at the same time: they share memory, and wait for Python's lock between any two operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from threading import Barrier
from time import perf_counter, thread_time
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..ir import Partition
from .backends.eager import build

_ROUND = 0.02  # seconds of a thread in a round, at least
_MOST = 1.5  # seconds after which no other round begins
T = TypeVar("T")


class Factor(NamedTuple):
    """How many times as fast: the range of the middle half of what was measured."""

    low: float
    high: float


class Sample:
    """A partition's pieces as functions, with what one micro-batch gives them.

    Args:
        weights: parameters and buffers by canonical name; they are only read
        inputs:  one micro-batch
    """

    def __init__(self, partition: Partition, weights: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> None:
        self._pieces, self._given = partition.pieces, _given(partition, weights, inputs)
        self._codes = [build(piece) for piece in self._pieces]
        self._last = {name: place for place, piece in enumerate(self._pieces) for name in piece.reads}

    def seconds(self) -> list[float]:
        """Run all pieces once. Returns: seconds of each"""
        found, values = [], dict(self._given)
        with torch.inference_mode():
            for place, (code, piece) in enumerate(zip(self._codes, self._pieces, strict=True)):
                taken: list[Any] = [values[name] for name in piece.reads] + [0] * piece.draws
                for name in piece.reads:
                    if self._last[name] == place:
                        del values[name]
                start = perf_counter()
                made = code(taken)
                found.append(perf_counter() - start)
                values.update(pair for pair in zip(piece.writes, made, strict=True) if pair[0] in self._last)
                del made
        return found

    def several(self, count: int) -> float:
        """Run all pieces so often. Returns: seconds"""
        start = perf_counter()
        for _ in range(count):
            self.seconds()
        return perf_counter() - start


def measure(
    partition: Partition, weights: Mapping[str, Tensor], inputs: Sequence[Tensor], rounds: int = 3
) -> list[float]:
    """Return the seconds of each piece, in one thread: of each the fastest of `rounds`."""
    sample = Sample(partition, weights, inputs)
    times = with_threads(1, lambda: [sample.seconds() for _ in range(rounds)])
    return [min(of_piece) for of_piece in zip(*times, strict=True)]


def speedups(
    first: Callable[[int], float], second: Callable[[int], float], alone: float, rounds: int = 7
) -> Factor:
    """Return how many times as fast the second is, in alternating rounds.

    Args:
        first, second: do their work so often, and return the seconds
        alone:         seconds of doing it once
    """
    count, began, found = max(1, round(_ROUND / alone)), perf_counter(), []
    first(1)
    second(1)
    for _ in range(rounds):
        found.append(first(count) / second(count))
        if perf_counter() - began > _MOST:
            break
    found.sort()
    return Factor(found[len(found) // 4], found[-1 - len(found) // 4])


def sharing(several: Callable[[int], float], threads: int, alone: float) -> tuple[Factor, float]:
    """Measure so many threads that compute micro-batches at the same time, against one.

    Args:
        several: computes so many micro-batches, and returns the seconds
        alone:   seconds of one micro-batch
    Returns: how many times as many they compute; how many times as long a core then computes each
    """
    barrier = Barrier(threads)
    spent: dict[bool, list[float]] = {True: [], False: []}  # a core's seconds of each: together, alone

    def one(count: int, is_together: bool = False) -> float:
        if is_together:
            barrier.wait()
        start = thread_time()
        seconds = several(count)
        spent[is_together].append((thread_time() - start) / count)
        return seconds

    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:

        def together(count: int) -> float:
            start = perf_counter()
            list(pool.map(one, [count] * threads, [True] * threads))
            return (perf_counter() - start) / threads

        factor = with_threads(1, lambda: speedups(one, together, alone))
    return factor, median(spent[True]) / median(spent[False])


def with_threads(count: int, work: Callable[[], T]) -> T:
    """Return what `work` does in a thread of its own, in which operations have `count` threads."""
    before = torch.get_num_threads()
    # No Ctrl-C comes there.
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(count,)) as apart:
        try:
            return apart.submit(work).result()
        finally:
            torch.set_num_threads(before)  # some libraries keep one number for the process


def _given(
    partition: Partition, weights: Mapping[str, Tensor], inputs: Sequence[Tensor]
) -> dict[str, Tensor]:
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
    return given
