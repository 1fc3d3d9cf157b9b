"""Describe a plan in the terms of a profile: its blocks, pieces, operations, instructions, order and memory.

The functions are pure and return no tensors. FLOPs, bytes and the blocks of operations come from the captured
graph; they are missing if the plan was loaded from a file without its graph.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache, cached_property
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from ..ir import Graph, Instruction, Line, Partition, Plan, Task
from ..order import ORDERS, Action, length, timeline
from ..profile import Block, Operation, Part, Piece, Tick
from ..programs import Program, actions, programs

MOST_TICKS = 20_000  # actions of the schedule that a profile holds at most


class Description:
    """The tables of a profile that follow from a plan and its graph, before a run."""

    def __init__(self, plan: Plan, graph: Graph | None) -> None:
        self.plan, self.partition = plan, plan.partition
        self._nodes: dict[str, fx.Node] = {node.name: node for node in graph.code.nodes} if graph else {}
        self._values = _tensors(self._nodes.values())
        self._slots = {slot.name: slot for slot in plan.partition.signature.slots}
        self._state = {
            self._values[slot.name].untyped_storage()._cdata
            for slot in self._slots.values()
            if slot.role != "input" and slot.name in self._values
        }
        self.operations, self.pieces = self._operations()
        self._part_of = {
            (row, number): self._part(task, instruction)
            for row, task in enumerate(plan.tasks)
            for number, instruction in enumerate(task.instructions)
        }
        self.parts = list(dict.fromkeys(self._part_of.values()))
        self.blocks = self._blocks()
        found, _ = actions(plan)
        self.actions = len(found) * plan.micro_batches
        self.schedule, self.length = _schedule(found, plan)

    @cached_property
    def programs(self) -> dict[int, list[int]]:
        """Return each ipu's program as a flat list: index in `parts`, micro-batch, index, micro-batch ..."""
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
        """Return the operations, each with the index of its line in the piece; and the pieces."""
        found, pieces = [], []
        ends = {  # by piece, its inputs that are freed in it
            instruction.piece: instruction.names
            for task in self.plan.tasks
            for instruction in task.instructions
            if instruction.kind == "compute"
        }
        for index, piece in enumerate(self.partition.pieces):
            alive: dict[int, int] = {}  # memory -> bytes, of values that the piece frees or makes
            holders: dict[str, int] = {}
            self._born(ends.get(index, ()), alive, holders)
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

    def _operation(self, piece: int, line: Line, live: int) -> Operation:
        kind = line.call.split("::")[-1].removeprefix("aten.").removesuffix(".default")
        stage = self.partition.names[self.partition.pieces[piece].stage]
        node = self._nodes.get(line.name)
        if node is None:
            return Operation(piece, line.name, kind, stage, line.where, live=live)
        parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        results = [
            self._values[result.name] for result in (node, *parts.values()) if result.name in self._values
        ]
        return Operation(
            piece,
            line.name,
            kind,
            self._block_of(node) or stage,
            line.where,
            flops=_flops(node, parts),
            bytes=self._bytes(dict.fromkeys(line.operands())) + sum(value.nbytes for value in results),
            live=live,
            width=results[0].element_size() if results else 4,
            module=node.meta.get("module", "?"),
        )

    def _block_of(self, node: fx.Node) -> str | None:
        """Return the name of a node's block; None before the first block, or if the block is unknown."""
        block = node.meta.get("block")
        return self.partition.signature.visits[block].name if block is not None and block >= 0 else None

    def _born(self, names: Iterable[str], alive: dict[int, int], holders: dict[str, int]) -> None:
        for name in names:
            if name in self._values:
                storage = self._values[name].untyped_storage()
                if storage._cdata not in self._state:  # views of weights cost nothing
                    alive[storage._cdata] = storage.nbytes()
                    holders[name] = storage._cdata

    def _die(self, names: Iterable[str], alive: dict[int, int], holders: dict[str, int]) -> None:
        for name in names:
            memory = holders.pop(name, None)
            if memory is not None and memory not in holders.values():
                alive.pop(memory, None)

    def _bytes(self, names: Iterable[str]) -> int:
        return sum(self._values[name].nbytes for name in names if name in self._values)

    # ---- instructions ------------------------------------------------------------------------------------

    def _part(self, task: Task, instruction: Instruction) -> Part:
        kind, names = instruction.kind, instruction.names
        if kind == "compute":
            names = ()  # nothing is moved
        elif kind == "update":
            names = tuple(slot.name for slot in self._slots.values() if slot.key in instruction.keys)
        size = sum(self._slots[n].nbytes if n in self._slots else self._bytes([n]) for n in names)
        return Part(task.ipu, kind, task.phase, task.stage, instruction.peer, size, instruction.channel)

    # ---- blocks ------------------------------------------------------------------------------------------

    def _blocks(self) -> list[Block]:
        """Return the blocks in the order of the data; "no block" holds the operations before the first."""
        visits = {str(visit.name): visit.where for visit in reversed(self.partition.signature.visits)}
        used: dict[str, set[str]] = {}
        for node in self._nodes.values():
            if node.meta.get("phase") == "F" and (node.meta.get("block") or 0) >= 0:
                used.setdefault(str(self._block_of(node)), set()).update(n.name for n in node.all_input_nodes)
        found = []
        for stage, names in enumerate(self.partition.names):
            for name in names.split(", "):
                key = "None" if name == "no block" else name
                slots = [
                    self._slots[used_name] for used_name in used.get(key, ()) if used_name in self._slots
                ]
                size = sum(math.prod(slot.shape) for slot in slots if slot.role == "parameter")
                found.append(Block(name, stage, self.partition.ipus[stage], visits.get(key, "?"), size))
        return found


