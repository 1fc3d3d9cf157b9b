"""Watching: for a while, functions see each read and write of attributes of a class's objects."""

from contextlib import ExitStack
from functools import partial
from typing import Any

from .reads import MISSING


def watch_class(cls: type, watcher: Any, undo: ExitStack) -> bool:
    """Replace a class's `__getattribute__` and `__setattr__` by functions that call a `Noting`, until `undo` is closed.
    Return False if the class can't be changed. The value of an absent attribute is MISSING."""
    if any(getattr(vars(base).get("__getattribute__"), "watcher", None) is watcher for base in cls.__mro__):
        return True
    read: Any = cls.__getattribute__
    write: Any = cls.__setattr__
    is_plain = read is object.__getattribute__

    def reading(owner: Any, name: str) -> Any:
        if not watcher.is_noting():
            return read(owner, name)
        try:
            value = read(owner, name)
        except AttributeError:
            watcher.after_read(owner, name, MISSING, is_plain)
            raise
        watcher.after_read(owner, name, value, is_plain)
        return value

    def writing(owner: Any, name: str, value: Any) -> None:
        if watcher.is_noting():
            watcher.before_write(owner, name, value)
        write(owner, name, value)

    reading.watcher = watcher  # pyright: ignore[reportFunctionMemberAccess]
    for name, function in (("__getattribute__", reading), ("__setattr__", writing)):
        before = vars(cls).get(name)
        try:
            setattr(cls, name, function)
        except (TypeError, AttributeError):  # a class of C, or one that refuses
            return False
        undo.callback(partial(delattr, cls, name) if before is None else partial(setattr, cls, name, before))
    return True
