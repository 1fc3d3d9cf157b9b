"""Reads: the values that a recorded forward has read from Python, and whether they are still the same.

A recording holds as long as they are. `noting.py` finds the values; here they are compared, before each call.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping
from itertools import starmap
from types import CodeType, MappingProxyType, MethodType
from typing import Any

import numpy
import torch
from torch import Tensor

from ...torch_private import FakeTensor
from .user_code import is_opaque

# Of no package: noting leaves out objects of ours.
MISSING: Any = type("Missing", (), {"__module__": "", "__repr__": lambda self: "missing"})()


class Read:
    """A value that forward has read: the `view` of what `get(*args)` returns, or MISSING if it raises.

    With `is_content`, the value may be replaced by another object of its class with equal parts. Its parts are the
    reads with this read as `parent`; their `locate` returns the first of their `args` for the new object.
    """

    __slots__ = ("args", "get", "is_content", "locate", "parent", "path", "value", "view", "where")

    def __init__(
        self,
        path: str,
        get: Callable[..., Any],
        *args: Any,
        parent: Read | None = None,
        locate: Callable[[Any], Any] | None = None,
        view: Callable[[Any], Any] | None = None,
        where: str = "",
    ) -> None:
        self.path, self.where = path, where  # for messages: such as "layer.scale", and the user's line
        self.get, self.args, self.view = get, args, view
        self.parent, self.locate, self.is_content = parent, locate, False
        self.value = self.present()

    def unviewed(self) -> Any:
        """Return the present value, without `view`."""
        return self.get(*self.args)

    def present(self, *args: Any) -> Any:
        """Return the present value. With `args`, call `get` with these arguments in place of the read's own."""
        try:
            value = self.get(*(args or self.args))
            return value if self.view is None else self.view(value)
        # An item, attribute or cell has gone; or tensors or arrays are compared.
        except (LookupError, AttributeError, ValueError, TypeError, RuntimeError):
            return MISSING

    def __str__(self) -> str:
        words = {len: "the number of items of ", tuple: "the keys of ", type: "the class of "}.get(
            self.get, ""
        )
        return f"{words}{self.path} is {_in_words(self.present())}, and was {_in_words(self.value)}"


class Reads:
    """The values that a recording has read, and by key of the graph's constants the plain tensors among them, each as a
    function that returns the present tensor."""

    def __init__(self) -> None:
        self.all: list[Read] = []  # the read of an object precedes those of its parts
        self.dropped: set[str] = set()  # paths of values that forward changes itself
        self.has_draws = False  # whether forward draws random numbers of Python, or reads a clock
        self.tensors: dict[str, Callable[[], Tensor]] = {}
        self._is_same: Callable[[], bool] | None = None  # compares by identity

    def hold(self) -> bool:
        """Return whether all values are as they were, or other objects with equal content."""
        if self._is_same is None:
            self._is_same = _make_comparison(self.all)
        if self._is_same():
            return True
        moved: dict[Read, Any] = {}
        if next(self._changed_reads(moved), None) is not None:
            return False
        for read in self.all:
            read.args = _moved_args(read, moved)
            read.value = moved.get(read, read.value)
        self._is_same = None
        return True

    def changed(self) -> list[Read]:
        """Return the reads whose values have changed."""
        return [*self._changed_reads({})]

    def _changed_reads(self, moved: dict[Read, Any]) -> Iterator[Read]:
        """Yield the reads with a different value. Add those with a new, equal object to `moved`, with the object."""
        for read in self.all:
            now = read.present(*_moved_args(read, moved))
            is_same = now is read.value or are_same(read.value, now)
            if not is_same and not (read.is_content and type(now) is type(read.value)):
                yield read
            elif now is not read.value and read.view is None:
                moved[read] = now

    def drop(self, paths: Container[str]) -> None:
        """Stop comparing the values with these paths, and their parts, except plain tensors, which each call binds."""
        dropped = set[Read]()
        bound = {getattr(read_tensor, "__self__", None) for read_tensor in self.tensors.values()}
        for read in self.all:
            if read not in bound and (read.path in paths or read.parent in dropped):
                dropped.add(read)
        self.all = [read for read in self.all if read not in dropped]
        self._is_same = None

    def renew(self) -> None:
        """Replace the recorded values by the present ones."""
        for read in self.all:
            read.value = read.present()
        self._is_same = None


def _moved_args(read: Read, moved: dict[Read, Any]) -> tuple[Any, ...]:
    """Return the arguments of a read's `get`, if the objects in `moved` are in the place of others."""
    if read.locate is None or read.parent not in moved:
        return read.args
    return read.locate(moved[read.parent]), *read.args[1:]


_PLAIN_CONTAINERS = (dict, MappingProxyType, list, tuple)
_GET_ITEM = {dict.get, MappingProxyType.get, *(cls.__getitem__ for cls in _PLAIN_CONTAINERS)}


def _make_comparison(reads: list[Read]) -> Callable[[], bool]:
    """Return a function that compares values by identity, in loops of C."""
    viewed = [read for read in reads if read.view is not None]
    empty = [read.args[0] for read in reads if read.get is len and not read.value]
    groups: defaultdict[Any, tuple[list[Any], list[Any]]] = defaultdict(lambda: ([], []))  # arguments, values
    for read in reads:
        get, args = read.get, read.args
        if get in _GET_ITEM and type(args[0]) in _PLAIN_CONTAINERS and read.value is not MISSING:
            get, args = operator.getitem, args[:2]
        if read.view is None and (get is not len or read.value):
            groups[get][0].append(args)
            groups[get][1].append(read.value)
    compared = [
        (operator.eq if get in (len, tuple) else operator.is_, get, *of_group)
        for get, of_group in groups.items()
    ]

    def is_same() -> bool:
        try:
            return (
                all(all(map(same, starmap(get, args), values)) for same, get, args, values in compared)
                and not any(empty)
                and all(are_same(read.value, read.present()) for read in viewed)
            )
        except (LookupError, AttributeError, ValueError, TypeError, RuntimeError):
            return False

    return is_same


_HOOKS = operator.attrgetter("_backward_hooks"), operator.attrgetter("_post_accumulate_grad_hooks")


def gradient_hooks(tensors: Mapping[str, Tensor]) -> tuple[tuple[str, Any], ...]:
    """Return (name, hook) of each present gradient hook of these tensors."""
    shelves = (pair for get in _HOOKS for pair in zip(tensors, map(get, tensors.values()), strict=True))
    return tuple((name, hook) for name, hooks in shelves if hooks for hook in hooks.values())


def layout_of(value: Any) -> Any:
    """Return dtype, shape and strides of a tensor, and whether it has values; of another value its type."""
    if not isinstance(value, Tensor):
        return type(value)
    return isinstance(value, FakeTensor), value.dtype, value.shape, value.stride()


def are_same(one: Any, other: Any) -> bool:
    """Return whether a forward that reads either value computes the same: one object, or equal plain data."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, float | complex):
        return repr(one) == repr(other)  # NaN is equal, and 0.0 and -0.0 are not
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(are_same, one, other))
    if isinstance(one, Tensor):
        return layout_of(one) == layout_of(other) and one.equal(other)
    if isinstance(one, numpy.ndarray):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes()
    # Values of Python and numpy that can't change; others compare by identity, or by their parts.
    is_value = isinstance(one, MethodType | CodeType) or type(one).__hash__ not in (None, object.__hash__)
    return is_value and is_opaque(type(one)) and one == other


def _in_words(value: Any) -> str:
    text = f"a {type(value).__name__}" if isinstance(value, torch.nn.Module | Tensor) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
