"""Ctrl-C wherever it can come: when a function begins, when it returns, and after each call of a built-in one."""

import signal
import sys
from contextlib import contextmanager


class Interrupts:
    """Raises KeyboardInterrupt in this thread, at the place with a number, counted from 0; and once more later.

    Args:
        files:  parts of the names of the files whose functions are interrupted
        second: of the places after the first interrupt, the one where another comes
    """

    def __init__(self, files, first, second=None):
        self._files, self._left, self._second = files, first, second
        self._handler = signal.getsignal(signal.SIGINT)
        self.came = []  # where

    @contextmanager
    def coming(self):
        """Let them come in what runs inside."""
        before = sys.gettrace(), sys.getprofile()
        sys.setprofile(self._look)
        try:
            yield self
        finally:
            sys.settrace(before[0])
            sys.setprofile(before[1])

    def _look(self, frame, event, argument):
        # A profiler's exception is one of the call that it was told of: so nothing is interrupted that could not be.
        if event in ("call", "return", "c_return") and self._is_ours(frame):
            self._left -= 1
            if self._left < 0:
                sys.settrace(self._look_again)  # profiling ends with the first interrupt
                self._raise(frame)

    def _look_again(self, frame, event, argument):
        if self._second is None or not self._is_ours(frame):
            return None
        if event in ("call", "return"):
            self._second -= 1
            if self._second < 0:
                self._raise(frame)
        return self._look_again

    def _is_ours(self, frame):
        can_come = signal.getsignal(signal.SIGINT) is self._handler  # else it is delayed
        return can_come and any(part in frame.f_code.co_filename for part in self._files)

    def _raise(self, frame):
        self.came.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
        raise KeyboardInterrupt
