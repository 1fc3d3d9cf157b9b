"""Partition: cut a graph into pieces, one for each phase of each stage of a strategy, and pieces into parts.

Data flows through F0 F1 ... F(n-1), then B(n-1) ... B1 B0. A forward node is in the stage of its block, a backward node
in the stage of its forward. Autograd's sums of gradients have no block: each is in the earliest stage of its operands,
since the backward of that stage runs last. Views of weights are in no stage: each piece makes the views that it needs.
Casts of weights are in no stage either: they are made once per step. A part is a piece itself.
"""

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import fx

from ..errors import CaptureError, PartitionError
from ..ir import Graph, Line, Partition, Phase, Piece, Value
from ..piece import GATHER, GETITEM
from ..settings import Settings, Strategy
from .placement import Placement, place_blocks
from .recording.graph_recorder import sources_of, storage_of

PhaseAndStage = tuple[Phase, int]
_CAST = torch.ops.aten._to_copy.default
NO_STAGE = -1
BUCKET = 4 << 20  # bytes of gradients that processes exchange together, roughly
MANY = 64 << 20  # bytes of a model's gradients: from here on they are added to their sums bucket by bucket
_CUT_DISTANCE = 4  # lines: one cut serves buffers that are read within this distance
AGAIN = "_again"  # the end of the name of a value that a backward piece recomputes
CHECKPOINT = "poptorch.recomputation_checkpoint.default"  # recomputation keeps the result of this operation


def visits_with_operations(graph: Graph) -> set[int]:
    """Return the indices of the visits with forward operations; {0} for a graph without forward operations."""
    used = {node.meta["block"] for node in _operation_nodes(graph) if node.meta["phase"] == "F"}
    return used or {0}


def partition(graph: Graph, strategy: Strategy, recompute: bool = False) -> Partition:
    """Return a graph's pieces, one for each phase of each stage that has operations or results. With `recompute`
    backward pieces compute activations again, from their stage's inputs and from checkpoints."""
    views, casts = _views_and_casts(graph)
    of_state = views | casts
    placement = place_blocks(graph.visits, visits_with_operations(graph), strategy)
    stages = range(len(placement.ipus))
    # Pieces are given by phase and stage. `made`: the piece that computes each value, by name.
    order: list[PhaseAndStage] = [*(("F", s) for s in stages), *(("B", s) for s in reversed(stages))]
    placed: dict[PhaseAndStage, list[fx.Node]] = {of: [] for of in order}
    made: dict[str, PhaseAndStage] = {}
    for node, of in _node_stages(graph, placement, of_state).items():
        placed[of].append(node)
        made[node.name] = of
    members = {}  # of each piece: its own nodes, the views that it needs, the forward nodes that it recomputes
    for phase, stage in order:
        again = set(views)
        if recompute and phase == "B":
            again.update(node for node in placed["F", stage] if str(node.target) != CHECKPOINT)
        members[phase, stage] = sorted(sources_of(placed[phase, stage], among=again))  # in graph order
    needs = {of: _outer_operands(nodes) for of, nodes in members.items()}
    prepared, needed = {}, set().union(*needs.values())
    for node in _operation_nodes(graph):
        if node in casts and node.name in needed:
            nodes = sorted(sources_of([node], among=of_state))
            prepared[node.name] = make_piece("F", NO_STAGE, list(_outer_operands(nodes)), [node.name], nodes)
    read = {of: set(names) for of, names in needs.items()}  # with the weights of casts
    for names in read.values():
        names.update(*(prepared[name].reads for name in names & prepared.keys()))
    home, handed_on = _slot_stages(graph, made, read)
    for name, stage in handed_on.items():
        made[name] = ("F", stage)
        needs["F", stage][name] = None
    wanted, everywhere = {result.name for result in graph.results}, graph.constant_slots | prepared.keys()
    for user in order:
        for name in needs[user]:
            if name not in everywhere and made.get(name, user) != user:
                wanted.add(name)
                if order.index(made[name]) > order.index(user):
                    raise _flow_back_error(name, made[name], user, placement, graph)
    pieces = []
    for of in order:
        writes = [name for name, maker in made.items() if maker == of and name in wanted]
        if members[of] or writes:
            pieces.append(make_piece(*of, list(needs[of]), writes, members[of]))
    return Partition(graph.signature, tuple(pieces), placement.ipus, home, placement.names, prepared)


