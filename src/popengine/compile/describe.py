"""Describes a plan in the words of a profile: its blocks, pieces, operations, instructions, order and memory.

Pure, and without tensors in what it returns. What only the captured graph knows (FLOPs, bytes, blocks of operations) is
missing where a plan was loaded from a file without it.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache, cached_property
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from .. import ir
from ..ir import Graph, Partition, Plan
from ..order import ORDERS, length, timeline
from ..profile import Block, Operation, Part, Piece, Tick
from ..programs import Program, actions, programs

MOST_TICKS = 20_000  # actions of the schedule that a profile holds


class Description:
    """The tables of a profile that follow from the plan alone."""

    def __init__(self, plan: ir.Plan, graph: ir.Graph | None) -> None:
        self.plan, self.partition = plan, plan.partition
        self._nodes: dict[str, fx.Node] = {node.name: node for node in graph.code.nodes} if graph else {}
        self._slots = {slot.name: slot for slot in plan.partition.signature.slots}
        state = [slot.name for slot in self._slots.values() if slot.role != "input"]
        self._state = {value.untyped_storage()._cdata for name in state for value in self._values(name)}
        self._dying = {  # piece -> what it is handed for good
            instruction.piece: instruction.names
            for task in plan.tasks
            for instruction in task.instructions
            if instruction.kind == "compute"
        }
        self.operations, self.pieces = self._operations()
        self._part_of = {
            (row, number): self._part(task, instruction)
            for row, task in enumerate(plan.tasks)
            for number, instruction in enumerate(task.instructions)
        }
        self.parts = list(dict.fromkeys(self._part_of.values()))
        self.blocks = self._blocks()
        self.schedule, self.length = self._schedule()

    @property
    def actions(self) -> int:
        """The actions of a step."""
        return len(actions(self.plan)[0]) * self.plan.micro_batches

    @cached_property
    def programs(self) -> dict[int, list[int]]:
        """For each ipu: part, micro-batch, part, micro-batch ..."""
        place = {part: number for number, part in enumerate(self.parts)}
        numbers = {key: place[part] for key, part in self._part_of.items()}
        return {
            ipu: [
                value
                for entry in program.entries
                for number in range(len(self.plan.tasks[entry.row].instructions))
                for value in (numbers[entry.row, number], entry.micro_batch)
            ]
            for ipu, program in programs(self.plan).items()
        }

    # ---- operations --------------------------------------------------------------------------------------

    def _operations(self) -> tuple[list[tuple[int, Operation]], list[Piece]]:
        """Operations, each with the number of its line; and the pieces."""
        found, pieces = [], []
        for index, piece in enumerate(self.partition.pieces):
            alive: dict[int, int] = {}  # memory -> bytes, of what dies in the piece or is made there
            holders: dict[str, int] = {}
            self._born(self._dying.get(index, ()), alive, holders)
            enters = sum(alive.values())
            read = {name for line in piece.lines for name in line.operands()}
            self._die(set(piece.reads) - read - set(piece.writes), alive, holders)
            for number, (line, dying) in enumerate(zip(piece.lines, piece.dying, strict=True)):
                self._born([line.name], alive, holders)
                live = sum(alive.values())
                self._die(dying, alive, holders)
                found.append((number, self._operation(index, line, live)))
            first = piece.lines[0].where if piece.lines else "?"
            pieces.append(Piece(piece.phase, piece.stage, self.partition.ipus[piece.stage], first, enters))
        return found, pieces

    def _operation(self, piece: int, line: ir.Line, live: int) -> Operation:
        kind = line.call.split("::")[-1].removeprefix("aten.").removesuffix(".default")
        node = self._nodes.get(line.name)
        if node is None:
            return Operation(piece, line.name, kind, self._stage_name(piece), line.where, live=live)
        block = node.meta.get("block")
        visits = self.partition.signature.visits
        title = visits[block].name if block is not None and block >= 0 else None
        results = [line.name, *(user.name for user in node.users if user.target is operator.getitem)]
        moved = sum(self._bytes([*dict.fromkeys(line.operands()), *results]))
        title = title or self._stage_name(piece)
        module = node.meta.get("module", "?")
        flops, width = _flops(node), _element_size(node)
        return Operation(piece, line.name, kind, title, line.where, 0, 0, flops, moved, live, width, module)

    def _stage_name(self, piece: int) -> str:
        return self.partition.names[self.partition.pieces[piece].stage]

    def _born(self, names: Iterable[str], alive: dict[int, int], holders: dict[str, int]) -> None:
        for name in names:
            for value in self._values(name):
                storage = value.untyped_storage()
                if storage._cdata not in self._state:  # views of weights cost nothing
                    alive[storage._cdata] = storage.nbytes()
                    holders[name] = storage._cdata

    def _die(self, names: Iterable[str], alive: dict[int, int], holders: dict[str, int]) -> None:
        for name in names:
            memory = holders.pop(name, None)
            if memory is not None and memory not in holders.values():
                alive.pop(memory, None)

    def _values(self, name: str) -> list[torch.Tensor]:
        node = self._nodes.get(name)
        value = node.meta.get("val") if node is not None else None
        # A tuple's parts get names of their own, one each.
        return [value] if isinstance(value, torch.Tensor) else []

    def _bytes(self, names: Iterable[str]) -> list[int]:
        return [value.numel() * value.element_size() for name in names for value in self._values(name)]

    # ---- instructions ------------------------------------------------------------------------------------

    def _part(self, task: ir.Task, instruction: ir.Instruction) -> Part:
        kind, names, (channel, peer) = instruction.kind, instruction.names, instruction.channel
        if kind == "receive":
            peer = self._sender(channel)
        elif kind == "compute":
            names = ()  # nothing is moved
        elif kind == "update":
            names = tuple(slot.name for slot in self._slots.values() if slot.key in set(instruction.keys))
        size = sum(self._slot_bytes(n) if n in self._slots else sum(self._bytes([n])) for n in names)
        return Part(task.ipu, kind, task.phase, task.stage, peer, size, channel)

    def _sender(self, channel: str) -> int:
        if channel.startswith("weights of "):
            return int(channel.rsplit(" ", 1)[1])
        return next((self.partition.ipus[p.stage] for p in self.partition.pieces if str(p) == channel), -1)

    def _slot_bytes(self, name: str) -> int:
        slot = self._slots[name]
        return torch.Size(slot.shape).numel() * slot.dtype.itemsize

    # ---- blocks and order --------------------------------------------------------------------------------

    def _blocks(self) -> list[Block]:
        """Blocks in the order of the data; the one without a name is what runs before the first."""
        visits = {str(visit.name): visit.where for visit in reversed(self.partition.signature.visits)}
        users: dict[str, set[str]] = {}
        for node in self._nodes.values():
            block = node.meta.get("block")
            if node.meta.get("phase") == "F" and block is not None and block >= 0:
                title = str(self.partition.signature.visits[block].name)
                users.setdefault(title, set()).update(operand.name for operand in node.all_input_nodes)
        found = []
        for stage, names in enumerate(self.partition.names):
            for name in names.split(", "):
                key = "None" if name == "no block" else name
                weights = [
                    slot
                    for slot in self._slots.values()
                    if slot.role == "parameter" and slot.name in users.get(key, ())
                ]
                size = sum(torch.Size(slot.shape).numel() for slot in weights)
                found.append(Block(name, stage, self.partition.ipus[stage], visits.get(key, "?"), size))
        return found

    def _schedule(self) -> tuple[list[Tick], int]:
        """Return the first actions in the order of their ticks, and how many ticks the step has."""
        found, _ = actions(self.plan)
        order, _ = ORDERS[self.plan.order]
        micro_batches = self.plan.micro_batches

        def ticks(count: int) -> float:
            return timeline(found, count, order)[1].length

        tasks, times = timeline(found, min(micro_batches, 1 + MOST_TICKS // max(1, len(found))), order)
        rows = [
            Tick(found[i].ipu, found[i].phase, found[i].stage, m, int(start))
            for (i, m), start in zip(tasks, times.starts, strict=True)
        ]
        rows.sort(key=lambda row: (row.tick, row.ipu))
        return rows[:MOST_TICKS], int(length(found, micro_batches, ticks))


def _flops(node: fx.Node) -> int:
    """Of matrix products, convolutions and attention, as torch counts them; 0 for what torch doesn't count."""
    rules: Mapping[Any, Any] = flop_registry
    count = rules.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda operand: operand.meta.get("val"))  # type: ignore[misc]
    try:
        return int(count(*args, **kwargs, out_val=_result(node)))
    except Exception:  # a rule of torch's for other arguments: better no figure than no profile
        return 0


