"""The pool: threads, one a core, that share the tasks of an update.

They are not those that run pieces: operations of pieces may have several threads within, and the number of these is one
that some libraries keep for the process. The tasks of an update have one thread each, whatever pieces have.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

Done = Callable[[BaseException | None], None]


class UpdatePool:
    """Starts its threads at once; ends them with `close`."""

    def __init__(self, cores: int) -> None:
        self._cores = cores
        self._threads = ThreadPoolExecutor(cores, "update")
        mine, begun = torch.get_num_threads(), threading.Barrier(cores + 1)
        for _ in range(cores):
            self._threads.submit(_set_up, begun)
        begun.wait()
        torch.set_num_threads(mine)  # new threads begin with the number that was set last

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    def do(self, tasks: Sequence[Callable[[], None]], is_stopped: Callable[[], bool], done: Done) -> None:
        """Begin tasks, and return. At the end of all that was begun the last thread calls `done`, with what failed.

        Args:
            is_stopped: whether nothing more is to be begun; then `done` is called as at the end
        """
        share = _Share(deque(tasks), min(self._cores, len(tasks)), is_stopped, done)
        for _ in range(share.threads):
            self._threads.submit(share.work)


class _Share:
    """Tasks that some threads do together."""

    def __init__(
        self, left: deque[Callable[[], None]], threads: int, is_stopped: Callable[[], bool], done: Done
    ) -> None:
        self.threads = threads
        self._left, self._is_stopped, self._done = left, is_stopped, done
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._working = threads

    def work(self) -> None:
        try:
            with torch.inference_mode():
                while self._failure is None and not self._is_stopped() and (task := self._next()) is not None:
                    task()
        except BaseException as error:  # whatever it is, the caller must hear of it
            self._failure = error
        with self._lock:
            self._working -= 1
            is_last = not self._working
        if is_last:
            self._done(self._failure)

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            return self._left.popleft() if self._left else None


def _set_up(begun: threading.Barrier) -> None:
    torch.get_num_threads()  # a thread's first question gives it the process's number
    torch.set_num_threads(1)
    begun.wait()
