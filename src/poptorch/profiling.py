"""Ranges of the host's own code in a trace. They cost next to nothing while no torch.profiler runs."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.profiler import record_function

__all__ = ["Channel"]


class Channel:
    """Names a group of ranges.

    channel = poptorch.profiling.Channel("training")
    with channel.tracepoint("epoch"):
        ...
    channel.instrument(loader, "__next__")
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def tracepoint(self, name: str) -> AbstractContextManager[Any]:
        """A range that lasts as long as the `with`; it shows as `<channel>.<name>`."""
        return record_function(f"{self._name}.{name}")

    def instrument(self, obj: Any, *methods: str) -> None:
        """Wrap methods of an object, or of a class, so that each call is a range.

        Raises:
            AttributeError: the object lacks one of them; none has been wrapped
        """
        found = {method: getattr(obj, method) for method in methods}
        for method, function in found.items():
            setattr(obj, method, self._traced(function, f"{type(obj).__name__}.{method}"))

    def _traced(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with self.tracepoint(name):
                return function(*args, **kwargs)

        return wrapper
