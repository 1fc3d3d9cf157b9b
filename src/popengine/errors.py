"""Errors: one class for each pass, so that the type of an error shows where it was raised."""

import difflib
import functools
import inspect
import os
import re
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from types import FrameType, FunctionType, MappingProxyType, TracebackType
from typing import Any, ParamSpec, TypeVar, overload

P = ParamSpec("P")
R = TypeVar("R")

FULL_TRACEBACK = "POPTORCH_FULL_TRACEBACK"
# Tracebacks leave out the frames of these packages.
_PACKAGES = ("poptorch", "popengine", "popdist", "popvision")
_INTERNAL = (*_PACKAGES, "torch", "concurrent", "contextlib", "inspect", "json", "pathlib")
_wrappers = weakref.WeakSet[Any]()  # made by `without_internal_frames`


def did_you_mean(
    name: str, names: Iterable[str], least: float = 0.67, shown: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return "; did you mean '...'?" with the most similar of `names`, in any case of letters; "" without one of
    similarity `least` (0 to 1). `shown`: texts that stand for names in the message."""
    by_lower = {word.lower(): shown.get(word, word) for word in names}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=least)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""


class Error(Exception):
    """The base class of errors in a user's program or in a run.

    `args[0]` is `'poptorch_py_error': <message>`, and so is `str(error)`; `message` is the message alone, `type` the
    word in quotes. Errors of the engine have another type and a `location`, which names the running passes and is the
    end of `args[0]`; their `str(error)` is the message alone.
    """

    type = "poptorch_py_error"

    def __init__(self, message: str, location: str = "") -> None:
        self.message = message
        self.location = location
        super().__init__(self._whole_text())

    def mark_as_engine_error(self, location: str) -> None:
        """Set `location`, and `type` to "poptorch_cpp_error"."""
        self.type, self.location = "poptorch_cpp_error", location
        self.args = (self._whole_text(),)

    def __setstate__(self, state: dict[str, Any] | None) -> None:
        super().__setstate__(state)
        self.args = (self._whole_text(),)  # pickle and copy passed the whole text to `__init__`

    def __str__(self) -> str:
        return self.message if self.location else self._whole_text()

    def _whole_text(self) -> str:
        text = f"'{self.type}': {self.message}"
        return f"{text}\n{self.location}" if self.location else text


def hide_internal_frames(error: BaseException | None) -> None:
    """Remove the frames of Pando and torch from the traceback of an error, and from those of its causes. The frames of
    the user's code stay. With POPTORCH_FULL_TRACEBACK=1, remove nothing."""
    seen = set[int]()
    while error is not None and id(error) not in seen and os.environ.get(FULL_TRACEBACK, "0") == "0":
        shown, entry = list[TracebackType](), error.__traceback__
        while entry is not None:
            shown += [entry] if _is_users_frame(entry.tb_frame) else []
            entry = entry.tb_next
        kept: TracebackType | None = None
        for entry in reversed(shown):
            kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
        error.__traceback__ = kept
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def user_line(error: BaseException | None = None) -> str:
    """Return `file:line` of the innermost frame, of an error or of this call, that is neither Pando's nor torch's."""
    raised = [] if error is None else [*traceback.walk_tb(error.__traceback__)]
    frames = chain(reversed(raised), traceback.walk_stack(sys._getframe(1)))
    return next((f"{f.f_code.co_filename}:{line}" for f, line in frames if _is_users_frame(f)), "?")


@overload
def without_internal_frames(function: type[R]) -> type[R]: ...
@overload
def without_internal_frames(function: Callable[P, R], text: str | None = None) -> Callable[P, R]: ...
def without_internal_frames(function: Any, text: str | None = None) -> Any:
    """Return a wrapper that calls `function`, and applies `hide_internal_frames` to the errors that it raises. If the
    arguments do not fit, the error has the first example of `text`, by default the docstring. Of a class, replace its
    constructor, its properties and its public methods by such wrappers, and return the class."""
    if isinstance(function, type):
        for base in filter(_is_of_pando, function.__mro__):
            for name, member in list(vars(base).items()):
                if isinstance(member, FunctionType) and (name in ("__init__", "__call__") or name[0] != "_"):
                    text = base.__doc__ if name == "__init__" else None
                    setattr(base, name, without_internal_frames(member, text))
                elif isinstance(member, property):
                    accessors: Any = (member.fget, member.fset, member.fdel)
                    accessors = (accessor and without_internal_frames(accessor) for accessor in accessors)
                    setattr(base, name, property(*accessors, doc=member.__doc__))
        return function
    if function in _wrappers:
        return function
    example = re.search(r">>> (.*)", text or function.__doc__ or "")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # notebooks and pytest leave this frame out, too
        try:
            return function(*args, **kwargs)
        except Exception as error:
            unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            name = unknown[1] if unknown and unknown[1] in kwargs else ""
            if isinstance(error, TypeError) and example and (name or not _can_call(function, args, kwargs)):
                meant = did_you_mean(name, inspect.signature(function).parameters) if name else ""
                error.add_note(f"  fix: {example[1]}{meant}")
            hide_internal_frames(error)
            raise

    _wrappers.add(call)
    return call


def _can_call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function can be called with these arguments."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _is_of_pando(cls: type) -> bool:
    """Return whether a class is of Pando: its bases may be torch's."""
    return cls.__module__.partition(".")[0] in _PACKAGES


def _is_users_frame(frame: FrameType) -> bool:
    """Return whether a frame is neither of Pando, its generated code, nor of torch."""
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package not in _INTERNAL and not frame.f_code.co_filename.startswith("<piece ")


class CaptureError(Error):
    """The error of a model that can't be traced: data-dependent Python, a rebound buffer, no loss."""


class PartitionError(Error):
    """The error of blocks and stages that don't fit together."""


class BatchError(Error):
    """The error of a batch with other shapes, types or structure than the executor was compiled for."""


class DataError(Error):
    """The error of a data loader or one of its workers that failed."""


class RunError(Error):
    """The error of a piece that failed while it ran. The weights are those of the last finished update."""


class RecoverableError(Error):
    """The error of a device that can be used again after `recovery_action`, by default "IPU_RESET"."""

    def __init__(self, message: str, recovery_action: str = "IPU_RESET", location: str = "") -> None:
        super().__init__(message, location)
        self.recovery_action = recovery_action


class UnrecoverableError(Error):
    """The error of a device or process that is lost. The executor can't be called again: start the program again,
    from `popdist.Checkpoint`."""
