"""Describe a plan in the terms of a profile: its blocks, pieces, operations, instructions, order and memory.

The functions are pure and return no tensors. FLOPs, bytes and the blocks of operations come from the captured
graph; they are missing if the plan was loaded from a file without its graph.
"""

import math
import operator
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from ..ir import Graph, Instruction, Line, Plan, Task, Visit
from ..order import Action, order_named, step_duration, timeline
from ..profile import Operation, Profile, ProfiledBlock, Tensor, Tick
from ..settings import Place, Settings
from ..table import actions
from ..torch_private import storage_id
from .partition import AGAIN

_COUNTS = ("iterations", "accumulation", "replicas", "groups", "instances")
MOST_TICKS = 20_000  # actions of the schedule that a profile holds at most


def _live_bytes(
    memories: Mapping[str, tuple[Any, int]], changes: Iterable[tuple[Iterable[str], int]]
) -> Iterator[int]:
    """Yield the bytes of live values after each change: (names that become live, 1) or (names that are freed, -1).
    Memory that several values share counts once (`memories`: see `_memory_of_values`)."""
    users, total = Counter[Any](), 0  # by memory, the number of live names
    for names, by in changes:
        for memory, size in (memories[name] for name in names if name in memories):
            users[memory] += by
            if users[memory] == max(by, 0):  # the first name, or none is left
                total += by * size
        yield total


def _memory_of_values(graph: Graph) -> dict[str, tuple[Any, int]]:
    """Return (memory, bytes) of each value, by name. Values that share memory have equal keys `memory`.

    A view of an input counts by its own size, since its storage is that of the whole batch. Weights, buffers, constants
    and views of them are left out. 0 bytes: a kernel chooses the size (oneDNN's LSTM workspace).
    """
    values = _fake_tensors_by_name(graph.code.nodes)
    role_of = {storage_id(values[slot.name]): slot.role for slot in graph.slots}
    memories: dict[str, tuple[Any, int]] = {}
    for name, value in values.items():
        storage = value.untyped_storage()
        role = role_of.get(storage_id(value))
        if role == "input":
            memories[name] = (storage_id(value), int(value.storage_offset())), value.nbytes
        elif role is None:
            memories[name] = storage_id(value), storage.nbytes()
    # What a backward recomputes is in memory of its own.
    return memories | {name + AGAIN: ((AGAIN, memory), size) for name, (memory, size) in memories.items()}


def describe(plan: Plan, settings: Settings, graph: Graph) -> Profile:
    """Return a profile without measurements, computed from a plan, its settings and its graph."""
    partition = plan.partition
    step, _ = actions(plan.tasks)
    schedule, ticks = _schedule_ticks(step, plan)
    batches = [slot.shape for slot in partition.signature.slots if slot.role == "input" and slot.shape]
    return Profile(
        "training" if settings.training else "inference",
        settings.training,
        partition.names,
        partition.ipus,
        {"micro_batch_size": batches[0][0] if batches else 1}
        | {name: getattr(settings.counts, name) for name in _COUNTS},
        {
            "mode": plan.order,
            "schedule_length": ticks,
            "schedule_actions": len(step) * plan.micro_batches,
            "schedule_micro_batches": plan.micro_batches,
            "cores": os.cpu_count() or 1,
            "threads": torch.get_num_threads(),
            "ipus_of_instances": [
                [i for i in sorted({*partition.ipus}) if plan.places.get(i, Place()).process == part]
                for part in range(settings.counts.parts)
            ],
        },
        blocks=tuple(_profiled_blocks(plan, graph)),
        operations=tuple(_profiled_operations(plan, graph)),
        tasks=sized_tasks(plan, graph),
        schedule=tuple(schedule),
    )


def sized_tasks(plan: Plan, graph: Graph) -> tuple[Task, ...]:
    """Return the rows of a plan with the bytes of each instruction, in place of the names of its values. A row for the
    update of each ipu follows, which separate devices would run in place of the row of all."""
    slots, sizes = plan.partition.signature.slots, _sizes_of_values(plan, graph)

    def sized(instruction: Instruction) -> Instruction:
        names = instruction.names
        if instruction.kind == "update":
            names = [slot.name for slot in slots if slot.key in instruction.keys]
        size = 0 if instruction.kind == "compute" else sum(sizes.get(name, 0) for name in names)
        return instruction._replace(names=(), keys=(), bytes=size)

    tasks, of_ipus = list[Task](), list[Task]()
    for task in plan.tasks:
        instructions = tuple(map(sized, task.instructions))
        if task.kind == "update":
            by_ipu = ((x.peer, (x._replace(peer=-1),)) for x in instructions)
            of_ipus += [Task("update", ipu, index="step", instructions=x, once=True) for ipu, x in by_ipu]
            instructions = ()
        tasks.append(replace(task, instructions=instructions, frees=()))
    return (*tasks, *of_ipus)


def _sizes_of_values(plan: Plan, graph: Graph) -> dict[str, int]:
    """Return the bytes of each slot and of each computed value, by name."""
    values = _fake_tensors_by_name(graph.code.nodes)
    slots = {slot.name: slot.nbytes for slot in plan.partition.signature.slots}
    sizes = {name: value.nbytes for name, value in values.items()}
    return slots | sizes | {name + AGAIN: size for name, size in sizes.items()}


