"""Named ranges of host code in traces of torch.profiler; without a profiler their cost is negligible."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.profiler import record_function

__all__ = ["Channel"]


class Channel:
    """A group of named ranges in a trace, whose names begin with the channel's name.

    >>> channel = poptorch.profiling.Channel("training")
    >>> with channel.tracepoint("epoch"):
    ...     trainer(x, y)
    >>> channel.instrument(loader, "__iter__")
    """

    def __init__(self, name: str) -> None:
        self._name = name

    @contextmanager
    def tracepoint(self, name: str) -> Iterator[None]:
        """Return a context manager or decorator that records a range with the name `<channel>.<name>`."""
        with record_function(f"{self._name}.{name}"):
            yield

    def instrument(self, obj: Any, *methods: str) -> None:
        """Wrap methods of an object's class, in place, so that torch.profiler shows each call as a range with
        the name `<channel>.<class>.<method>`.

        Raises: AttributeError, if the object lacks one of the methods; then no method is replaced
        """
        functions = {method: getattr(obj, method) for method in methods}
        owner = obj if isinstance(obj, type) else type(obj)
        for method, function in functions.items():
            setattr(obj, method, self.tracepoint(f"{owner.__name__}.{method}")(function))
