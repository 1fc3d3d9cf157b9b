"""Leftovers: fake tensors that the forward has stored where they outlive the capture.

They have no values: code that reads one after the call, from a list of losses or a metric, would fail.
"""

import contextlib
import gc
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from types import CodeType, FrameType, FunctionType, ModuleType, NoneType
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...errors import CaptureError
from ...torch_private import FakeTensor
from .user_code import PANDO, package_of

logger = logging.getLogger("poptorch::python")

_SHELVES = {"_parameters", "_buffers", "_modules"}
# Types of objects that are not searched.
_CLOSED = (NoneType, str, bytes, int, float, Tensor, type, ModuleType, CodeType, FrameType)
_MAX_OBJECTS = 300_000  # that a search visits


class StoredValue(NamedTuple):
    """A value that another object holds, its path (such as "model.losses[0]"), and a function that replaces it."""

    path: str
    value: Any
    put: Callable[[Any], None]
    is_elsewhere: bool = False  # outside of the module


def fake_tensors_in(value: Any, path: str = "model", seen: set[int] | None = None) -> list[StoredValue]:
    """Return the fake tensors that are reachable from a value through attributes, containers, generators and closures,
    except those in modules' parameters. Each has its shortest path, which begins with `path`. Objects with ids in
    `seen` are not searched; the ids of searched objects are added to `seen`."""
    leftovers: list[StoredValue] = []
    seen = set() if seen is None else seen
    queue = deque([StoredValue(path, value, lambda value: None)])
    while queue and len(seen) < _MAX_OBJECTS:
        item = queue.popleft()
        if isinstance(item.value, FakeTensor):
            leftovers.append(item)
        elif id(item.value) not in seen and not _is_closed(item.value):
            seen.add(id(item.value))
            queue += _values_held_by(*item[:3])
    return leftovers


def _is_closed(item: Any) -> bool:
    """Return whether an object is not searched: of a closed type, or an object of Pando's, since an executor that the
    model reaches (over Lightning's trainer) leads to other models and to all globals. Pando's modules are searched,
    because the user's forward may set their attributes."""
    return isinstance(item, _CLOSED) or (package_of(type(item)) in PANDO and not isinstance(item, nn.Module))


def _values_held_by(path: str, value: Any, put: Callable[[Any], None]) -> Iterator[StoredValue]:
    """Yield the items, attributes or outer variables of a value with this `path`. The `put` of those that can't be
    replaced alone, such as a tuple's, is the argument `put`, which replaces the value."""
    if isinstance(value, (dict, list, deque)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(key, str) and key.startswith("__"):  # of a file's globals, such as "__loader__"
                continue
            yield StoredValue(f"{path}[{key!r}]", item, partial(value.__setitem__, key))
        return
    if isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not bound yet
                yield StoredValue(name, cell.cell_contents, put)
        return
    try:
        attributes = object.__getattribute__(value, "__dict__")  # proxies would do something of their own
    except AttributeError:  # tuples, sets, methods, slots, iterators and generators
        yield from [StoredValue(f"{path}[...]", part, put) for part in gc.get_referents(value)]
        return
    is_module = isinstance(value, nn.Module)
    for name in attributes.keys() - _SHELVES if is_module else attributes.keys():
        yield StoredValue(f"{path}.{name}", attributes[name], partial(attributes.__setitem__, name))
    if is_module:
        yield from [StoredValue(f"{path}.{name}", child, put) for name, child in value.named_children()]


class Shelf(NamedTuple):
    """Attributes or globals that forward may set: the class or dictionary that has them, their values of now and before
    forward by name, a path for messages, and the names of parameters, from which layers may compute attributes."""

    owner: Any
    values: Mapping[str, Any]
    before: dict[str, Any]
    path: str
    parameters: Collection[str] | None = None  # None: outside of the module that is recorded

    def put(self, name: str, value: Any) -> None:
        """Set a value."""
        if isinstance(self.owner, type):
            setattr(self.owner, name, value)
        else:
            self.owner[name] = value

    def restore(self) -> list[str]:
        """Undo assignments of values that contain fake tensors. Return the paths of those that replaced a value, except
        in weight normalization."""
        undone = []
        for name, value in [*self.values.items()]:
            if self.before.get(name) is value or not fake_tensors_in(value):
                continue
            if name in self.before:
                self.put(name, self.before[name])
            elif isinstance(self.owner, type):
                delattr(self.owner, name)
            else:
                del self.owner[name]
            # Reparametrizations compute `weight` from `weight_g` and `weight_v`, or `weight_orig`.
            is_computed = any(parameter.startswith(f"{name}_") for parameter in self.parameters or ())
            if self.parameters is None or (name in self.before and not is_computed):
                undone.append(f"{self.path}.{name}")
        return undone


class Shelves(dict[int, Shelf]):
    """The attributes and globals that forward may set, by the owner's id: those of the module's layers, and those added
    later."""

    def __init__(self, module: nn.Module) -> None:
        for child in module.modules():
            self.add(vars(child), vars(child), type(child).__name__, child._parameters)

    def add(self, owner: Any, values: Mapping[str, Any], path: str, parameters: Any = None) -> None:
        """Store the present values of an owner, unless they are stored already."""
        self.setdefault(id(owner), Shelf(owner, values, dict(values), path, parameters))

    def stored_elsewhere(self) -> list[StoredValue]:
        """Return the fake tensors that forward has set as globals, or attributes of classes or of other models."""
        return [
            StoredValue(f"{shelf.path}.{name}", value, partial(shelf.put, name), is_elsewhere=True)
            for shelf in self.values()
            if shelf.parameters is None
            for name, value in shelf.values.items()
            if isinstance(value, FakeTensor)
        ]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Run a forward, then undo its assignments of values that contain fake tensors, with a warning."""
        try:
            yield
        finally:
            if undone := [path for shelf in self.values() for path in shelf.restore()]:
                logger.warning(
                    "the forward sets %s to a tensor, which has no value outside of the compiled model: the attribute"
                    " is as it was before\n  fix: return the tensor from forward, if the program needs it; make layers"
                    " in __init__, because a layer that forward makes is not trained",
                    ", ".join(undone),
                )


def check_none_left(module: nn.Module, elsewhere: Iterable[tuple[Any, str]]) -> None:
    """Raise CaptureError if fake tensors are left in a module, or in `elsewhere`: (value, path) pairs."""
    seen = set[int]()
    leftovers = [fake_tensors_in(value, path, seen) for value, path in ((module, "model"), *elsewhere)]
    paths = sorted({stored.path for of_object in leftovers for stored in of_object})
    if paths:
        raise CaptureError(
            f"the forward leaves tensors behind in {', '.join(paths)}\n"
            "  why: it runs once, to be compiled; a tensor that it keeps outside has no value then, or later\n"
            "  fix: return the tensor from forward; keep a running value in a buffer (`register_buffer`), and"
            " write into it; or forget it at the end of forward (`self.name = None`); update a metric (torchmetrics)"
            " after the call, with what it returns"
        )