def _element_size(node: fx.Node) -> int:
    """Return the element size of a node's result, in bytes; 4 if unknown."""
    values = [node.meta.get("val"), *(user.meta.get("val") for user in node.users)]
    return next((value.element_size() for value in values if isinstance(value, torch.Tensor)), 4)


def _result(node: fx.Node) -> Any:
    """Return the result of an operation. Of several results the graph keeps those that are used, each under a name."""
    parts = {n.args[1]: n.meta.get("val") for n in node.users if n.target is operator.getitem}
    return [parts.get(i) for i in range(max(parts) + 1)] if parts else node.meta.get("val")  # type: ignore[arg-type, operator]


def held_bytes(graph: Graph, partition: Partition) -> tuple[int, ...]:
    """For each stage the bytes of activations and inputs that wait for its backward, a micro-batch.

    Values that share memory count once. Weights, buffers, gradients and optimizer state are not part of it.
    """
    nodes = {node.name: node for node in graph.code.nodes}
    flowing = {name for piece in partition.pieces for name in piece.writes}
    flowing |= {slot.name for slot in graph.slots if slot.role == "input"}
    held = [0] * partition.stages
    for piece in partition.pieces:
        if piece.phase == "B":
            made_late = {name for other in partition.pieces if other.phase == "B" for name in other.writes}
            memory: dict[int, int] = {}
            for name in piece.reads:
                if name in flowing and name not in made_late:
                    value: torch.Tensor = nodes[name].meta["val"]
                    memory[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
            held[piece.stage] = sum(memory.values())
    return tuple(held)


def peak_bytes(graph: Graph, plan: Plan, program: Program, inside: Mapping[int, int]) -> int | None:
    """Return the most bytes that an ipu holds for its micro-batches while it runs its program (of `programs`) in order.

    Values that share memory count once; of inputs each view counts, since rows of a batch share the batch's memory.

    Args:
        inside: by piece, the most bytes that are alive in it beyond those that the ipu holds before
    Returns: None where only the kernel knows the size of a workspace (oneDNN's of an LSTM layer)
    """
    values = {node.name: node.meta.get("val") for node in graph.code.nodes}
    state, inputs = set[int](), set[int]()
    for slot in graph.slots:
        if isinstance(value := values.get(slot.name), torch.Tensor):
            (inputs if slot.role == "input" else state).add(value.untyped_storage()._cdata)

    @cache
    def memory(name: str) -> tuple[tuple[int, int], int | None]:
        """Return what is equal for names of the same memory, and its bytes (None: not known)."""
        value = values.get(name)
        if not isinstance(value, torch.Tensor) or (storage := value.untyped_storage())._cdata in state:
            return (0, 0), 0
        if value.dtype == torch.uint8 and not value.numel():
            return (0, 0), None
        if storage._cdata in inputs:
            return (storage._cdata, int(value.storage_offset())), value.nbytes
        return (storage._cdata, 0), storage.nbytes()

    names: dict[int, Counter[tuple[int, int]]] = {}  # by micro-batch, how many names each memory has
    held = most = 0
    for instruction, micro_batch in program.instructions:
        kind, new, gone = instruction.kind, instruction.names, ()
        if kind not in ("compute", "free", "load", "receive") or micro_batch < 0:
            continue
        if kind == "compute":
            most = max(most, held + inside[instruction.piece])
            new, gone = plan.partition.pieces[instruction.piece].writes, instruction.names
        elif kind == "free":
            new, gone = (), instruction.names
        own = names.setdefault(micro_batch, Counter())
        for sign, changed in ((1, new), (-1, gone)):
            for place, size in map(memory, changed):
                if size is None:
                    return None
                before, own[place] = own[place], own[place] + sign
                held += size * ((own[place] > 0) - (before > 0))
        most = max(most, held)
    return most
