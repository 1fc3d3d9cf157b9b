"""Errors: one class for each pass, so that the type of an error shows where it was raised."""

import difflib
import functools
import inspect
import os
import re
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType, FunctionType, MappingProxyType, TracebackType
from typing import Any, ParamSpec, TypeVar, overload

P = ParamSpec("P")
R = TypeVar("R")

FULL_TRACEBACK = "POPTORCH_FULL_TRACEBACK"
# Tracebacks leave out the frames of these packages.
_PACKAGES = ("poptorch", "popengine", "popdist", "popvision")
_STANDARD = ("ast", "codecs", "json", "pathlib")  # modules that parse files and texts of users
_INTERNAL = (*_PACKAGES, *_STANDARD, "torch", "concurrent", "contextlib", "inspect")
_GENERATED = ("<piece ", "<options>")  # files of code that Pando makes
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


@overload
def without_internal_frames(function: type[R]) -> type[R]: ...
@overload
def without_internal_frames(function: Callable[P, R], text: str | None = None) -> Callable[P, R]: ...
def without_internal_frames(function: Any, text: str | None = None) -> Any:
    """Return a wrapper that calls `function`, and applies `hide_internal_frames` to the errors that it raises, and
    `_add_fix`, with the first example of such a call in `text`, by default the docstring. Of a class, replace its
    constructor, its properties and its public methods by such wrappers, and return the class."""
    if isinstance(function, type):
        for base in function.__mro__:
            is_ours = base.__module__.partition(".")[0] in _PACKAGES  # its bases may be torch's
            for name, member in list(vars(base).items()) if is_ours else ():
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
    name = getattr(function, "__qualname__", "").removesuffix(".__init__").rpartition(".")[2]
    example = re.search(rf">>> (.*\b{name}\(.*)", text or function.__doc__ or "")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # notebooks and pytest leave this frame out, too
        try:
            return function(*args, **kwargs)
        except Exception as error:
            _add_fix(error, function, args, kwargs, example[1] if example else "")
            hide_internal_frames(error)
            raise

    _wrappers.add(call)
    return call


def _add_fix(error: Exception, function: Any, args: Any, kwargs: dict[str, Any], example: str) -> None:
    """Add a fix, the example of a right call, to an error about the arguments of a call that names no fix. If they do
    not fit the function, and it has no example, the fix is its signature."""
    unknown = "got an unexpected keyword argument"
    qualname = getattr(function, "__qualname__", "")  # a property's function may have no name
    # Messages of the interpreter, or of `Signature.bind`.
    is_misfit = str(error).startswith((f"{qualname}() ", unknown))
    name = next((name for name in kwargs if is_misfit and f"{unknown} {name!r}" in str(error)), "")
    fix_of_keywords = getattr(args[0], "_fix_of_keywords", None) if name and args else None
    if fix_of_keywords is not None:
        error.add_note(fix_of_keywords(kwargs))
    elif is_misfit:
        parameters = inspect.signature(function).parameters
        meant = did_you_mean(name, parameters) if name else ""
        error.add_note(f"  fix: {example or _call_in_words(function, args, parameters)}{meant}")
    elif example and not isinstance(error, OSError) and _is_of_arguments(error, function):
        error.add_note(f"  fix: {example}")


def _call_in_words(function: Any, args: Sequence[Any], parameters: Mapping[str, inspect.Parameter]) -> str:
    """Return the call of a function, or of the class of a constructor, with its parameters and their defaults."""
    name = type(args[0]).__name__ if function.__name__ == "__init__" else function.__name__
    plain = [p.replace(annotation=p.empty) for p in parameters.values() if p.name != "self"]
    return f"{name}{inspect.Signature(plain)}"


def _is_of_arguments(error: Exception, function: Any) -> bool:
    """Return whether an error without a fix was raised by a function's own module, or by `checked`."""
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    if "fix: " in text or "did you mean" in text:
        return False
    names = {str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)}
    names -= {__name__, function.__module__, "poptorch.checks"}
    return all(name.startswith(_STANDARD) for name in names)


def _is_users_frame(frame: FrameType) -> bool:
    """Return whether a frame is neither of Pando, its generated code, nor of torch."""
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package not in _INTERNAL and not frame.f_code.co_filename.startswith(_GENERATED)


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
