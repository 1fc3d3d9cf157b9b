"""Leftovers: fake tensors that the forward has stored where they outlive the capture.

They have no values: code that reads one after the call, from a list of losses or a metric, would fail.
"""

import contextlib
import gc
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import CodeType, FrameType, FunctionType, ModuleType, NoneType
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...errors import CaptureError
from ...torch_private import FakeTensor

logger = logging.getLogger("poptorch::python")

_SHELVES = {"_parameters", "_buffers", "_modules"}
# Types of objects that are not searched.
_CLOSED = (NoneType, str, bytes, int, float, Tensor, type, ModuleType, CodeType, FrameType)
# Of Pando: an executor that the model reaches (over Lightning's trainer) leads to other models and to all globals.
_OWN_PACKAGES = ("popengine", "poptorch", "popdist", "lightning_ipu", "lightning_graphcore")
_MOST_OBJECTS = 300_000  # that a search visits


class StoredValue(NamedTuple):
    """A value that another object holds, its path (such as "model.losses[0]"), and a function that replaces it."""

    path: str
    value: Any
    put: Callable[[Any], None]
    is_elsewhere: bool = False  # outside of the module


def fake_tensors_in(value: Any, path: str = "model", seen: set[int] | None = None) -> list[StoredValue]:
    """Return the fake tensors that are reachable from a value through attributes, containers, generators and
    closures, each with its shortest path, which begins with `path`; not those in modules' parameters. Add the ids of
    what was searched to `seen`, and search no more in what is there."""
    found: list[StoredValue] = []
    seen = set() if seen is None else seen
    queue = deque([StoredValue(path, value, lambda value: None)])
    while queue and len(seen) < _MOST_OBJECTS:
        item = queue.popleft()
        if isinstance(item.value, FakeTensor):
            found.append(item)
        elif id(item.value) not in seen and not isinstance(item.value, _CLOSED) and not _is_own(item.value):
            seen.add(id(item.value))
            queue += _values_held_by(*item[:3])
    return found


def _is_own(value: Any) -> bool:
    """Return whether a value is an object of Pando's; its modules hold what the user's forward puts there."""
    return type(value).__module__.partition(".")[0] in _OWN_PACKAGES and not isinstance(value, nn.Module)


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
        own = object.__getattribute__(value, "__dict__")  # proxies would do something of their own
    except AttributeError:  # tuples, sets, methods, slots, iterators and generators
        yield from [StoredValue(f"{path}[...]", part, put) for part in gc.get_referents(value)]
        return
    is_module = isinstance(value, nn.Module)
    for name in own.keys() - _SHELVES if is_module else own.keys():
        yield StoredValue(f"{path}.{name}", own[name], partial(own.__setitem__, name))
    if is_module:
        yield from [StoredValue(f"{path}.{name}", child, put) for name, child in value.named_children()]


@contextlib.contextmanager
def attributes_restored(module: nn.Module) -> Iterator[None]:
    """Run a forward, then undo its assignments of values that contain fake tensors to attributes of modules: with a
    warning if there was another value, except in weight normalization."""
    before = [(child, dict(vars(child))) for child in module.modules()]
    try:
        yield
    finally:
        _restore_attributes(before)


def check_none_left(module: nn.Module, others: Iterable[tuple[Any, str]]) -> None:
    """Raise CaptureError if fake tensors are left in a module, or in `others`: (value, path) pairs."""
    seen = set[int]()
    found = [fake_tensors_in(value, path, seen) for value, path in ((module, "model"), *others)]
    paths = sorted({leftover.path for each in found for leftover in each})
    if paths:
        raise CaptureError(
            f"the forward leaves tensors behind in {', '.join(paths)}\n"
            "  why: it runs once, to be compiled; a tensor that it keeps outside has no value then, or later\n"
            "  fix: return the tensor from forward; keep a running value in a buffer (`register_buffer`), and"
            " write into it; or forget it at the end of forward (`self.name = None`); update a metric (torchmetrics)"
            " after the call, with what it returns"
        )


def _restore_attributes(before: list[tuple[nn.Module, dict[str, Any]]]) -> None:
    undone = []
    for child, attributes in before:
        for name, value in list(vars(child).items()):
            if attributes.get(name) is value or not fake_tensors_in(value):
                continue
            del vars(child)[name]
            if name in attributes:
                vars(child)[name] = attributes[name]
                # Reparametrizations compute `weight` from `weight_g` and `weight_v`, or `weight_orig`.
                if not any(parameter.startswith(f"{name}_") for parameter in child._parameters):
                    undone.append(f"{type(child).__name__}.{name}")
    warn_of_restored(undone)


def warn_of_restored(paths: Sequence[str]) -> None:
    """Log a warning of attributes and globals that forward has set to fake tensors, and that are put back."""
    if paths:
        logger.warning(
            "the forward sets %s to a tensor, which has no value outside of the compiled model: the attribute"
            " is as it was before; return the tensor from forward, if the program needs it",
            ", ".join(paths),
        )