def _outer_operands(nodes: list[fx.Node]) -> dict[str, None]:
    """Return the names of operands of `nodes` that are computed elsewhere, in order (the keys of a dict)."""
    inside = set(nodes)
    return {operand.name: None for node in nodes for operand in node.all_input_nodes if operand not in inside}


def _operation_nodes(graph: Graph) -> Iterable[fx.Node]:
    return (node for node in graph.code.nodes if node.op == "call_function")


def _views_and_casts(graph: Graph) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return the views and the casts that are computed from weights, constants and unchanged buffers alone."""
    fixed = graph.constant_slots
    held = {n for n in graph.code.nodes if n.name in fixed and n.meta["role"] != "loss_scale"}
    results = {result.name for result in graph.results}
    memory = {storage_of(node) for node in held}
    views: set[fx.Node] = set()
    casts: set[fx.Node] = set()
    for node in _operation_nodes(graph):
        operands = node.all_input_nodes
        if not operands or node.name in results or not held.issuperset(operands):
            continue
        if storage_of(node) in memory:
            views.add(node)
            held.add(node)
        elif node.target is _CAST:
            casts.add(node)
            held.add(node)
            memory.add(storage_of(node))
    return views, casts


def _node_stages(graph: Graph, placement: Placement, of_state: set[fx.Node]) -> dict[fx.Node, PhaseAndStage]:
    """Return the phase and stage of each operation in graph order, without the views and casts `of_state`. An operation
    that depends on inputs only is in the first stage that reads its result, if this is earlier than the stage of its
    block."""
    where: dict[fx.Node, PhaseAndStage] = {}
    calls = [node for node in _operation_nodes(graph) if node not in of_state]
    last = len(placement.ipus) - 1
    for node in calls:
        block = node.meta["block"]
        if node.meta["phase"] == "F":
            where[node] = ("F", placement.stage_of[block])
            continue
        stage = placement.stage_of[block] if block is not None and block >= 0 else last
        # Gradients flow from late stages to early ones.
        operands = [where[operand] for operand in node.all_input_nodes if operand in where]
        where[node] = ("B", min([stage, *(stage for phase, stage in operands if phase == "B")]))
    free = {
        n
        for n in graph.code.find_nodes(op="placeholder")
        if n.meta["role"] in ("input", "constant", "buffer")
    }
    free -= {node for node in free if node.name in graph.changed_buffers}
    for node in _operation_nodes(graph):
        if free.issuperset(node.all_input_nodes):
            free.add(node)
    for node in reversed(calls):
        if node in free and node.meta["phase"] == "F":
            users = [where[user][1] for user in node.users if user in where and where[user][0] == "F"]
            where[node] = ("F", min([where[node][1], *users]))
    for node in reversed(calls):
        if node.meta["phase"] == "B" and node.meta["block"] is None:
            is_made_of_gradients = any(where.get(n, ("F", 0))[0] == "B" for n in node.all_input_nodes)
            users = [where[user][1] for user in node.users if user in where]
            if users and not is_made_of_gradients:
                where[node] = ("B", max(users))
    return where


def _slot_stages(
    graph: Graph, made: dict[str, PhaseAndStage], read: dict[PhaseAndStage, set[str]]
) -> tuple[dict[str, int], dict[str, int]]:
    """Return, by slot name, the stage that holds each parameter and buffer that is read or changed (which computes its
    gradient or next value, or else reads it first), and the forward stage that hands on each slot which no operation
    computes: a changed buffer's previous value, or a slot that is a result of the graph."""
    made_at = {(r.kind, r.key): made[r.name][1] for r in graph.results if r.name in made}
    changed, results = graph.changed_buffers, {result.name for result in graph.results}
    home, handed_on = dict[str, int](), dict[str, int]()
    for slot in graph.slots:
        name, readers = slot.name, [of for of, names in read.items() if slot.name in names]
        if slot.role in ("parameter", "buffer"):
            kind = "gradient" if slot.role == "parameter" else "buffer"
            first = readers[0][1] if readers else 0 if name in results else None
            stage = made_at.get((kind, slot.key), first)
            if stage is not None:
                home[name] = stage
        if name in changed:
            handed_on[name] = min([home[name], *(stage for phase, stage in readers if phase == "F")])
        elif name in results:
            handed_on[name] = home.get(name, 0)
    return home, handed_on


