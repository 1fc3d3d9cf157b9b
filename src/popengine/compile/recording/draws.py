"""The random numbers that forward draws in Python, and the clocks that it reads.

The values of a recording are the same in each call, so a warning names the user's line.
"""

import dis
import pickle
import random
import types
from collections.abc import Iterable
from typing import Any

import numpy

from .user_code import is_users, user_line

_CLOCKS = {
    "time",
    "perf_counter",
    "monotonic",
    "process_time",
    "thread_time",
    "now",
    "utcnow",
    "today",
    "urandom",
}
_DRAWS_NOTHING = {"seed", "getstate", "setstate"}
_NUMPY_STATE: Any = numpy.random.random.__self__  # its global generator


class Draws:
    """The draws of one recording."""

    def __init__(self) -> None:
        self.lines: dict[str, str] = {}  # by the user's line: "random numbers" or "the time"
        # Generators with their states, and the user's lines.
        self._generators: list[tuple[Any, bytes, str]] = [(_NUMPY_STATE, pickle.dumps(_NUMPY_STATE), "")]

    def note_generator(self, value: Any) -> bool:
        """Note a value that forward reads, if it is a generator of numpy's; return whether it is."""
        is_generator = isinstance(value, numpy.random.Generator | numpy.random.RandomState)
        if is_generator:
            self._generators.append((value, pickle.dumps(value), user_line()))
        return is_generator

    def note_call(self, code: types.CodeType, function: Any) -> None:
        """Note a call of a function of C by `code`, if it draws random numbers or reads a clock."""
        name, owner = function.__name__, getattr(function, "__self__", None)
        if isinstance(owner, random.Random):
            if name not in _DRAWS_NOTHING:
                self.lines.setdefault(user_line(), "random numbers")
        elif name.removesuffix("_ns") in _CLOCKS and (is_users(code.co_filename) or name == "urandom"):
            module = getattr(owner, "__name__", "") if isinstance(owner, types.ModuleType | type) else ""
            if module in ("time", "posix", "nt", "datetime", "date"):
                what = "random numbers" if name == "urandom" else "the time"
                self.lines.setdefault(user_line(), what)

    def finish(self, ran: Iterable[types.CodeType]) -> None:
        """Note the generators that have changed their state. `ran`: the functions that forward has called."""
        for generator, state, where in self._generators:
            if pickle.dumps(generator) != state:
                self.lines.setdefault(where or _line_of_numpy(ran), "random numbers")


def _line_of_numpy(ran: Iterable[types.CodeType]) -> str:
    """Return the first line of a function that ran which names a function of numpy.random."""
    for code in ran:
        line = code.co_firstlineno
        for step in dis.get_instructions(code):
            line = (step.positions and step.positions.lineno) or line
            if step.argval in vars(numpy.random) and not str(step.argval).startswith("_"):
                return f"{code.co_filename}:{line}"
    return "a function that forward calls"