def _schedule(found: list[Action], plan: Plan) -> tuple[list[Tick], int]:
    """Return the first `MOST_TICKS` actions in the order of their ticks, and the number of ticks."""
    order, _ = ORDERS[plan.order]
    micro_batches = min(plan.micro_batches, 1 + MOST_TICKS // max(1, len(found)))
    tasks, times = timeline(found, micro_batches, order)
    rows = [
        Tick(found[i].ipu, found[i].phase, found[i].stage, m, int(start))
        for (i, m), start in zip(tasks, times.starts, strict=True)
    ]
    rows.sort(key=lambda row: (row.tick, row.ipu))
    ticks = length(found, plan.micro_batches, lambda count: timeline(found, count, order)[1].length)
    return rows[:MOST_TICKS], int(ticks)


def _flops(node: fx.Node, parts: dict[Any, fx.Node]) -> int:
    """Return the FLOPs of a matrix product, convolution or attention, by torch's rules; 0 for others."""
    rules: Mapping[Any, Any] = flop_registry
    count = rules.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda operand: operand.meta.get("val"))  # type: ignore[misc]
    # Of several results the graph keeps the used ones, each as a node.
    several = [parts[i].meta.get("val") if i in parts else None for i in range(max(parts, default=-1) + 1)]
    try:
        return int(count(*args, **kwargs, out_val=several or node.meta.get("val")))
    except Exception:  # torch's rule doesn't fit these arguments: a figure is missing, not the profile
        return 0


def _tensors(nodes: Iterable[fx.Node]) -> dict[str, torch.Tensor]:
    """Return the fake tensor of each node, by name. An operation of several results has a node for each."""
    values = ((node.name, node.meta.get("val")) for node in nodes)
    return {name: value for name, value in values if isinstance(value, torch.Tensor)}


def held_bytes(graph: Graph, partition: Partition) -> tuple[int, ...]:
    """Return for each stage the bytes of activations and inputs kept for its backward, per micro-batch.

    Values that share memory count once. Weights, buffers, gradients and optimizer state don't count.
    """
    values, held = _tensors(graph.code.nodes), [0] * partition.stages
    waiting = {slot.name for slot in graph.slots if slot.role == "input"}
    waiting |= {name for piece in partition.pieces if piece.phase == "F" for name in piece.writes}
    for piece in partition.pieces:
        if piece.phase == "B":
            storages = [values[name].untyped_storage() for name in piece.reads if name in waiting]
            held[piece.stage] = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
    return tuple(held)


def peak_bytes(graph: Graph, plan: Plan, program: Program, inside: Mapping[int, int]) -> int | None:
    """Return the peak of the bytes that an ipu holds for its micro-batches while it runs its program.

    Values that share memory count once, by their storage. A view of an input counts by its own size,
    since its storage is that of the whole batch.

    Args:
        inside: by piece, the peak of the bytes that it allocates beyond those held before it runs
    Returns: None if only the kernel knows the size of a workspace (oneDNN's of an LSTM layer)
    """
    values = _tensors(graph.code.nodes)
    role_of = {values[slot.name].untyped_storage()._cdata: slot.role for slot in graph.slots}

    @cache
    def memory(name: str) -> tuple[tuple[int, int], int | None]:
        """Return a key, equal for names of the same memory, and its bytes (None: unknown; 0: not counted)."""
        if name not in values:
            return (0, 0), 0
        value, storage = values[name], values[name].untyped_storage()
        role = role_of.get(storage._cdata)
        if role == "input":
            return (storage._cdata, int(value.storage_offset())), value.nbytes
        if role is not None:
            return (0, 0), 0
        is_workspace = value.dtype == torch.uint8 and not value.numel()
        return (storage._cdata, 0), None if is_workspace else storage.nbytes()

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
