"""The meeting of this process with the other instances, which there is at most once."""

from __future__ import annotations

import sys
from contextlib import suppress
from queue import Empty
from typing import Any

import torch.distributed as dist

from popengine.errors import Error

from .meeting import Meeting, in_a_thread

_current: Meeting | None = None


def open_with(store: Any, place: int, size: int) -> Meeting:
    """Let this process meet the others by this store."""
    global _current
    _current = Meeting(dist.PrefixStore("pando", store), place, size)
    return _current


def current() -> Meeting | None:
    """How this process meets the others; None: it has not met them."""
    if _current is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        # The user's program has called torch.distributed itself.
        store = dist.distributed_c10d._get_default_store()
        return open_with(store, dist.get_rank(), dist.get_world_size())
    return _current


def leave() -> None:
    """This process ends: those who wait for it need not. One that has a part of what others may read waits."""
    if _current is not None:
        if _current.has_offers() and not hasattr(sys, "last_value"):  # nor has it failed
            with suppress(Error):
                _current.agree("the end of the program")
        store, place = _current._store, _current.place
        with suppress(Empty):
            in_a_thread(lambda: store.set(f"left/{place}", "1")).get(timeout=1.0)


def of(instances: int) -> Meeting:
    """The meeting of so many instances.

    Raises:
        Error: they have not met
    """
    found = current()
    if found is None:
        raise Error(
            f"the model trains in {instances} processes, but they have not met\n"
            "  fix: call popdist.init() before the model; or options.Distributed.disable() to train alone"
        )
    if found.size != instances:
        raise Error(
            f"the options say that the model trains in {instances} processes, but {found.size} have met\n"
            "  fix: take popdist.poptorch.Options(), which asks the launcher"
        )
    return found