def _flow_back_error(
    name: str, maker: PhaseAndStage, user: PhaseAndStage, placement: Placement, graph: Graph
) -> PartitionError:
    node = next(node for node in graph.code.nodes if node.name == name)
    blocks = [
        n.meta["block"]
        for n in graph.code.nodes
        if n.meta.get("phase") == "F" and n.meta["block"] is not None
    ]
    stages = [stage for stage, _ in groupby(placement.stage_of[block] for block in blocks)]
    if len(stages) == len(set(stages)):  # the data passes each stage once
        fix = f"list the stages in the order of the data: {'; '.join(placement.names[stage] for stage in stages)}"
    else:
        fix = "give the later part a block and a stage of its own; that stage may be on the same ipu:"
        fix += f' poptorch.Stage("...").ipu({placement.ipus[user[1]]}); or call each block once, with'
        fix += " poptorch.AutoStage.AutoIncrement"
    return PartitionError(
        f"a value flows back from stage {maker[1]} (blocks {placement.names[maker[1]]}) to stage {user[1]} (blocks"
        f" {placement.names[user[1]]}): in a pipeline stage numbers must not decrease along the data\n"
        f"  {node.meta.get('where', '?')} computes it in stage {maker[1]}\n"
        f"  fix: {fix}"
    )


_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def make_piece(
    phase: Phase, stage: int, reads: Sequence[str], writes: Sequence[str], nodes: Sequence[fx.Node]
) -> Piece:
    """Return the piece that reads `reads`, runs `nodes` in order, and returns `writes`. Forward values that a backward
    piece recomputes get the suffix `AGAIN`: a part of it may pass them on beside the forward's own values."""
    again = {node for node in nodes if phase == "B" and node.meta["phase"] == "F"}

    def as_argument(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return Value(name_of(value))
        if value is None or isinstance(value, _PLAIN):
            return value
        raise CaptureError(
            f"a {type(value).__name__} can't be an argument of an operation in a compiled graph"
        )

    def name_of(node: fx.Node) -> str:
        return node.name + AGAIN if node in again else node.name

    lines = []
    for node in nodes:
        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), as_argument)  # type: ignore[misc]
        call = GETITEM if node.target is operator.getitem else str(node.target)  # as torch prints an overload
        where, draw = node.meta.get("where", "?"), node.meta.get("draw")
        lines.append(Line(name_of(node), call, args, tuple(kwargs.items()), where, draw))
    return Piece(phase, stage, tuple(reads), tuple(writes), tuple(lines))


# ---- parts of pieces ---------------------------------------------------------------------------------------


def cut_pieces(partition: Partition, settings: Settings) -> Partition:
    """Return the partition with its pieces cut into parts: around gathers, and on the eager backend also before
    reads of changed buffers (in training with accumulation) and after buckets (with several processes, with replicas on
    several devices, or with accumulation of at least `MANY` bytes of gradients)."""
    counts, optimizer = settings.counts, settings.optimizer
    changed = partition.signature.changed_buffers
    several = settings.training and counts.accumulation > 1
    chained = changed if several and settings.is_eager and not settings.finite_checks else frozenset()
    sizes: dict[str, int] = {}  # bytes of each gradient's sum, by name
    if settings.training and settings.is_eager and optimizer is not None:
        sizes = {
            result.name: math.prod(result.shape) * optimizer.sum_dtype(result.dtype).itemsize
            for result in partition.signature.results
            if result.kind == "gradient"
        }
    exchanges = counts.instances > 1 or settings.shifts(max(partition.ipus) + 1)
    if not exchanges and not (several and sum(sizes.values()) >= MANY):
        sizes = {}
    pieces: list[Piece] = []
    for piece in partition.pieces:
        indices = _cut_indices(piece, chained if piece.phase == "F" else frozenset(), sizes)
        indices -= {0, len(piece.lines)}
        pieces += _cut_piece(piece, sorted(indices), changed) if indices else [piece]
    return replace(partition, pieces=tuple(pieces))


