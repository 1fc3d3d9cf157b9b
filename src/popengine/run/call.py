"""One call of the engine: what its tasks read, how far it is, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from torch import Tensor

from popengine.settings import Hyper

from .measure.recorder import Recorder
from .results import Results

_PATIENCE = 0.2  # seconds; an interrupt that comes without a signal wakes no thread that waits


class Stopped(Exception):
    """The caller was interrupted: nothing more is computed."""


@dataclass
class EngineCall:
    """One call.

    A step is given up only before its updates: `commit` is the last moment. `done` counts the steps that were finished.
    """

    inputs: Sequence[Tensor]  # each [iterations, accumulation, groups, micro-batch, ...]
    results: Results
    hyper: Hyper | None
    steps: int
    first_step: int
    seed: int
    recorder: Recorder | None
    threads: int  # the caller's number for one operation, to be put back
    name: str  # for messages
    done: int = 0
    overflows: list[tuple[int, float]] = field(default_factory=list)  # steps and loss scales
    failure: BaseException | None = None
    is_over: bool = False
    is_committed: bool = False
    _is_stopped: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _over: SimpleQueue[None] = field(default_factory=SimpleQueue)

    @property
    def step(self) -> int:
        """The weight updates before the step that runs, over all calls."""
        return self.first_step + self.done

    @property
    def is_stopped(self) -> bool:
        """Whether the call is given up, once a step that updates weights has ended."""
        return self._is_stopped and not self.is_committed

    def stop(self) -> None:
        """Give the call up as soon as possible."""
        with self._lock:
            self._is_stopped = True

    def commit(self) -> None:
        """From here on the step goes to its end. Raises Stopped, if the call was given up before."""
        with self._lock:
            if self._is_stopped and not self.is_committed:
                raise Stopped
            self.is_committed = True

    def step_done(self) -> None:
        """The step is finished. Raises Stopped, if the call was given up meanwhile."""
        with self._lock:
            self.done += 1
            self.is_committed = False
            if self._is_stopped and self.done < self.steps:
                raise Stopped

    def end(self, error: BaseException | None) -> None:
        """The call is over; `error` is what it has failed with."""
        self.failure = None if isinstance(error, Stopped) else error
        self.is_over = True
        self._over.put(None)

    def wait(self) -> None:
        """Wait for the end of the call."""
        while not self.is_over:
            with suppress(Empty):
                self._over.get(timeout=_PATIENCE)