def _profiled_operations(plan: Plan, graph: Graph) -> Iterator[Operation]:
    """Yield the operations of each row that runs a piece, in their order."""
    partition = plan.partition
    memories = _memory_of_values(graph)
    nodes = {node.name: node for node in graph.code.nodes}
    sizes = _sizes_of_values(plan, graph)
    for row, task in enumerate(plan.tasks):
        if not task.runs_piece:
            continue
        piece = partition.pieces[task.piece]
        # Inputs that are freed in the piece.
        freed = next((x.names for x in task.instructions if x.kind == "compute"), ())
        made_or_freed = {*freed, *(line.name for line in piece.lines)}
        dying_first, *dying = piece.values_to_free
        # Of the values that the piece frees or makes: at its begin, then with the result of each line, and after it.
        changes: list[tuple[Iterable[str], int]] = [(freed, 1), (made_or_freed.intersection(dying_first), -1)]
        for line, names in zip(piece.lines, dying, strict=True):
            changes += [([line.name], 1), (made_or_freed.intersection(names), -1)]
        before, _, *live = _live_bytes(memories, changes)
        for line, held in zip(piece.lines, live[::2], strict=True):
            kind = line.call.split("::")[-1].removeprefix("aten.").removesuffix(".default")
            block = partition.names[task.stage]
            operation = Operation(row, line.name, kind, block, line.where, held=held - before)
            if node := nodes.get(line.name.removesuffix(AGAIN)):
                operation = _with_costs_of_node(operation, node, line, sizes, partition.signature.visits)
            yield operation


def _with_costs_of_node(
    operation: Operation, node: fx.Node, line: Line, sizes: Mapping[str, int], visits: Sequence[Visit]
) -> Operation:
    """Return an operation with its FLOPs, bytes, block and module."""
    parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    results = _fake_tensors_by_name([node, *parts.values()])
    return operation._replace(
        block=_block_name(node, visits) or operation.block,
        flops=_flop_count(node, parts),
        bytes=sum(sizes.get(name, 0) for name in (*dict.fromkeys(line.operands()), *results)),
        module=node.meta.get("module", "?"),
    )


def _block_name(node: fx.Node, visits: Sequence[Visit]) -> str | None:
    """Return the name of a node's block; None for a node before the first block, or of no known block."""
    block = node.meta.get("block")
    return visits[block].name if block is not None and block >= 0 else None


def _profiled_blocks(plan: Plan, graph: Graph) -> Iterator[ProfiledBlock]:
    """Yield the blocks of each stage. The block "no block" has the operations before all blocks."""
    partition, visits = plan.partition, plan.partition.signature.visits
    lines = {visit.name or "no block": visit.where for visit in reversed(visits)}
    used: dict[str, set[str]] = {}
    for node in graph.code.nodes:
        if node.meta.get("phase") == "F" and (node.meta.get("block") or 0) >= 0:
            block = _block_name(node, visits) or "no block"
            used.setdefault(block, set()).update(operand.name for operand in node.all_input_nodes)
    parameters = [slot for slot in partition.signature.slots if slot.role == "parameter"]
    for stage, names in enumerate(partition.names):
        for name in names.split(", "):
            block_slots = [slot for slot in parameters if slot.name in used.get(name, ())]
            parameters = [slot for slot in parameters if slot not in block_slots]  # a tied one counts once
            size = sum(math.prod(slot.shape) for slot in block_slots)
            yield ProfiledBlock(name, stage, partition.ipus[stage], lines.get(name, "?"), size)


def _schedule_ticks(step: list[Action], plan: Plan) -> tuple[list[Tick], int]:
    """Return a step's schedule, of which at most the first `MOST_TICKS` rows, and its length in ticks."""
    order = order_named(plan.order)
    micro_batches = min(plan.micro_batches, 1 + MOST_TICKS // max(1, len(step)))
    tasks, times = timeline(step, micro_batches, order)
    rows = [
        Tick(step[i].ipu, step[i].phase, step[i].stage, m, int(start))
        for (i, m), start in zip(tasks, times.starts, strict=True)
    ]
    rows.sort(key=lambda row: (row.tick, row.ipu))
    ticks = step_duration(step, plan.micro_batches, lambda count: timeline(step, count, order)[1].length)
    return rows[:MOST_TICKS], int(ticks)


def _flop_count(node: fx.Node, parts: dict[Any, fx.Node]) -> int:
    """Return the FLOPs of an operation by torch's rules; 0 without one. `parts`: its results that are used, by
    index."""
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


def _fake_tensors_by_name(nodes: Iterable[fx.Node]) -> dict[str, torch.Tensor]:
    """Return the fake tensor of each node that has one, by the node's name."""
    values = ((node.name, node.meta.get("val")) for node in nodes)
    return {name: value for name, value in values if isinstance(value, torch.Tensor)}


def held_tensors(plan: Plan, graph: Graph) -> list[Tensor]:
    """Return the tensors, each with a memory of its own, that each ipu holds for a micro-batch."""
    memories, tensors = _memory_of_values(graph), list[Tensor]()
    kinds = {"load": "input", "receive": "received", "compute": "activation"}
    # By ipu and memory: index in `tensors`, and the live values.
    held: dict[tuple[int, Any], tuple[int, set[str]]] = {}
    for row, task in enumerate(plan.tasks):
        for kind, names, _, _, _, piece, _ in task.instructions:
            for name in names if kind in ("compute", "free") else ():
                place = task.ipu, memories.get(name, (None, 0))[0]
                number, alive = held.get(place, (0, set()))
                if alive == {name}:
                    tensors[number] = tensors[number]._replace(died=row)
                    del held[place]
                alive.discard(name)
            made = plan.partition.pieces[piece].writes if kind == "compute" else names
            for name in made if kind in kinds else ():
                if name in memories:
                    memory, size = memories[name]
                    _, alive = held.setdefault((task.ipu, memory), (len(tensors), set()))
                    if not alive:
                        tensors.append(Tensor(task.ipu, name, kinds[kind], size, row, -1))
                    alive.add(name)
    return tensors
