"""Waits for batches, told to whoever profiles. A loader does not know for whom it loads, so all listeners are told."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from typing import Protocol, TypeVar

T = TypeVar("T")


class Listener(Protocol):
    def note(self, kind: str, start: int) -> None:
        """Something of this kind began at `start` (nanoseconds, `time.perf_counter_ns`) and has ended now."""


listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


def noting_waits(batches: Iterator[T]) -> Iterator[T]:
    """The same batches; while somebody listens, they are told of each wait for one."""
    return _noted(batches) if listeners else batches


def _noted(batches: Iterator[T]) -> Iterator[T]:
    while True:
        start = time.perf_counter_ns()
        try:
            batch = next(batches)
        except StopIteration:
            return
        for listener in list(listeners):
            listener.note("loader", start)
        yield batch
        del batch
