"""Functions that run before and after every compilation."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Literal

from torch.utils.hooks import RemovableHandle

_hooks: dict[str, OrderedDict[int, Callable[[], Any]]] = {"Pre": OrderedDict(), "Post": OrderedDict()}


def _register(time: str, hook: Callable[[], Any]) -> RemovableHandle:
    if not callable(hook):
        raise RuntimeError(f"{time}-compile hook must be callable; found {hook!r}")
    handle = RemovableHandle(_hooks[time])
    _hooks[time][handle.id] = hook
    return handle


def registerPreCompileHook(hook: Callable[[], Any]) -> RemovableHandle:
    """Call `hook()` before every compilation, in order of registration; `remove()` the handle to stop."""
    return _register("Pre", hook)


def registerPostCompileHook(hook: Callable[[], Any]) -> RemovableHandle:
    """Call `hook()` after every compilation, failed ones included."""
    return _register("Post", hook)


def call_hooks(time: Literal["Pre", "Post"]) -> None:
    for hook in list(_hooks[time].values()):
        hook()
