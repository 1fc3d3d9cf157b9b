"""Named ranges of host code in traces of torch.profiler; without a profiler their cost is negligible."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.profiler import record_function

__all__ = ["Channel"]


class Channel:
    """A named group of ranges.

    channel = poptorch.profiling.Channel("training")
    with channel.tracepoint("epoch"):
        ...
    channel.instrument(loader, "__next__")
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def tracepoint(self, name: str) -> AbstractContextManager[Any]:
        """Return a context manager for a range with the name `<channel>.<name>`."""
        return record_function(f"{self._name}.{name}")

    def instrument(self, obj: Any, *methods: str) -> None:
        """Wrap methods of an object or a class, so that each call is a range.

        Raises:
            AttributeError: the object lacks one of the methods; none is wrapped then
        """
        functions = {method: getattr(obj, method) for method in methods}
        for method, function in functions.items():
            setattr(obj, method, self._traced(function, f"{type(obj).__name__}.{method}"))

    def _traced(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with self.tracepoint(name):
                return function(*args, **kwargs)

        return wrapper
