"""One call: what the workers of all ipus are given, what they give each other, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from popengine.settings import Hyper

from ..instances.ordered_sums import AFTER_OTHERS
from ..measure.recorder import Recorder
from ..state.results import Results
from ..updating import Share

_PATIENCE = 0.2  # seconds


class Stopped(Exception):
    """Another worker failed; this one has nothing to report."""


class Channels:
    """What workers have given each other, by name, until it is taken. Nobody waits: tasks come in an order in which
    all that they take is there."""

    def __init__(self) -> None:
        self._values: dict[Any, Any] = {}
        self._is_asked_to_stop = self._goes_on = False

    @property
    def stopped(self) -> bool:
        """Whether the call is given up: nothing more is computed."""
        return self._is_asked_to_stop and not self._goes_on

    def reset(self) -> None:
        """A call starts: nothing has been given yet."""
        if self.stopped:
            raise Stopped
        self._values.clear()

    def put(self, name: Any, value: Any) -> None:
        self._values[name] = value

    def has(self, name: Any) -> bool:
        """Whether there is something to take."""
        return name == AFTER_OTHERS or name in self._values

    def receive(self, name: Any) -> Any:
        return self._values.pop(name)

    def stop(self) -> None:
        """Give the call up, if that can still be."""
        self._is_asked_to_stop = True

    def go_on(self, to_the_end: bool = True) -> None:
        """From here on nobody can give the call up. Raises Stopped, where somebody has done so."""
        self._goes_on = to_the_end  # first: so whoever asks now is either seen here, or not heard any more
        if to_the_end and self._is_asked_to_stop:
            self._goes_on = False
            raise Stopped


@dataclass
class Run:
    """One call: what the workers are given, and where they leave what they made."""

    inputs: Sequence[Tensor]  # each [iterations, accumulation, groups, micro-batch, ...]
    results: Results
    hyper: Hyper | None
    steps: int
    first_step: int
    seed: int
    channels: Channels
    recorder: Recorder | None
    threads: int  # the caller's number for one operation, to be put back
    keep: Callable[[Run], None]  # what the call has made, once all of it is done
    tell: Callable[[Run, BaseException], None]  # at once of what fails, to whoever waits elsewhere
    commit: Callable[[Run], None] | None  # before the update writes to what is kept; None: to other memory
    lose: Callable[[Run, BaseException], BaseException]  # what is kept: only a part of it was written
    name: str  # for messages
    share: Share | None = None  # of the driver, where an update's tasks may be done by all cores
    offered: Callable[[], None] = lambda: None  # to the driver: somebody may go on
    overflows: list[tuple[int, float]] = field(default_factory=list)  # steps and loss scales
    failure: BaseException | None = None
    is_committed: bool = False  # the update writes to what is kept: nobody can give it up any more
    is_written: bool = False  # and has done so
    is_stopped: bool = False  # it has failed, and left no trace
    is_over: bool = False
    _over: SimpleQueue[None] = field(default_factory=SimpleQueue)

    def end(self, error: BaseException | None = None) -> None:
        """It is done, or has failed: keep what was made, or leave no trace."""
        self.is_stopped = error is not None and not self.is_written
        if error is not None:
            self.failure = None if isinstance(error, Stopped) else error
            self.tell(self, error)
        torch.set_num_threads(self.threads)
        try:
            if not self.is_stopped:
                self.keep(self)
            elif self.is_committed and error is not None:
                self.failure = self.lose(self, error)
        except BaseException as failure:  # the caller must hear of it
            self.failure = self.failure or failure
        finally:
            self.is_over = True
            self._over.put(None)

    def wait(self) -> None:
        """Wait until the crew has ended."""
        while not self.is_over:
            with suppress(Empty):  # an interrupt that comes without a signal wakes nobody who waits
                self._over.get(timeout=_PATIENCE)
