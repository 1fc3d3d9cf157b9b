"""Leftovers: fake tensors that the forward has stored where they outlive the capture.

They have no values: code that reads one after the call, from a list of losses or a metric, would fail.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import CodeType, FrameType, FunctionType, ModuleType, NoneType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ...errors import CaptureError

logger = logging.getLogger("poptorch::python")

_SHELVES = {"_parameters", "_buffers", "_modules"}
# Types of objects that are not searched.
_CLOSED = (NoneType, str, bytes, int, float, Tensor, type, ModuleType, CodeType, FrameType)
_MOST = 300_000  # objects that a search visits at most


class Leftover(NamedTuple):
    """A stored value: its path (such as "model.losses[0]"), the value, and a function that replaces it."""

    path: str
    value: Any
    put: Callable[[Any], None]


def fake_tensors_in(value: Any, path: str = "model") -> list[Leftover]:
    """Return the fake tensors that are reachable from a value, such as a module: through attributes,
    containers, objects, generators, and the outer variables of functions; not parameters and buffers."""
    found: list[Leftover] = []
    seen: set[int] = set()
    stack = [Leftover(path, value, _nowhere)]
    while stack and len(seen) < _MOST:
        place = stack.pop()
        if isinstance(place.value, FakeTensor):
            found.append(place)
        elif id(place.value) not in seen and not isinstance(place.value, _CLOSED):
            seen.add(id(place.value))
            stack += _held_items(*place)
    return found


def _nowhere(value: Any) -> None:
    raise AssertionError("nothing holds the model")


def _held_items(path: str, value: Any, put: Callable[[Any], None]) -> Iterator[Leftover]:
    """Yield each item that a value holds, tensor or not. Where an item can't be replaced
    alone, its `put` replaces the whole value."""
    if isinstance(value, (dict, list, deque)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield Leftover(f"{path}[{key!r}]", item, partial(value.__setitem__, key))
        return
    if isinstance(value, FunctionType):
        yield from [Leftover(name, variable, put) for name, variable in _outer_variables(value)]
        return
    try:
        own = object.__getattribute__(value, "__dict__")  # proxies would do something of their own
    except AttributeError:  # tuples, sets, methods, slots, iterators and generators
        yield from [Leftover(f"{path}[...]", part, put) for part in gc.get_referents(value)]
        return
    is_module = isinstance(value, nn.Module)
    for name in own.keys() - _SHELVES if is_module else own.keys():
        yield Leftover(f"{path}.{name}", own[name], partial(own.__setitem__, name))
    if is_module:
        yield from [Leftover(f"{path}.{name}", child, put) for name, child in value.named_children()]
        kinds = [kind for kind in type(value).__mro__ if not kind.__module__.startswith("torch.")]
        functions = [f for kind in kinds for f in vars(kind).values() if isinstance(f, FunctionType)]
        yield from [Leftover(path, function, put) for function in functions]


def _outer_variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of variables of enclosing functions, and of globals that are not callable."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not bound yet
            yield name, cell.cell_contents
    for name in _global_names(function.__code__):
        if name in function.__globals__ and not callable(function.__globals__[name]):
            yield name, function.__globals__[name]


def _global_names(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes that a function's code uses, with its nested functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


class Attributes:
    """A snapshot of the plain attributes of a module and its submodules, made before a forward runs."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = [(child, dict(vars(child))) for child in module.modules()]

    def put_back(self, was_read: Callable[[Tensor], bool]) -> None:
        """Undo the forward's assignments of fake tensors: delete new attributes, and restore replaced values.

        A real tensor is restored if `was_read(tensor)` is False (as in weight normalization); None or a
        container is restored with a warning. Other attributes keep their fake tensors.
        """
        undone = []
        for child, before in self._before:
            for name, value in list(vars(child).items()):
                old = before.get(name)
                if old is value or not fake_tensors_in(value):
                    continue
                if name not in before:
                    del vars(child)[name]
                elif isinstance(old, Tensor) and not isinstance(old, FakeTensor) and not was_read(old):
                    vars(child)[name] = old
                elif old is None or (isinstance(old, (list, tuple, dict)) and not fake_tensors_in(old)):
                    vars(child)[name] = old
                    undone.append(f"{type(child).__name__}.{name}")
        if undone:
            logger.warning(
                "the forward sets %s to a tensor, which has no value outside of the compiled model: the attribute"
                " is as it was before; return the tensor from forward, if the program needs it",
                ", ".join(undone),
            )

    def check(self, others: Sequence[tuple[Any, str]] = ()) -> None:
        """Raise CaptureError if fake tensors are left in the module, or in `others`: (value, path) pairs."""
        places = [(self._module, "model"), *others]
        paths = sorted({leftover.path for place in places for leftover in fake_tensors_in(*place)})
        if paths:
            raise CaptureError(
                f"the forward leaves tensors behind in {', '.join(paths)}\n"
                "  why: it runs once, to be compiled; a tensor that it keeps outside has no value then, or later\n"
                "  fix: return the tensor from forward; keep a running value in a buffer (`register_buffer`), and"
                " write into it; or forget it at the end of forward (`self.name = None`)"
            )
