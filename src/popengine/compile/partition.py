"""Partition: cut a graph into pieces, one for each phase of each stage of a strategy.

Data flows through F0 F1 ... F(n-1), then B(n-1) ... B1 B0. A forward node is in the stage of its block, a backward node
in the stage of its forward. Nodes without a block are autograd's sums of gradients: they are in the earliest stage of
their operands: its backward runs last. Views of weights are in no stage: each piece makes the views that it needs.
Casts of weights are in no stage either: they are made once a step.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..errors import CaptureError, PartitionError
from ..ir import Graph, Line, Partition, Phase, Piece, Value
from ..piece import GETITEM
from ..settings import Strategy
from .placement import Placement, place, together
from .recording.graph_recorder import memory_of

logger = logging.getLogger("popengine")
Where = tuple[Phase, int]
_CAST = torch.ops.aten._to_copy.default
_NO_STAGE = -1
CHECKPOINT = "poptorch.recomputation_checkpoint.default"  # the operation whose result is always kept


def used_visits(graph: Graph) -> set[int]:
    """Return the visits of blocks that have operations."""
    used = {node.meta["block"] for node in _calls(graph) if node.meta["phase"] == "F"}
    return used or {0}


def partition(graph: Graph, strategy: Strategy, recompute: bool = False) -> Partition:
    """Cut a graph into pieces.

    Args:
        recompute: backward pieces recompute the activations of their stage, from the stage's inputs and from
            checkpoints, so that these are not kept
    Raises:
        BlockError: see `place`
        PartitionError: data would have to flow back to an earlier stage of the pipeline
    """
    written = {result.key for result in graph.results if result.kind == "buffer"}
    views, casts = _of_state(graph, written)
    placement, where = _placed(graph, strategy, views | casts)
    stages = range(len(placement.ipus))
    order: list[Where] = [*(("F", stage) for stage in stages), *(("B", stage) for stage in reversed(stages))]
    members = _members(graph, where, order, views, casts, recompute)
    needs = {of: _outside(nodes) for of, nodes in members.items()}
    prepared = {
        node.name: _prepared(node, graph, views | casts)
        for node in casts
        if any(node.name in names for names in needs.values())
    }
    home = _homes(graph, where, {of: _sources(needs[of], prepared) for of in order}, order)
    made = {node.name: maker for node, maker in where.items() if node not in views | casts}
    kept = {slot.name for slot in graph.slots if slot.role == "buffer" and slot.key in written}
    for name, maker in _handed_through(graph, kept, home, made).items():
        made[name] = maker
        needs[maker][name] = None
    fixed = {slot.name for slot in graph.slots if slot.role != "input"} - kept  # every ipu has its own
    wanted = {result.name for result in graph.results}
    for user in order:
        for name in needs[user]:
            if name not in fixed | prepared.keys() and made.get(name, user) != user:
                wanted.add(name)
                if order.index(made[name]) > order.index(user):
                    raise _flows_back(name, made[name], user, placement, graph)
    pieces = []
    for of in order:
        writes = [name for name, maker in made.items() if maker == of and name in wanted]
        if members[of] or writes:
            pieces.append(emit(*of, list(needs[of]), writes, members[of]))
    return Partition(graph.signature, tuple(pieces), placement.ipus, home, placement.names, prepared)


def _placed(
    graph: Graph, strategy: Strategy, of_state: set[fx.Node]
) -> tuple[Placement, dict[fx.Node, Where]]:
    """Return the placement and the piece of each node. Without a pipeline, stages that write one buffer are merged."""
    placement = place(graph.visits, used_visits(graph), strategy)
    where = _stages(graph, placement, of_state)
    while strategy.mode != "pipelined" and (span := _shared_buffer(graph, where)) is not None:
        placement = together(placement, *span)
        logger.warning(
            "stages %d to %d write the same buffer, and run as one, on ipu %d", *span, placement.ipus[span[0]]
        )
        where = _stages(graph, placement, of_state)
    return placement, where


def _members(
    graph: Graph,
    where: dict[fx.Node, Where],
    order: list[Where],
    views: set[fx.Node],
    casts: set[fx.Node],
    recompute: bool,
) -> dict[Where, list[fx.Node]]:
    """Return the nodes of each piece: its own, the views that it needs, and those that it recomputes."""
    own: dict[Where, list[fx.Node]] = {of: [] for of in order}
    for node in _calls(graph):
        if node not in views | casts:
            own[where[node]].append(node)
    members = {}
    for phase, stage in order:
        again = views
        if recompute and phase == "B":
            again = views | {node for node in own["F", stage] if str(node.target) != CHECKPOINT}
        members[phase, stage] = _with_needed(own[phase, stage], again, graph)
    return members


def _outside(nodes: list[fx.Node]) -> dict[str, None]:
    """Return the names of other nodes that these nodes read, in order."""
    inside = set(nodes)
    return {operand.name: None for node in nodes for operand in node.all_input_nodes if operand not in inside}


def _handed_through(
    graph: Graph, kept: set[str], home: dict[str, int], made: dict[str, Where]
) -> dict[str, Where]:
    """Return the piece that hands on each value that no node computes: inputs or weights as results, old buffers."""
    # A buffer's value as of a micro-batch comes from the forward that replaces it.
    found: dict[str, Where] = {slot.name: ("F", home[slot.name]) for slot in graph.slots if slot.name in kept}
    state = {slot.name for slot in graph.slots}
    for result in graph.results:
        if result.name in state and result.name not in made and result.name not in found:
            found[result.name] = ("F", home.get(result.name, 0))
    return found


def _calls(graph: Graph) -> Iterable[fx.Node]:
    return (node for node in graph.code.nodes if node.op == "call_function")


def _of_state(graph: Graph, written: set[str]) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return the nodes that are views of weights, constants or unwritten buffers; and those that cast these."""
    names = {
        slot.name
        for slot in graph.slots
        if slot.role in ("parameter", "constant") or (slot.role == "buffer" and slot.key not in written)
    }
    held = {node for node in graph.code.nodes if node.name in names}
    results = {result.name for result in graph.results}
    memory = {memory_of(node) for node in held}
    views: set[fx.Node] = set()
    casts: set[fx.Node] = set()
    for node in _calls(graph):
        operands = node.all_input_nodes
        if operands and node.name not in results and all(n in held for n in operands):
            if memory_of(node) in memory:
                views.add(node)
            elif node.target is _CAST:
                casts.add(node)
                memory.add(memory_of(node))
            else:
                continue
            held.add(node)
    return views, casts


