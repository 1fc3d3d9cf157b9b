"""Roofline costs: the seconds of operations, stages and updates of a plan on a machine with a chip per ipu.

The time of an operation is its number of FLOPs (or of bytes, if it has none), divided by the chip's rate
times the efficiency of its kind. A product also exchanges data: each tile computes a cube of multiplications,
and exchanges the cube's faces. A cube needs the least data (Irony, Toledo and Tiskin, 2004).
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

from popengine.profile import Operation, Profile

from .machine import Machine
from .virtual import StepModel

_FREE = re.compile(
    r"getitem|view|_unsafe_view|t|transpose|permute|expand|(un)?squeeze|slice|select|split.*|unbind|detach|alias|empty.*"
    r"|as_strided|recomputation_checkpoint|scalar_tensor|begin_.*|end_.*|set_.*|nop|lift_fresh.*"
)
_KINDS = {  # the first match counts
    "convolution": re.compile(r".*convolution.*|.*conv\dd.*"),
    "matmul": re.compile(r"b?addb?mm|b?mm|.*linear|mv|dot|.*attention.*|.*rnn.*|.*lstm.*"),
    "normalization": re.compile(r".*norm.*|.*softmax.*"),
    "embedding": re.compile(r"embedding.*|gather|scatter.*|index.*|.*_select|nll_loss.*"),
}
Spent = defaultdict[str, float]  # seconds by category, one of:
CATEGORIES = ("compute", "memory bandwidth", "exchange", "links", "host input")


def operation_kind(operation: Operation) -> str | None:
    """Return the kind of an operation, such as "matmul", by which `Machine.efficiency` gives its efficiency;
    None for an operation that costs nothing, such as a view."""
    name = re.sub(r"^(poptorch|popengine|prims)\.", "", operation.kind).split(".")[0]
    if _FREE.fullmatch(name):
        return None
    return next((kind for kind, names in _KINDS.items() if names.fullmatch(name)), "elementwise")


def operation_seconds(operation: Operation, machine: Machine) -> Spent:
    """Return the estimated seconds of one call of an operation, by category; empty if it costs nothing."""
    kind, found = operation_kind(operation), Spent(float)
    if kind is None:
        return found
    found["exchange"] = machine.launch
    if operation.flops:
        rate = machine.half if operation.width <= 2 else machine.single
        found["compute"] = operation.flops / (rate * machine.efficiency_of(kind))
        block = operation.flops / 2 / machine.tiles  # multiplications of a tile
        found["exchange"] += 3 * block ** (2 / 3) * operation.width * machine.tiles / machine.exchange
    else:
        share = machine.efficiency_of("elementwise" if kind in ("matmul", "convolution") else kind)
        found["memory bandwidth"] = operation.bytes / (machine.local * share)
    return found


def all_reduce_seconds(size: float, replicas: int, ipus: int, machine: Machine) -> float:
    """Return the seconds of an all-reduce of `size` bytes over replicas, each of so many ipus: by a ring within each
    rack and a ring over racks."""
    inside = min(replicas, max(1, machine.rack // ipus))
    rings = (
        (inside, machine.links * machine.efficiency_of("links")),
        (-(-replicas // inside), machine.gateway),
    )
    total = 0.0
    for members, rate in rings:
        if members > 1:
            size /= members
            total += 2 * (members - 1) * (machine.message + size / rate)
    return total


class Costs:
    """The seconds of a step of a plan on a machine with a chip per ipu.

    Attributes:
        profile: the plan, with the ns of one call of each operation
        rows:    by row of the table, the ns of one run
        by_ipu:  by ipu, the seconds of a step by category: all micro-batches, and the weight update
        step:    the model of a replica's step, for the simulation in `virtual`
    """

    def __init__(self, profile: Profile, machine: Machine, replicas: int, micro_batches: int) -> None:
        updates = dict(_update_seconds(profile, machine, replicas)) if profile.training else {}
        self.by_ipu = {ipu: Spent(float, updates.get(ipu, {})) for ipu in profile.devices}
        self.rows, operations = defaultdict[int, float](float), []
        row_of = {task.piece: row for row, task in enumerate(profile.tasks) if task.computes}

        def add(row: int, ipu: int, spent: Mapping[str, float]) -> float:
            for category, seconds in spent.items():
                self.by_ipu[ipu][category] += micro_batches * seconds
            ns = 1e9 * sum(spent.values())
            self.rows[row] += ns
            return ns

        for operation in profile.operations:
            ipu, spent = profile.pieces[operation.piece].ipu, operation_seconds(operation, machine)
            ns = add(row_of[operation.piece], ipu, spent)
            operations.append(operation._replace(calls=1, ns=round(ns)))
        for part in profile.instructions:
            if part.phase:
                add(part.task, part.ipu, _instruction_seconds(part.kind, part.bytes, machine))
        self.profile = replace(profile, operations=tuple(operations))
        self.step = StepModel.of(
            profile,
            self.rows,
            updates={ipu: 1e9 * sum(spent.values()) for ipu, spent in updates.items()},
            micro_batches=micro_batches,
            keeps_order=False,
        )


def _instruction_seconds(kind: str, size: int, machine: Machine) -> dict[str, float]:
    """Return the seconds of an instruction that moves `size` bytes, by category; {} if it costs nothing."""
    if kind in ("send", "receive"):  # neither end computes meanwhile
        return {"links": machine.message + size / (machine.links * machine.efficiency_of("links"))}
    if kind == "load":
        return {"host input": size / machine.streaming}  # the host has copied the rows there before
    if kind == "accumulate":
        return {"memory bandwidth": 3 * size / (machine.local * machine.efficiency_of("elementwise"))}
    return {}


def _update_seconds(profile: Profile, machine: Machine, replicas: int) -> Iterator[tuple[int, Spent]]:
    """Yield (ipu, seconds by category) of each weight update: the all-reduce of gradients, the transfer of optimizer
    state that is off chip, and the update rule."""
    facts = profile.facts
    for row in profile.memory:
        state = 2 * row.optimizer / (replicas if facts.get("shards_optimizer") else 1)
        touched = (3 * row.weights + row.gradients + state) / (
            machine.local * machine.efficiency_of("update")
        )
        off_chip = state / machine.streaming if facts.get("optimizer_off_chip") else 0.0
        links = all_reduce_seconds(row.gradients, replicas, len(profile.devices), machine)
        yield row.ipu, Spent(float, {"links": links, "memory bandwidth": touched + off_chip})
