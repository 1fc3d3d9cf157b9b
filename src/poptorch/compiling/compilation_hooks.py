"""Functions that run before and after every compilation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle

_before: OrderedDict[int, Callable[[], Any]] = OrderedDict()
_after: OrderedDict[int, Callable[[], Any]] = OrderedDict()


def _register(
    hooks: OrderedDict[int, Callable[[], Any]], hook: Callable[[], Any], name: str
) -> RemovableHandle:
    if not callable(hook):
        raise RuntimeError(f"{name} hook must be callable; found {hook!r}")
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def registerPreCompileHook(hook: Callable[[], Any]) -> RemovableHandle:
    """Call `hook()` before every compilation, in order of registration; `remove()` the handle to stop."""
    return _register(_before, hook, "Pre-compile")


def registerPostCompileHook(hook: Callable[[], Any]) -> RemovableHandle:
    """Call `hook()` after every compilation, failed ones included."""
    return _register(_after, hook, "Post-compile")


def before_compilation() -> None:
    for hook in list(_before.values()):
        hook()


def after_compilation() -> None:
    for hook in list(_after.values()):
        hook()
