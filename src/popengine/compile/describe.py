"""Describes a plan in the words of a profile: its blocks, pieces, operations, instructions and order.

Pure, and without tensors in what it gives. What only the captured graph knows (FLOPs, bytes, blocks of
operations) is missing where a plan was loaded from a file without it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from .. import ir
from ..profile import Block, Operation, Part, Piece, Tick
from .schedule.check import ticks

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
            instruction.piece: instruction.last
            for program in plan.programs.values()
            for instruction in program
            if isinstance(instruction, ir.Compute)
        }
        self.operations, self.pieces = self._operations()
        self.parts, self.programs = self._programs()
        self.blocks = self._blocks()
        self.schedule, self.length = self._schedule()

    @property
    def actions(self) -> int:
        return sum(map(len, self.plan.schedule.rows.values()))

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
            for number, line in enumerate(piece.lines):
                self._born([line.name], alive, holders)
                live = sum(alive.values())
                self._die(line.dies, alive, holders)
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
        moved = sum(self._bytes([*dict.fromkeys(line.operands()), line.name]))
        title = title or self._stage_name(piece)
        module = node.meta.get("module", "?")
        return Operation(piece, line.name, kind, title, line.where, 0, 0, _flops(node), moved, live, module)

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

    def _programs(self) -> tuple[list[Part], dict[int, list[int]]]:
        parts: dict[Part, int] = {}
        programs: dict[int, list[int]] = {}
        known: dict[Any, int] = {}  # instructions that differ in their micro-batch only
        for ipu, program in self.plan.programs.items():
            row = programs[ipu] = []
            around = self._around(program)
            for instruction, (phase, stage) in zip(program, around, strict=True):
                micro_batch = getattr(instruction, "micro_batch", None)
                names = getattr(instruction, "names", None)
                like = (ipu, type(instruction), getattr(instruction, "channel", None), names, phase, stage)
                if like not in known:
                    part = self._part(ipu, instruction, phase, stage)
                    known[like] = parts.setdefault(part, len(parts))
                row += [known[like], -1 if micro_batch is None else micro_batch]
        return list(parts), programs

    def _around(self, program: Iterable[ir.Instruction]) -> list[tuple[str, int]]:
        """For each instruction the piece that it serves: the one it follows; before it, for what is read."""
        places: list[tuple[str, int]] = []
        waiting, here = 0, ("", -1)
        for instruction in program:
            if isinstance(instruction, ir.Compute):
                piece = self.partition.pieces[instruction.piece]
                here = (piece.phase, piece.stage)
                places += [here] * (waiting + 1)
                waiting = 0
            elif isinstance(instruction, ir.Update) or getattr(instruction, "micro_batch", 0) is None:
                places.append(("", -1))
            elif isinstance(instruction, (ir.Load, ir.Receive)):
                waiting += 1
            else:
                places.append(here)
        return places + [here] * waiting

    def _part(self, ipu: int, instruction: ir.Instruction, phase: str, stage: int) -> Part:
        kind, peer = type(instruction).__name__.lower(), -1
        names = list(getattr(instruction, "names", ()))
        if isinstance(instruction, ir.Send):
            peer = instruction.channel[1]
        elif isinstance(instruction, ir.Receive):
            peer = self._sender(instruction)
        if isinstance(instruction, ir.Update):
            keys = set(instruction.keys)
            names = [slot.name for slot in self._slots.values() if slot.key in keys]
        sizes = [
            self._slot_bytes(name) if name in self._slots else sum(self._bytes([name])) for name in names
        ]
        channel = getattr(instruction, "channel", ("",))[0]
        return Part(ipu, kind, phase, stage, peer, sum(sizes), channel)

    def _sender(self, instruction: ir.Receive) -> int:
        name = instruction.channel[0]
        if name.startswith("weights of "):
            return int(name.rsplit(" ", 1)[1])
        return next((self.partition.ipus[p.stage] for p in self.partition.pieces if str(p) == name), -1)

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
        """The first actions in the order of their ticks, and how many ticks the step has."""
        when = ticks(self.plan.schedule)
        rows = [
            Tick(ipu, *action, when[action]) for ipu, row in self.plan.schedule.rows.items() for action in row
        ]
        rows.sort(key=lambda row: (row.tick, row.ipu))
        return rows[:MOST_TICKS], max(when.values(), default=-1) + 1


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


def _result(node: fx.Node) -> Any:
    """What an operation gives. Of several results the graph keeps only those that are used, each under its own name."""
    parts = {n.args[1]: n.meta.get("val") for n in node.users if n.target is operator.getitem}
    return [parts.get(i) for i in range(max(parts) + 1)] if parts else node.meta.get("val")  # type: ignore[arg-type, operator]
