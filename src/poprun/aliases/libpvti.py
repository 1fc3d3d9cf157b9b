"""`import libpvti`: its trace channels and ranges are those of `poptorch.profiling`."""

from contextlib import AbstractContextManager
from typing import Any

from poptorch.profiling import Channel


def createTraceChannel(name: str) -> Channel:
    """Return a group of named ranges in a trace."""
    return Channel(name)


def Tracepoint(channel: Channel, name: str) -> AbstractContextManager[None]:
    """Return a context manager that records a range."""
    return channel.tracepoint(name)


def instrument(owner: Any, methods: list[str], channel: Channel) -> None:
    """Record each call of an object's or class's methods as a range."""
    channel.instrument(owner, *methods)
