"""Nested values: which containers can hold tensors, and the order in which their parts are traversed.

Tuples, lists, dictionaries, their subclasses, dataclasses and types with a parser (`registerCustomArgParser`)
are traversed to any depth; everything else that is not a tensor is a constant. Dictionaries are traversed by
sorted key (unsorted if keys can't be compared), so that the order in which a caller wrote them is irrelevant;
they are rebuilt in their original order.

    >>> batch = {"x": a, "more": [b, 3]}
    >>> tensors_of(batch)                                # [b, a]: "more" comes before "x"
    >>> with_tensors(batch, iter([b + 1, a + 1]))        # {"x": a + 1, "more": [b + 1, 3]}
"""

from __future__ import annotations

import copy
import functools
import json
import operator
from abc import ABC, abstractmethod
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import repeat
from types import FunctionType
from typing import Any, NamedTuple

import numpy
import torch

from popengine.errors import Error
from poptorch.checks import checked


class ICustomArgParser(ABC):
    """The interface of a parser for a user's type: it finds a value's tensors and rebuilds it with others.

    >>> class PairParser(poptorch.ICustomArgParser):
    ...     def yieldTensors(self, struct):
    ...         yield from (struct.left, struct.right)
    ...     def reconstruct(self, original_structure, tensor_iterator):
    ...         return Pair(next(tensor_iterator), next(tensor_iterator))
    >>> poptorch.registerCustomArgParser(Pair, PairParser())
    """

    @abstractmethod
    def yieldTensors(self, struct: Any) -> Iterator[torch.Tensor]:
        """Yield every tensor of `struct`, always in the same order."""

    @abstractmethod
    def reconstruct(self, original_structure: Any, tensor_iterator: Iterator[torch.Tensor]) -> Any:
        """Build a value like `original_structure` from tensors in the order of `yieldTensors`."""


_parsers: dict[type, ICustomArgParser] = {}  # by exact type; written by registerCustomArgParser alone


def registerCustomArgParser(arg_type: type, arg_parser: ICustomArgParser | None) -> None:
    """Register a parser (None: remove it): values of exactly `arg_type` may then hold tensors in inputs,
    outputs and batches. Raises Error if `arg_parser` is no ICustomArgParser."""
    if arg_parser is None:
        _parsers.pop(arg_type, None)
        return
    words = "arg_parser must inherit from ICustomArgParser: registerCustomArgParser"
    _parsers[arg_type] = checked(words, arg_parser, ICustomArgParser, Error, fix="an object, MyParser()")


def registered_parsers() -> dict[type, ICustomArgParser]:
    """Return a copy of the registered parsers by type, for a process that is started without a fork."""
    return dict(_parsers)


class Part(NamedTuple):
    """A nested value, or a part of one, without its tensors."""

    type: type  # torch.Tensor for every kind of tensor
    keys: tuple[Any, ...] = ()  # of a container: keys (sorted), field names or indices
    constant: Constant | None = None  # the value, if it is neither tensor nor container


Spec = tuple[tuple[str, Part], ...]  # each part with its path; values with equal specs differ in tensors only


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Constant:
    """A wrapper that compares values by contents, also if their `==` returns an array or compares ids."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and _are_equal(self.value, other.value, set())

    def __hash__(self) -> int:
        return hash(type(self.value))  # coarse: equal values of any type must share it

    def __repr__(self) -> str:
        return repr(self.value)


_TENSOR = Part(torch.Tensor)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in `value`, depth first; those of a dictionary by sorted key."""
    if isinstance(value, torch.Tensor):  # first, since each call of a model comes here often
        return [value]
    return [tensor for part in (parts_of(value) or {}).values() for tensor in tensors_of(part)]


def constants_of(value: Any, path: str) -> Iterator[tuple[Any, str, bool]]:
    """Yield (constant, path, whether the path ends in a name) of each constant; the path as in `spec_of`."""
    for place, constant, part, is_named in iterate_parts(value, path):
        if part.constant is not None:
            yield constant, place, is_named


def with_tensors(value: Any, replacements: Iterator[Any]) -> Any:
    """Return a copy of `value` whose tensors are replaced one by one, in the order of `tensors_of`.
    Parts without tensors are not copied. Replacements may be of any type: tensors, names, counts."""
    return map_parts(value, lambda part: next(replacements) if isinstance(part, torch.Tensor) else part)


def map_parts(value: Any, change: Callable[[Any], Any], copied: tuple[type, ...] = ()) -> Any:
    """Return a copy of `value` in which each part is `change(part)`: containers first, then the parts of those that are
    unchanged. Containers of which no part changes are not copied, unless their class is one of `copied`."""
    changed = change(value)
    parts = parts_of(value) if changed is value else None
    if parts is None:
        return changed
    mapped = {key: map_parts(part, change, copied) for key, part in parts.items()}
    is_same = type(value) not in copied and all(mapped[key] is part for key, part in parts.items())
    return value if is_same else copy_with_parts(value, mapped)