def _prepared(node: fx.Node, graph: Graph, again: set[fx.Node]) -> Piece:
    """Return the piece that casts weights."""
    nodes = _with_needed([node], again, graph)
    reads = dict.fromkeys(n.name for made in nodes for n in made.all_input_nodes if n not in nodes)
    return emit("F", _NO_STAGE, list(reads), [node.name], nodes)


def _sources(names: Iterable[str], prepared: Mapping[str, Piece]) -> dict[str, None]:
    """Return the names, and those from which prepared values are made."""
    return dict.fromkeys(
        source for name in names for source in (name, *(prepared[name].reads if name in prepared else ()))
    )


def _with_needed(nodes: list[fx.Node], again: set[fx.Node], graph: Graph) -> list[fx.Node]:
    """Return nodes, and the nodes of `again` that they need, in the graph's order."""
    needed, stack = set(nodes), list(nodes)
    while stack:
        for operand in stack.pop().all_input_nodes:
            if operand in again and operand not in needed:
                needed.add(operand)
                stack.append(operand)
    if len(needed) == len(nodes):
        return nodes
    return [node for node in _calls(graph) if node in needed]


def _stages(graph: Graph, placement: Placement, views: set[fx.Node]) -> dict[fx.Node, Where]:
    where: dict[fx.Node, Where] = {}
    last = len(placement.ipus) - 1
    for node in _calls(graph):
        if node.meta["phase"] == "F":
            where[node] = ("F", placement.stage_of[node.meta["block"]])
            continue
        block = node.meta["block"]
        stage = placement.stage_of[block] if block is not None and block >= 0 else last
        for operand in node.all_input_nodes:  # gradients flow from late stages to early ones
            if operand in where and operand not in views and where[operand][0] == "B":
                stage = min(stage, where[operand][1])
        where[node] = ("B", stage)
    for node in reversed(list(_calls(graph))):
        if node.meta["phase"] == "B" and node.meta["block"] is None:
            makers = [operand for operand in node.all_input_nodes if where.get(operand, "F")[0] == "B"]
            users = [where[user][1] for user in node.users if user in where]
            if not makers and users:
                where[node] = ("B", max(users))
    return where