def _cut_indices(piece: Piece, chained: frozenset[str], sizes: Mapping[str, int]) -> set[int]:
    """Return the indices of the lines before which a piece is cut: around gathers, before the first read of each buffer
    in `chained` (one cut for close reads), and where gradients, with these `sizes`, fill a `BUCKET`."""
    indices: set[int] = set()
    seen: set[str] = set()
    latest, size = -_CUT_DISTANCE, 0
    for index, line in enumerate(piece.lines):
        if line.call == GATHER:
            indices |= {index, index + 1}
        new = chained.intersection(line.operands()) - seen
        seen |= new
        if new and index - latest >= _CUT_DISTANCE:
            latest = index
            indices.add(index)
        size += sizes.get(line.name, 0) if line.name in piece.writes else 0
        if size >= BUCKET:
            indices.add(index + 1)
            size = 0
    return indices


def _cut_piece(piece: Piece, indices: Sequence[int], changed: frozenset[str]) -> Iterator[Piece]:
    """Yield the parts of a piece, cut before the lines at `indices`. A value that the piece both reads and writes, and
    a changed buffer that several parts of a forward read, is written by the first part that reads it."""
    bounds = [0, *indices, len(piece.lines)]
    parts = [piece.lines[start:stop] for start, stop in pairwise(bounds)]
    used = [{name for line in lines for name in line.operands()} for lines in parts]
    # A forward reads a changed buffer once, since the next micro-batch may have replaced it meanwhile.
    several = {n for n in changed if piece.phase == "F" and sum(n in names for names in used) > 1}
    handed = [name for name in piece.reads if name in piece.writes or name in several]
    first = {name: next((number for number, names in enumerate(used) if name in names), 0) for name in handed}
    # Buffers that are only written: a stage that reads a slot holds it.
    unused = set(piece.reads).difference(*used)
    for number, lines in enumerate(parts):
        made = {line.name for line in lines}
        later = set().union(*used[number + 1 :])
        through = [name for name in handed if first[name] == number]
        held = unused if number == 0 else ()
        reads = dict.fromkeys(n for n in piece.reads if n in used[number] or n in through or n in held)
        reads |= dict.fromkeys(name for line in lines for name in line.operands() if name not in made)
        writes = [line.name for line in lines if line.name in later or line.name in piece.writes] + through
        yield Piece(piece.phase, piece.stage, tuple(reads), tuple(writes), lines, number)


def cut_backwards(partition: Partition) -> Partition:
    """Return the partition with each backward cut in two: B computes what earlier stages need, and results other than
    gradients; W the rest. All W stand after all B: beside its B, a value that both read would be freed by the B of the
    stage before, which would have to wait for it."""
    forwards = [piece for piece in partition.pieces if piece.phase == "F"]
    backwards = partition.pieces[len(forwards) :]
    gradients = {name for piece in backwards for name in piece.writes}
    wanted = {result.name for result in partition.signature.results if result.kind != "gradient"}
    firsts, rests = list[Piece](), list[Piece]()
    for piece in reversed(backwards):  # of stage 0 first
        needed, activations = wanted.intersection(piece.writes), set(piece.reads) - gradients
        used = set(needed)  # a gradient of a shared weight is only added to another: nothing waits for it
        for line in reversed(piece.lines):
            operands = line.operands()
            needed.update(operands if line.name in needed else ())
            used.update(operands if line.name in used or not activations.isdisjoint(operands) else ())
        wanted |= used
        first = tuple(line for line in piece.lines if line.name in needed)
        rest = tuple(line for line in piece.lines if line.name not in needed)
        parts = [piece]
        if first and rest:
            parts = list(_cut_piece(replace(piece, lines=first + rest), [len(first)], frozenset()))
        if first or not rest:
            firsts.append(parts[0])
        if rest:
            rests.append(replace(parts[-1], phase="W", part=0))
    return replace(partition, pieces=(*forwards, *reversed(firsts), *reversed(rests)))
