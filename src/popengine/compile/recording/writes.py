"""Replace the in-place operations of a recorded graph by operations that return new values, if no view is in the way.

Dropout, `x += y` and running statistics are of this kind. Other graphs need a second run, which takes as long as the
first one: torch's functionalization (`functional.functionalize_graph`).
"""

import functools
import operator
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from ...torch_private import FakeTensor
from .graph_recorder import GraphRecorder, empty_like, is_write, run_node, storage_of, written_arguments

aten = torch.ops.aten
# By operation in place, the one that returns the new values after the other results.
_RETURNS_MORE = {aten._native_batch_norm_legit.default: aten._native_batch_norm_legit_functional.default}


@dataclass(frozen=True)
class _Change:
    """What takes the place of a write."""

    target: Any
    args: tuple[Any, ...]
    written: list[fx.Node]
    values: list[Tensor]  # the new values of `written`, fake
    first: int | None  # the position of the first of them in a list of results; None if there is one result


def replace_writes(recorder: GraphRecorder) -> bool:
    """Replace all in-place operations of a graph and set `recorder.written`; or change nothing and return False.

    They can be replaced if no tensor in memory that one of them writes is read later, unless it is the written tensor
    by another name: with the same place, shape and type.
    """
    nodes = list(recorder.graph.nodes)
    position = {node: index for index, node in enumerate(nodes)}
    memory = {node: storage_of(node) for node in nodes}
    sharing = defaultdict[int | None, list[fx.Node]](list)  # by memory, the nodes up to now
    changes = dict[fx.Node, _Change]()
    written_memory = set[int | None]()
    for node in nodes:
        if memory[node] in written_memory and node.op == "call_function" and "val" not in node.meta:
            return False  # a list of views
        if is_write(node):
            change = _change_of(node)
            if change is None:
                return False
            for operand in change.written:
                aliases = [n for n in sharing[memory[operand]] if _layout(n) != _layout(operand)]
                users = [user for alias in aliases for user in alias.users]
                if any(n.op == "placeholder" for n in aliases) or any(
                    position[n] > position[node] for n in users
                ):
                    return False
                written_memory.add(memory[operand])
            changes[node] = change
        sharing[memory[node]].append(node)

    # By memory, its value and the position of the last write.
    latest = dict[int | None, tuple[fx.Node, int]]()

    def value_now(operand: fx.Node) -> fx.Node:
        value, since = latest.get(memory[operand], (operand, 0))
        return value if position[operand] < since else operand

    for node in nodes:
        change = changes.get(node)
        args = node.args if change is None else change.args
        node.args, node.kwargs = map_arg((args, node.kwargs), value_now)  # type: ignore[misc]
        if change is not None:
            node.target = change.target
            for index, (operand, value) in enumerate(zip(change.written, change.values, strict=True)):
                new = node
                if change.first is not None:
                    with recorder.graph.inserting_after(node):
                        new = recorder.graph.call_function(operator.getitem, (node, change.first + index))
                    new.meta.update(node.meta)
                recorder.assign_tensor(new, value)
                latest[memory[operand]] = new, position[node]
                slot = sharing[memory[operand]][0]
                if slot.op == "placeholder":
                    recorder.written[slot] = new
        elif memory[node] in latest and node.op == "call_function":
            with node.meta["val"].fake_mode, torch.no_grad():
                recorder.assign_tensor(node, run_node(node, {n: n.meta["val"] for n in node.all_input_nodes}))
    return True


def _layout(node: fx.Node) -> Any:
    """Return a value that is equal for two nodes in one memory if their tensors have the same dtype, place and
    strides."""
    value = node.meta.get("val")
    if value is None:
        return node
    return value.dtype, value.shape, value.stride(), value.storage_offset(), value.is_conj(), value.is_neg()


def _change_of(node: fx.Node) -> _Change | None:
    """Return the change that replaces an in-place operation, if it returns tensors of the same strides and dtypes; else
    None."""
    in_place: Any = node.target
    target = _functional_form(in_place)
    written = written_arguments(in_place, node.args, node.kwargs)
    fakes = [operand.meta["val"] for operand in written if isinstance(operand, fx.Node)]
    if target is None or len(fakes) < len(written) or not all(isinstance(fake, FakeTensor) for fake in fakes):
        return None
    arguments = in_place._schema.arguments  # a call leaves out what has the default value
    args = (*node.args, *(a.default_value for a in arguments[len(node.args) :] if not a.kwarg_only))

    def fake_value(operand: fx.Node) -> Tensor:
        value = operand.meta["val"]
        return value if isinstance(value, FakeTensor) else empty_like(value)

    with fakes[0].fake_mode, torch.no_grad():
        fake_args, fake_kwargs = map_arg((args, node.kwargs), fake_value)  # type: ignore[misc]
        returned = target(*fake_args, **fake_kwargs)
    is_list = isinstance(returned, tuple | list)
    values = list(returned[-len(written) :]) if is_list else [returned]
    if any(_format(value) != _format(fake) for value, fake in zip(values, fakes, strict=True)):
        return None
    return _Change(target, args, written, values, len(returned) - len(written) if is_list else None)


def _format(value: Tensor) -> Any:
    return value.dtype, value.shape, value.stride()


@functools.cache
def _functional_form(target: Any) -> Any:
    """Return the operation with the same arguments that returns the values which an in-place operation writes; or
    None."""
    schema = target._schema
    if target in _RETURNS_MORE or target.namespace != "aten" or not schema.name.endswith("_"):
        return _RETURNS_MORE.get(target)
    packet = getattr(aten, target.overloadpacket.__name__[:-1], None)
    overloads = [getattr(packet, name) for name in packet.overloads()] if packet else []
    wanted = _typed_names(schema.arguments), ["Tensor"]
    for overload in overloads:
        schema = overload._schema
        if not schema.is_mutable and (_typed_names(schema.arguments), _typed_names(schema.returns)) == wanted:
            return overload
    return None


def _typed_names(arguments: Any) -> list[str]:
    return [f"{argument.type} {argument.name}".rstrip() for argument in arguments]
