"""Emits a piece: nodes of the graph become the source of one Python function.

Source, and not a closure, because it prints, pickles, hashes and names the line that failed. Each value is
set to None after its last use, so that its memory goes as early as it can.

    def piece(values):
        x, weight = values
        values.clear()
        t = f0(weight)
        relu = f1(x, t); x = t = None
        return (relu,)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..errors import CaptureError
from ..ir import Phase, Piece


def emit(
    phase: Phase, stage: int, reads: Sequence[str], writes: Sequence[str], nodes: Sequence[fx.Node]
) -> Piece:
    """The piece that computes `nodes`, in their order, from `reads`, and returns `writes`."""
    calls: dict[Any, str] = {}
    body: list[tuple[str, str]] = []  # source line, user's line
    last_use = {name: i for i, node in enumerate(nodes) for name in [node.name, *_names(node)]}
    dying: dict[int, list[str]] = {}
    for name, i in last_use.items():
        if name not in writes:
            dying.setdefault(i, []).append(name)
    draws = False
    for i, node in enumerate(nodes):
        if node.target is operator.getitem:
            value = f"{_text(node.args[0])}[{node.args[1]}]"
        else:
            call = calls.setdefault(node.target, f"f{len(calls)}")
            if "draw" in node.meta:
                draws, call = True, f"draw({call}, key, {node.meta['draw']}, "
            else:
                call += "("
            arguments = [_text(argument) for argument in node.args]
            arguments += [f"{name}={_text(argument)}" for name, argument in node.kwargs.items()]
            value = call + ", ".join(arguments) + ")"
        end = "; " + " = ".join([*dying[i], "None"]) if i in dying else ""
        body.append((f"    {node.name} = {value}{end}", node.meta.get("where", "?")))
    taken = [*reads, "key"] if draws else list(reads)
    unread = [name for name in reads if name not in last_use and name not in writes]
    head = ["def piece(values):"]
    head += [f"    {', '.join(taken)}, = values"] if taken else []
    head += ["    values.clear()"]
    head += ["    " + " = ".join([*unread, "None"])] if unread else []
    tail = [f"    return ({''.join(name + ', ' for name in writes)})"]
    lines = ["?"] * len(head) + [where for _, where in body] + ["?"]
    source = "\n".join(head + [line for line, _ in body] + tail) + "\n"
    return Piece(
        phase, stage, tuple(reads), tuple(writes), source, tuple(map(_name_of, calls)), tuple(lines), draws
    )


def _names(node: fx.Node) -> list[str]:
    return [operand.name for operand in node.all_input_nodes]


def _name_of(target: Callable[..., Any]) -> str:
    """`aten.add.Tensor` for torch.ops.aten.add.Tensor."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    raise CaptureError(f"{target} can't be a part of a compiled graph")


def _text(value: Any) -> str:
    """Python source for an argument of an operation."""
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):  # fx's own list types print as what they are
        inside = "".join(_text(item) + ", " for item in value)
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if value is None or isinstance(
        value, (bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format)
    ):
        return repr(value)  # inf and nan are names that the piece knows
    raise CaptureError(f"a {type(value).__name__} can't be an argument of an operation in a compiled graph")
