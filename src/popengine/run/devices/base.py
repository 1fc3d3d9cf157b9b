"""What an ipu runs on: where its tensors are made, and how they come and go.

Work on a device may go on while the host goes on too. A device is one queue of such work: what is started on it
runs in order, what is started on two devices in no order, but for events: one device records an event, another
waits for it. The host waits only in `fetch` and `settle`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor


class Graph(Protocol):
    """The work of one call, noted down once and run again as a whole."""

    def capturing(self) -> AbstractContextManager[None]:
        """Work that is started inside is noted down and not run."""
        ...

    def replay(self) -> None:
        """Run what was noted down, with whatever is now in the memory that it reads."""
        ...


class Device:
    """The host itself: everything is there already, and has happened when a call returns.

    Other devices override all of it. `is_remote`: has memory or a queue of its own, so values that are handed
    over need events. `is_serial`: one thread drives all ipus that are on it. `has_graphs`: see `graph`.
    """

    is_remote = False
    is_serial = False
    has_graphs = False
    place = torch.device("cpu")

    # ---- memory ------------------------------------------------------------------------------------------

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of the host that this device can read and write by itself."""
        return torch.empty(tuple(shape), dtype=dtype)

    def on_host(self, value: Tensor) -> Tensor:
        """A host's tensor in such memory."""
        return value

    def upload(self, value: Tensor) -> Tensor:
        """A host's value, here; not waited for."""
        return value

    def download(self, target: Tensor, value: Tensor) -> None:
        """Copy a value of this device into the host's memory; there once the device has settled."""
        target.copy_(value)

    def fetch(self, value: Tensor) -> Tensor:
        """A value of this device for the host to read at once."""
        return value

    # ---- order -------------------------------------------------------------------------------------------

    def running(self) -> AbstractContextManager[Any]:
        """What is started inside runs here."""
        return nullcontext()

    def record_event(self) -> Any:
        """A point in this device's work: all that was started before it."""
        return None

    def wait(self, event: Any) -> None:
        """What is started from here on runs after the event."""

    def adopt(self, value: Tensor) -> Tensor:
        """A value made on another device, whose event was waited for, to be used here."""
        return value

    def await_downloads(self) -> None:
        """What is started or uploaded from here on runs after the downloads so far: it may overwrite what they
        read, or read what they write."""

    def settle(self) -> None:
        """Wait until all that was started here has happened.

        Raises:
            UnrecoverableError: some of it has failed
        """

    # ---- graphs ------------------------------------------------------------------------------------------

    def graph(self, generators: Sequence[torch.Generator]) -> Graph:
        """An empty graph whose draws are from these generators."""
        raise NotImplementedError

    def fork(self, event: Any) -> None:
        """All that is started from here on, transfers too, runs after the event."""

    def join(self) -> Any:
        """An event after all that was started here, transfers too."""
        return None
