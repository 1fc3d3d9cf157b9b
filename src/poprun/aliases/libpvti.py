"""`import libpvti`: its trace channels and ranges are those of `poptorch.profiling`."""

from typing import Any

from poptorch.profiling import Channel

createTraceChannel, Tracepoint = Channel, Channel.tracepoint  # noqa: N816


def instrument(owner: Any, methods: list[str], channel: Channel) -> None:
    """Record each call of an object's or class's methods as a range."""
    channel.instrument(owner, *methods)
