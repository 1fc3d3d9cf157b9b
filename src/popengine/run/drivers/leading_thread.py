"""The crew: the thread that leads a driver, so that the user's own thread only waits, where Ctrl-C may come."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue

import torch

from .. import devices
from .driver import Driver
from .one_call import Run
from .thread_teams import let_go_of_team
from .worker import Worker


class Crew:
    """A thread that runs all workers when told to.

    Args:
        driver: with its thread as the first
        device: the device that the workers' tensors are on
    """

    def __init__(self, workers: Sequence[Worker], driver: Driver, device: torch.device = devices.CPU) -> None:
        self._workers, self._driver, self._device = workers, driver, device
        self._inbox: SimpleQueue[Run | SimpleQueue[None] | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._serve, name="core 0", daemon=True)
        self.thread.start()

    def start(self, run: Run) -> None:
        """Begin a call."""
        if self._driver.inside > 1:
            let_go_of_team()
        self._inbox.put(run)

    def wait_until_idle(self) -> None:
        """It answers in turn, so all that it was told before has ended."""
        answers: SimpleQueue[None] = SimpleQueue()
        self._inbox.put(answers)
        answers.get()

    def close(self) -> None:
        """End the thread."""
        self._inbox.put(None)
        self._driver.close()

    def _serve(self) -> None:
        while (run := self._inbox.get()) is not None:
            if not isinstance(run, Run):  # somebody asks whether the runs before are over
                run.put(None)
                continue
            failure: BaseException | None = None
            try:
                # Some libraries keep one number for the process, so `Run.end` puts it back.
                torch.set_num_threads(self._driver.inside)
                with torch.inference_mode(), devices.running(self._device):
                    self._driver(run)
                    devices.settle(self._device)
                if self._driver.inside > 1:
                    let_go_of_team()
            except BaseException as error:  # whatever it is, the caller must hear of it
                failure = error
            for worker in self._workers:
                worker.end()
            run.end(failure)
            del run, failure
