"""The tree of errors: one class for each pass, so that a message says by its type where it arose.

Error                     poptorch.Error: everything a user's mistake or a failing run raises
├── CaptureError          the model can't be traced: data-dependent Python, a rebound buffer, no loss
├── PartitionError        blocks and stages don't fit together
├── ScheduleError         an order that can't run: incomplete, or a deadlock
├── BatchError            a batch that isn't what was compiled for
├── DataError             the data loader or its workers failed
├── RunError              a piece failed while running: names ipu, stage, micro-batch and line
├── RecoverableError      the device can be used again after `recovery_action`
└── UnrecoverableError    the device or a process is lost
"""

from __future__ import annotations

import difflib
import os
import traceback
from collections.abc import Iterable
from typing import Any


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the known one that looks most like it, if one does."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


class Error(Exception):
    """Raised for every fault of a user's program or of a run.

    `str(error)`, and `args[0]`, is `'poptorch_py_error': <message>`; `message` is the message alone, `type` the
    word in quotes and `location` where the engine was (empty for errors raised on the host). What the engine
    raised begins with `In <file>:<line>: `, the place in the engine.
    """

    type = "poptorch_py_error"
    _place = ""

    def __init__(self, message: str, location: str = "") -> None:
        self.message = message
        self.location = location
        super().__init__(str(self))

    def raised_by_engine(self, location: str) -> None:
        """Make it an error of the engine's, raised in the passes of `location`; its message stays as it is."""
        *_, (frame, line) = traceback.walk_tb(self.__traceback__)
        self._place = f"In {os.path.basename(frame.f_code.co_filename)}:{line}: "
        self.type, self.location = "poptorch_cpp_error", location
        self.args = (str(self),)

    def __setstate__(self, state: dict[str, Any]) -> None:  # pickle and copy gave `__init__` the whole text
        super().__setstate__(state)
        self.args = (str(self),)

    def __str__(self) -> str:
        text = f"{self._place}'{self.type}': {self.message}"
        return f"{text}\n{self.location}" if self.location else text


class CaptureError(Error):
    """The model can't be traced into a graph."""


class PartitionError(Error):
    """Blocks and stages don't fit together."""


class ScheduleError(Error):
    """An order of actions that can't run."""


class BatchError(Error):
    """A batch that isn't what the executor was compiled for."""


class DataError(Error):
    """A data loader, or one of its workers, failed."""


class RunError(Error):
    """A piece failed while it ran; the weights are as they were before the call."""


class RecoverableError(Error):
    """The device can be used again after `recovery_action` (for example "IPU_RESET")."""

    def __init__(self, message: str, recovery_action: str = "IPU_RESET", location: str = "") -> None:
        super().__init__(message, location)
        self.recovery_action = recovery_action


class UnrecoverableError(Error):
    """The device, or a process, is lost."""
