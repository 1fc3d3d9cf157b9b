"""An exchange: buckets of gradients that are summed over instances in a thread of their own, while the rest of a
backward runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import torch

from .process_group import in_a_thread


class Exchange:
    """The exchange of one ipu.

    Args:
        work: sums the bucket of this number up
    """

    def __init__(self, work: Callable[[int], None]) -> None:
        self._work = work
        self._given: SimpleQueue[int | None] = SimpleQueue()
        self._summed: SimpleQueue[int | None] = SimpleQueue()
        self._outcome: SimpleQueue[Any] | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether buckets were handed over."""
        return self._outcome is not None

    def begin(self, bucket: int) -> None:
        """Hand a bucket over, which is summed up after those before. Its memory must not be read until `finish`."""
        if self._outcome is None:
            self._given, self._summed = given, summed = SimpleQueue(), SimpleQueue()
            self._outcome = in_a_thread(lambda: self._all_of(given, summed))
        self._given.put(bucket)

    def _all_of(self, given: SimpleQueue[int | None], summed: SimpleQueue[int | None]) -> None:
        try:
            with torch.inference_mode():
                while (bucket := given.get()) is not None:
                    self._work(bucket)
                    summed.put(bucket)
        finally:
            summed.put(None)

    def give_up(self) -> None:
        """A call has failed, and wakes all who wait for others: wait until nothing is under way."""
        with suppress(Exception):
            self.finish()

    def finish(self) -> None:
        """Wait for the sums of all that was handed over; raises Error as `arriving`."""
        for _ in self.arriving():
            pass

    def arriving(self) -> Iterator[int]:
        """The numbers of all buckets that were handed over, each as soon as it is summed up.

        Raises:
            Error: what has failed in an exchange
        """
        if self._outcome is None:
            return
        self._given.put(None)
        while (bucket := self._summed.get()) is not None:
            yield bucket
        outcome, self._outcome = self._outcome, None
        _, error = outcome.get()
        if error is not None:
            raise error
