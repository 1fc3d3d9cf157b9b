"""Crews: the threads that drive workers.

On a CPU all workers have one crew, the cores: see `cores.py`. On a GPU, where kernels run by themselves and threads
would only fight for Python's lock, one thread drives all workers, in turns that were found before: see `turns.py`.
On several GPUs, and wherever a recorder looks at each ipu by itself, a worker has a thread of its own, and waits for
the others in its channels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

from .cores import Cores
from .worker import Run, Worker


class Crew:
    """A thread that runs some workers when told to.

    Args:
        perform: runs all of them for one call
    """

    def __init__(self, workers: Sequence[Worker], name: str, perform: Callable[[Run], None]) -> None:
        self._workers, self._perform = workers, perform
        self.inbox: SimpleQueue[Run | SimpleQueue[None] | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self.thread.start()

    def close(self) -> None:
        """End the thread."""
        self.inbox.put(None)
        if isinstance(self._perform, Cores):
            self._perform.close()

    def _serve(self) -> None:
        while (run := self.inbox.get()) is not None:
            if not isinstance(run, Run):  # somebody asks whether the runs before are over
                run.put(None)
                continue
            failure: BaseException | None = None
            try:
                # The ipus are the threads. Some libraries keep one number for the process, so `Run.end` puts it back.
                torch.set_num_threads(1)
                with torch.inference_mode():
                    self._perform(run)
            except BaseException as error:  # whatever it is, the caller must hear of it
                failure = error
            for worker in self._workers:
                try:
                    worker.end()
                except BaseException as error:  # of a device that can't be used any more
                    failure = error
            run.end(failure)
            del run, failure