def _shared_buffer(graph: Graph, where: dict[fx.Node, Where]) -> tuple[int, int] | None:
    """Return the first and last stage of a buffer that a later stage writes and an earlier stage reads; or None."""
    node_of = {node.name: node for node in graph.code.nodes}
    slots = {slot.key: slot.name for slot in graph.slots if slot.role == "buffer"}
    for result in graph.results:
        if result.kind == "buffer" and node_of[result.name] in where:
            last = where[node_of[result.name]][1]
            readers = [where[user] for user in node_of[slots[result.key]].users if user in where]
            first = min((stage for phase, stage in readers if phase == "F"), default=last)
            if first < last:
                return first, last
    return None


def _homes(
    graph: Graph, where: dict[fx.Node, Where], needs: dict[Where, dict[str, None]], order: list[Where]
) -> dict[str, int]:
    """Return the stage of each parameter and buffer: where its gradient is made, where the buffer is written, else
    where it is first read."""
    node_of = {node.name: node for node in graph.code.nodes}
    made_at = {
        (result.kind, result.key): where[node_of[result.name]][1]
        for result in graph.results
        if node_of[result.name] in where and result.kind != "output"
    }
    home = {}
    for slot in graph.slots:
        if slot.role not in ("parameter", "buffer"):
            continue
        kind = "gradient" if slot.role == "parameter" else "buffer"
        first = next((stage for phase, stage in order if slot.name in needs[phase, stage]), 0)
        home[slot.name] = made_at.get((kind, slot.key), first)
    return home


def _flows_back(name: str, maker: Where, user: Where, placement: Placement, graph: Graph) -> PartitionError:
    node = next(node for node in graph.code.nodes if node.name == name)
    return PartitionError(
        f"a value flows back from stage {maker[1]} (blocks {placement.names[maker[1]]}) to stage {user[1]} (blocks"
        f" {placement.names[user[1]]}): in a pipeline stage numbers must not decrease along the data\n"
        f"  {node.meta.get('where', '?')} computes it in stage {maker[1]}\n"
        "  fix: give the later part a block and a stage of its own; that stage may be on the same ipu:"
        f' poptorch.Stage("...").ipu({placement.ipus[user[1]]}); or use poptorch.AutoStage.AutoIncrement'
    )


_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def emit(
    phase: Phase, stage: int, reads: Sequence[str], writes: Sequence[str], nodes: Sequence[fx.Node]
) -> Piece:
    """Return the piece that computes `nodes`, in their order, from `reads`, and returns `writes`.

    Values of the forward that a backward computes again have names of their own: parts of a backward hand them on
    beside the forward's.
    """
    again = {node for node in nodes if phase == "B" and node.meta["phase"] == "F"}

    def argument(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return Value(name_of(value))
        if value is None or isinstance(value, _PLAIN):
            return value
        raise CaptureError(
            f"a {type(value).__name__} can't be an argument of an operation in a compiled graph"
        )

    def name_of(node: fx.Node) -> str:
        return f"{node.name}_again" if node in again else node.name

    lines = []
    for node in nodes:
        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), argument)  # type: ignore[misc]
        where, draw = node.meta.get("where", "?"), node.meta.get("draw")
        lines.append(Line(name_of(node), _call(node.target), args, tuple(kwargs.items()), where, draw))
    return Piece(phase, stage, tuple(reads), tuple(writes), tuple(lines))


def _call(target: Any) -> str:
    """Return the name of an operation, such as "aten.add.Tensor" for torch.ops.aten.add.Tensor."""
    if target is operator.getitem:
        return GETITEM
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    raise CaptureError(f"{target} can't be a part of a compiled graph")
