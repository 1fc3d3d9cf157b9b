"""Reads: the values that a recorded forward has read from Python, and whether they are still the same.

A recording holds as long as they are. `noting.py` finds the values; here they are compared, before each call.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from itertools import starmap
from types import MethodType
from typing import Any

import numpy
import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from ...ir import Graph
from ...torch_private import FakeTensor, tree_leaves
from .graph_recorder import empty_like, is_pure, run_node, sources_of

# Of no package: noting leaves out objects of ours.
MISSING: Any = type("Missing", (), {"__module__": "", "__repr__": lambda self: "missing"})()
LENGTH, CLASS = object(), object()  # the keys of `contents_of` a container, and of an object's class
MOST_ITEMS = 1000  # of a container; above it, plain items are compared as a whole
aten = torch.ops.aten
# Operations that read no values of their operands.
_READS_LAYOUT = (
    *(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
    *(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default),
)
_COMPARED = (bool, int, str, bytes, frozenset, torch.dtype, torch.device, MethodType, numpy.generic)


@dataclass(slots=True, eq=False)
class Read:
    """A value that forward has read: an item, the length or the class of `owner`, or what `get` returns."""

    path: str  # for messages, such as "layer.scale"
    where: str  # the user's line, if it is known
    owner: Any
    key: Any
    value: Any  # MISSING: the owner had no such item
    get: Callable[[], Any] | None = None

    def present(self) -> Any:
        """Return the value of now; MISSING if there is none."""
        try:
            if self.get is not None:
                return self.get()
            if self.key is LENGTH or self.key is CLASS:
                return contents_of(self.owner) if self.key is LENGTH else type(self.owner)
            has_item = not isinstance(self.owner, Mapping) or self.key in self.owner
            return self.owner[self.key] if has_item else MISSING
        except (LookupError, AttributeError, ValueError, TypeError):  # an item, attribute or cell has gone
            return MISSING

    def finder(self) -> Callable[[], Any]:
        """Return a function that returns the present value."""
        return Read(self.path, self.where, self.owner, self.key, None, self.get).present

    def __str__(self) -> str:
        what, was = self.present(), self.value
        words = ""
        if self.key is LENGTH:
            words = "the content of " if isinstance(was, tuple) else "the number of items of "
        return f"{words}{self.path} is {_in_words(what)}, and was {_in_words(was)}"


class Reads:
    """The values that a recording has read, and by key of the graph's constants the plain tensors among them, each as a
    function that returns the present tensor."""

    def __init__(self) -> None:
        self.all: list[Read] = []
        self.dropped: set[str] = set()  # paths of values that forward changes itself
        self.has_draws = False  # whether forward asks for random numbers of Python, or the time
        self.tensors: dict[str, Callable[[], Tensor]] = {}
        self._is_same: Callable[[], bool] | None = None  # compares by identity

    def note(self, path: str, get: Callable[[], Any]) -> None:
        """Note what a function returns as a value that forward has read."""
        self.all.append(Read(path, "", None, None, get(), get))

    def hold(self) -> bool:
        """Return whether all values are as they were."""
        if self._is_same is None:
            self._is_same = _comparison_of(self.all)
        if self._is_same():
            return True
        if self.changed():
            return False
        for read in self.all:  # equal values, but other objects
            read.value = read.present()
        self._is_same = None
        return True

    def changed(self) -> list[Read]:
        """Return the reads whose values have changed."""
        return [read for read in self.all if not _are_same(read.value, read.present())]

    def update(self, dropped: set[str]) -> None:
        """Drop the reads with these paths, which forward changes itself; note the present values of the others."""
        if not dropped:
            return
        self.dropped = dropped
        self.all = [read for read in self.all if read.path not in dropped]
        for read in self.all:
            read.value = read.present()
        self._is_same = None


def _comparison_of(reads: list[Read]) -> Callable[[], bool]:
    """Return a function that compares values by identity, in loops of C."""
    items = [read for read in reads if read.get is None and read.key is not LENGTH and read.key is not CLASS]
    found = [(read.owner, read.key) for read in items if read.value is not MISSING]
    values = [read.value for read in items if read.value is not MISSING]
    absent = [(read.owner, read.key) for read in items if read.value is MISSING]
    sizes = {id(read.owner): read for read in reads if read.key is LENGTH}.values()
    empty = [read.owner for read in sizes if not read.value]
    filled, lengths = [r.owner for r in sizes if r.value], [r.value for r in sizes if r.value]
    objects = [read.owner for read in reads if read.key is CLASS]
    classes = [read.value for read in reads if read.key is CLASS]
    others = [(read.get, read.value) for read in reads if read.get is not None]

    def is_same() -> bool:
        try:
            for get, value in others:
                if (now := get()) is not value and not _are_same(value, now):
                    return False
            return (
                all(map(operator.is_, starmap(operator.getitem, found), values))
                and all(map(operator.is_, map(type, objects), classes))
                and not any(starmap(operator.contains, absent))
                and not any(empty)
                and all(map(operator.eq, map(contents_of, filled), lengths))
            )
        # As in `Read.present`; or tensors or arrays are compared.
        except (LookupError, AttributeError, ValueError, TypeError, RuntimeError):
            return False

    return is_same


def contents_of(container: Any) -> Any:
    """Return what of a container is compared as a whole: the keys of a dictionary, in order; the length of others; all
    items, if they are more than `MOST_ITEMS`."""
    if len(container) > MOST_ITEMS:
        return tuple(container.items() if isinstance(container, Mapping) else container)
    return tuple(container) if isinstance(container, Mapping) else len(container)


def autocast_dtype() -> torch.dtype | None:
    """Return the dtype to which torch.autocast casts on the CPU; None if it is off."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


