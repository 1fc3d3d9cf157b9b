"""A worker whose device has a queue of its own: values go with the event after which they are there.

What is handed over is never written to before its readers are done with it: values of a micro-batch never, weights
at the start of a step as copies, gradient sums and updated weights only after an answer from those who read them.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from torch import Tensor

from popengine import ir

from .worker import Worker


class RemoteWorker(Worker):
    """Runs one ipu's program on a device that goes on by itself."""

    def give(self, name: Any, value: Any) -> None:
        self.run.channels.put(name, (value, self.device.record_event()))

    def take(self, name: Any) -> Any:
        value, event = self.run.channels.receive(name)
        self.device.wait(event)
        return self._adopted(value)

    def _adopted(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.device.adopt(value)
        if isinstance(value, dict):
            return {key: self._adopted(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._adopted(item) for item in value]
        return value

    def updating(self, instruction: ir.Update) -> Generator[Any, Any, None]:
        self.device.await_downloads()  # a result may be a weight
        yield from super().updating(instruction)

    def finish(self) -> None:
        self.run.results.finish(self.device)

    def end(self) -> None:
        super().end()
        self.device.settle()
