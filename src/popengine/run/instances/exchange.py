"""An exchange: buckets of gradients that are summed over instances in a thread of their own, while the rest of a
backward runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import torch

from .meeting import in_a_thread


class Exchange:
    """The exchange of one ipu.

    Args:
        work: sums the bucket of this number up
    """

    def __init__(self, work: Callable[[int], None]) -> None:
        self._work = work
        self._given: SimpleQueue[int | None] = SimpleQueue()
        self._outcome: SimpleQueue[Any] | None = None

    def begin(self, bucket: int) -> None:
        """Hand a bucket over, which is summed up after those before. Its memory must not be read until `finish`."""
        if self._outcome is None:
            self._given = given = SimpleQueue()
            self._outcome = in_a_thread(lambda: self._all_of(given))
        self._given.put(bucket)

    def _all_of(self, given: SimpleQueue[int | None]) -> None:
        with torch.inference_mode():
            while (bucket := given.get()) is not None:
                self._work(bucket)

    def give_up(self) -> None:
        """A call has failed, and wakes all who wait for others: wait until nothing is under way."""
        with suppress(Exception):
            self.finish()

    def finish(self) -> bool:
        """Wait for the sums of all that was handed over. Returns: whether anything was.

        Raises:
            Error: what has failed in an exchange
        """
        if self._outcome is None:
            return False
        self._given.put(None)
        outcome, self._outcome = self._outcome, None
        _, error = outcome.get()
        if error is not None:
            raise error
        return True
