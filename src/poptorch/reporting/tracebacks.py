"""Short tracebacks: a mistake of the user's is shown at the user's own lines, without the way through this package.

With POPTORCH_LOG_LEVEL=DEBUG nothing is left out.
"""

import functools
import logging
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, FunctionType, TracebackType
from typing import ParamSpec, TypeVar

import torch

from popengine.errors import Error

from .logs import logger

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_SOURCE = Path(__file__).parents[2]
_OURS = tuple(f"{_SOURCE / name}/" for name in ("poptorch", "popengine", "popdist"))
_LIBRARIES = (
    *_OURS,
    f"{Path(torch.__file__).parent}/",
    f"{sysconfig.get_path('stdlib')}/",
    "<",  # generated code
)


def shown_at_the_users_lines(function: Callable[P, R]) -> Callable[P, R]:
    """A function of the package's face: the errors that it raises for a user's mistake end in a line of the user's.

    That is the line in the model that can't be compiled, or else the line that called us.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.is_inference_mode_enabled():
            # Tensors that are made in it take no gradient, and can't be written to after it: a model's must be others.
            with torch.inference_mode(False):
                return call(*args, **kwargs)
        takes_gradients = torch.is_grad_enabled()
        try:
            return function(*args, **kwargs)
        except KeyboardInterrupt:
            # One that comes just before the end of a `with torch.no_grad()` keeps it from its end.
            torch.set_grad_enabled(takes_gradients)
            raise
        except (Error, AssertionError) as error:
            if not _is_for_the_user(error) or logger.isEnabledFor(logging.DEBUG):
                raise
            # An error that explains one of torch's has left the user's line to that one.
            first = error.__context__.__traceback__ if error.__context__ is not None else None
            shown = _only_users(error.__traceback__) or _only_users(first) or _caller()
            if isinstance(error.__cause__, Error | AssertionError):
                error.__cause__.__traceback__ = None
            raise error.with_traceback(shown) from error.__cause__

    return call


def face(kind: type[T]) -> type[T]:
    """A class of the package's face: `shown_at_the_users_lines` for all of its public methods."""
    for name, member in list(vars(kind).items()):
        if isinstance(member, FunctionType) and (name == "__call__" or not name.startswith("_")):
            setattr(kind, name, shown_at_the_users_lines(member))
    return kind


def _is_for_the_user(error: BaseException) -> bool:
    """An assertion of ours without words is a fault of ours, and of the user's code it is the user's."""
    if isinstance(error, Error):
        return True
    *_, last = _entries(error.__traceback__)
    return bool(error.args) and last.tb_frame.f_code.co_filename.startswith(_OURS)


def _only_users(traceback: TracebackType | None) -> TracebackType | None:
    kept = None
    for entry in reversed(list(_entries(traceback))):
        if not _in_a_library(entry.tb_frame):
            kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept


def _caller() -> TracebackType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _in_a_library(frame):
        frame = frame.f_back
    return None if frame is None else TracebackType(None, frame, frame.f_lasti, frame.f_lineno)


def _entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _in_a_library(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_LIBRARIES)
