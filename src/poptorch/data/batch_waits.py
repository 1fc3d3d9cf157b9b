"""Report waits for batches to profiles. A loader has no reference to its model, so all listeners are called."""

import time
import weakref
from collections.abc import Iterator
from typing import Any, TypeVar

T = TypeVar("T")


# Objects with `note(kind, start)`: something began at `start` (`time.perf_counter_ns`), and has ended now.
listeners: weakref.WeakSet[Any] = weakref.WeakSet()


def noting_waits(batches: Iterator[T]) -> Iterator[T]:
    """Yield the same batches, and report each wait for one to the listeners."""
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
