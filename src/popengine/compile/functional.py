"""From what was recorded to a functional graph: nothing in place, nothing idle, draws numbered."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from .recorder import Recorder

aten = torch.ops.aten
_KEPT = (
    "phase",
    "block",
    "where",
    "scope",
    "attributes",
    "group",
    "numbers",
)  # of a node's meta, when it's replayed
_NOTHING_DONE = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)


def is_mutable(graph: fx.Graph) -> bool:
    """Whether an operation in it writes into one of its operands."""
    return any(
        isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        for node in graph.nodes
    )


def functionalized(graph: fx.Graph, constants: dict[str, Tensor], fake: FakeTensorMode) -> Recorder:
    """The same graph without operations in place: replayed through torch's functionalization."""
    meta: dict[str, Any] = {}
    recorder = Recorder(lambda func: {**meta, "replay": True})
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in graph.nodes if node.op == "output")

    def replay(*values: Tensor) -> Any:
        env: dict[fx.Node, Any] = dict(zip(placeholders, values, strict=True))
        for node in graph.nodes:
            if node.op == "call_function":
                meta.clear()
                meta.update({key: node.meta[key] for key in _KEPT if key in node.meta})
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)  # type: ignore[misc]
                env[node] = node.target(*args, **kwargs)
        return tuple(env[node] for node in output.args[0])

    values = []
    with fake:
        for node in placeholders:
            like = node.meta["val"]
            values.append(
                torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=like.device)
            )
    for node, value in zip(placeholders, values, strict=True):
        recorder.placeholder(node.name, value, role=node.meta["role"], key=node.meta["key"])
    recorder.constants.update(constants)
    with fake, recorder, torch.no_grad():
        outputs = torch.func.functionalize(replay, remove="mutations")(*values)
    recorder.graph.output(tuple(recorder.node(value) for value in outputs))
    return recorder


def drop_what_does_nothing(graph: fx.Graph) -> None:
    """Removes aliases and what no result needs, and numbers the draws of random numbers."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _NOTHING_DONE:
            node.replace_all_uses_with(node.args[0])
        elif node.target is aten.t.default and node.args[0].target is aten.t.default:
            node.replace_all_uses_with(node.args[0].args[0])  # backward transposes what forward transposed
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    for node in list(graph.nodes):
        if node.op == "placeholder" and not node.users and node.meta["role"] in ("constant", "loss_scale"):
            graph.erase_node(node)
    draws: dict[Any, int] = {}
    for node in graph.nodes:
        if node.op == "call_function" and _draws(node):
            # Recomputing a part of the forward draws the numbers that it drew first: see `Capture.describe`.
            node.meta["draw"] = draws.setdefault(node.meta.get("numbers", node), len(draws))
    graph.lint()


def _draws(node: fx.Node) -> bool:
    """Whether an operation takes random numbers. Those with dropout inside don't where its chance is 0."""
    target: Any = node.target
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    for position, argument in enumerate(target._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name, 0)
            return bool(given)
    return True