def hooks_reader(tensors: Mapping[str, Tensor]) -> Callable[[], tuple[Any, ...]]:
    """Return a function that returns (name, hook) of each present gradient hook of these tensors."""
    kinds = operator.attrgetter("_backward_hooks"), operator.attrgetter("_post_accumulate_grad_hooks")

    def present_hooks() -> tuple[Any, ...]:
        shelves = [*map(kinds[0], tensors.values()), *map(kinds[1], tensors.values())]
        if not any(shelves):
            return ()
        found = zip((*tensors, *tensors), shelves, strict=True)
        return tuple((name, hook) for name, hooks in found if hooks for hook in hooks.values())

    return present_hooks


def layout_of(value: Any) -> Any:
    """Return dtype, shape and strides of a tensor, and whether it has values; of another value its type."""
    if not isinstance(value, Tensor):
        return type(value)
    return isinstance(value, FakeTensor), value.dtype, value.shape, value.stride()


def _are_same(one: Any, other: Any) -> bool:
    """Return whether a forward that reads either value computes the same: one object, or equal plain data."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, float | complex):
        return repr(one) == repr(other)  # NaN is equal, and 0.0 and -0.0 are not
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_are_same, one, other))
    if isinstance(one, Tensor):
        return layout_of(one) == layout_of(other) and one.equal(other)
    if isinstance(one, numpy.ndarray):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes()
    return isinstance(one, _COMPARED) and one == other


def _in_words(value: Any) -> str:
    text = f"a {type(value).__name__}" if isinstance(value, torch.nn.Module | Tensor) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def fingerprint(graph: Graph, bound: Container[str] = (), without: Container[str] = ()) -> str:
    """Return a hash of what a graph computes. Arguments as of `graph_lines`."""
    return hashlib.sha256(repr([text for _, text in graph_lines(graph, bound, without)]).encode()).hexdigest()


def graph_lines(
    graph: Graph, bound: Container[str] = (), without: Container[str] = ()
) -> list[tuple[str, str]]:
    """Return the user's line and a text of each operation and result of a graph, equal for graphs that compute the
    same. What depends on constants and layouts alone counts by its value; of the constants in `bound`, which each call
    binds anew, only the layout counts, and the buffers `without` not at all."""
    texts: dict[fx.Node, str] = {}
    values: dict[fx.Node, Any] = {}  # of nodes that depend on constants alone
    handles = {handle: f"{index}: {call}" for index, (handle, call) in enumerate(graph.held)}
    output: Any = graph.code.output_node().args[0]
    results = [
        (result, node)
        for result, node in zip(graph.results, output, strict=False)  # an anchored gradient is a result twice
        if result.kind != "buffer" or result.key not in without
    ]
    wanted = sources_of(node for _, node in results)
    lines = [("", repr((visit.name, visit.ipu))) for visit in graph.visits]
    for node in (node for node in graph.code.nodes if node in wanted):
        meta, key = node.meta, node.meta.get("key")
        if node.op == "placeholder" and meta["role"] == "constant" and key not in bound:
            values[node] = graph.constants[key]
        elif node.op == "placeholder":
            texts[node] = repr((meta["role"], key, layout_of(meta["val"])))
        elif node.target in _READS_LAYOUT:
            values[node] = run_node(node, {n: empty_like(n.meta["val"]) for n in node.all_input_nodes})
        elif all(operand in values for operand in node.all_input_nodes) and is_pure(node):
            values[node] = run_node(node, values)
        else:
            arguments: Any = map_arg((node.args, node.kwargs), lambda n: texts.get(n, ""))
            if handles:
                arguments = [handles.get(part, part) for part in tree_leaves(arguments)]
            place = [meta.get(name) for name in ("phase", "block", "draw", "scope", "attributes", "group")]
            lines.append((meta.get("where", ""), repr((node.target, arguments, place))))
            texts[node] = f"%{len(lines)}"
        if node in values:
            texts[node] = _text_of_value(values[node])
    return [*lines, *(("", repr((r.kind, r.key, r.shape, r.dtype, texts[node]))) for r, node in results)]


def _text_of_value(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr([_text_of_value(part) for part in value] if isinstance(value, list | tuple) else value)
    content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{layout_of(value)} {hashlib.sha256(content).hexdigest()}"
