"""Emit a piece: nodes of the graph become its lines, each with the values that it uses last."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..errors import CaptureError
from ..ir import Line, Phase, Piece, Value
from ..piece import GETITEM

_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def emit(
    phase: Phase, stage: int, reads: Sequence[str], writes: Sequence[str], nodes: Sequence[fx.Node]
) -> Piece:
    """Return the piece that computes `nodes`, in their order, from `reads`, and returns `writes`."""
    last_use = {
        name: i
        for i, node in enumerate(nodes)
        for name in [node.name, *(operand.name for operand in node.all_input_nodes)]
    }
    dying: dict[int, list[str]] = {}
    for name, i in last_use.items():
        if name not in writes:
            dying.setdefault(i, []).append(name)
    lines = (_line(node, tuple(dying.get(i, ()))) for i, node in enumerate(nodes))
    return Piece(phase, stage, tuple(reads), tuple(writes), tuple(lines))


def _line(node: fx.Node, dies: tuple[str, ...]) -> Line:
    target: Any = node.target
    return Line(
        node.name,
        GETITEM if target is operator.getitem else _name_of(target),
        tuple(map(_argument, node.args)),
        tuple((name, _argument(value)) for name, value in node.kwargs.items()),
        dies,
        node.meta.get("where", "?"),
        node.meta.get("draw"),
    )


def _name_of(target: Callable[..., Any]) -> str:
    """Return the name of an operation, such as "aten.add.Tensor" for torch.ops.aten.add.Tensor."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    raise CaptureError(f"{target} can't be a part of a compiled graph")


def _argument(value: Any) -> Any:
    """Return an argument of an operation, with `Value`s in place of nodes."""
    if isinstance(value, fx.Node):
        return Value(value.name)
    if isinstance(value, list):
        return [_argument(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_argument(item) for item in value)
    if value is None or isinstance(value, _PLAIN):
        return value
    raise CaptureError(f"a {type(value).__name__} can't be an argument of an operation in a compiled graph")