def spec_of(value: Any, path: str = "") -> Spec:
    """Return the classes, keys and constants of a nested value, by path (`name[0]`, `name["key"]`, `name.field`)."""
    if type(value) is torch.Tensor and torch.Tensor not in _parsers:
        return ((path, _TENSOR),)
    return tuple((place, part) for place, _, part, _ in iterate_parts(value, path))


def iterate_parts(value: Any, path: str, is_named: bool = False) -> Iterator[tuple[str, Any, Part, bool]]:
    """Yield (path, value, `Part`, whether the path ends in a name) of a nested value and of all that it contains."""
    if (parts := parts_of(value)) is not None:
        yield path, value, Part(type(value), tuple(parts)), is_named
        for key, part in parts.items():
            yield from iterate_parts(part, path + path_step(type(value), key), isinstance(key, str))
    elif isinstance(value, torch.Tensor):
        yield path, value, _TENSOR, is_named
    else:
        yield path, value, Part(type(value), constant=Constant(value)), is_named


def arguments_of(batch: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return positional and keyword arguments of a call from a tensor, a tuple or list, or a dictionary."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return batch if isinstance(batch, tuple | list) else (batch,), {}


def loss_field(returned: Any) -> Any:
    """Return the key or attribute "loss" of what forward returned; None if it has neither."""
    return returned.get("loss") if isinstance(returned, Mapping) else getattr(returned, "loss", None)


@functools.cache
def path_step(container: type, key: Any) -> str:
    """Return the code that reads the part `key` of a container of this class: `[0]`, `["key"]`, `.field`."""
    if not isinstance(key, str):
        return f"[{key!r}]"
    is_field = is_dataclass(container) and not issubclass(container, dict | UserDict)
    return f".{key}" if is_field else f"[{json.dumps(key, ensure_ascii=False)}]"


def parts_of(value: Any) -> dict[Any, Any] | None:
    """Return a container's parts by key (sorted), field name or index; None if `value` is no container."""
    if (parser := _parsers.get(type(value))) is not None:
        return dict(enumerate(parser.yieldTensors(value)))
    if isinstance(value, torch.Tensor):
        return None
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    if isinstance(value, dict | UserDict):
        try:
            return {key: value[key] for key in sorted(value)}
        except TypeError:  # keys of several types, or without an order
            return dict(value)
    if is_dataclass(value) and not isinstance(value, type | torch.nn.Module):
        return {f.name: getattr(value, f.name) for f in fields(value) if hasattr(value, f.name)}
    return None


def copy_with_parts(value: Any, parts: dict[Any, Any]) -> Any:
    """Return a copy of a container with other parts; `parts` has the keys of `parts_of(value)`."""
    cls = type(value)
    if cls in _parsers:
        return _parsers[cls].reconstruct(value, iter(parts.values()))
    if isinstance(value, tuple):
        return cls(*parts.values()) if hasattr(value, "_fields") else cls(parts.values())
    try:  # a copy keeps the order of keys, and what a subclass added: a default factory, attributes
        twin = copy.copy(value)
    except TypeError:
        return cls(parts.values()) if isinstance(value, list) else cls(**parts)
    for key, part in parts.items():
        if isinstance(value, dict | UserDict | list):
            twin[key] = part
        else:
            object.__setattr__(twin, key, part)  # also in a frozen dataclass
    return twin


def _are_equal(one: Any, other: Any, seen: set[tuple[int, int]]) -> bool:
    """Return whether two constants have the same type and equal contents. `seen`: the ids of objects that are being
    compared, and may refer to each other."""
    if one is other or (id(one), id(other)) in seen:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        layouts = ((tensor.is_meta, tensor.dtype, tensor.shape) for tensor in (one, other))
        return operator.eq(*layouts) and (one.is_meta or torch.equal(one, other))
    if isinstance(one, float | complex):
        return repr(one) == repr(other)  # NaN is equal, and 0.0 and -0.0 are not
    if isinstance(one, dict | UserDict):
        return one.keys() == other.keys() and all(_are_equal(one[key], other[key], seen) for key in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(_are_equal, one, other, repeat(seen)))
    if type(one).__eq__ is object.__eq__:
        seen.add((id(one), id(other)))
        return (state := _state_of(one)) is not None and _are_equal(state, _state_of(other), seen)
    try:
        return bool(one == other)
    except (ValueError, RuntimeError):  # arrays, or objects that hold arrays: the truth of `==` is ambiguous
        return (
            _are_equal(vars(one), vars(other), seen)
            if hasattr(one, "__dict__")
            else numpy.array_equal(one, other)
        )


def _state_of(value: Any) -> Any:
    """Return what makes up an object that `==` compares by identity; None if Python can't tell."""
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return value.__code__, value.__defaults__, value.__kwdefaults__, cells, vars(value)
    if isinstance(value, type):
        return None
    try:
        _, arguments, state, *_ = (*object.__reduce_ex__(value, 2), None)
    except Exception:  # of C, or its class refuses
        return None
    if type(value).__reduce__ is object.__reduce__:
        state = object.__getstate__(value)  # a `__getstate__` of the class may leave something out
    return arguments, state
