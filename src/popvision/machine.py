"""Machines as data, and the seconds that operations, stages and updates of a plan take on them.

The constants of each machine are in a TOML file, with their sources. Users can add files.

The time of an operation is its number of FLOPs (or of bytes, if it has none), divided by the chip's rate
times the efficiency of its kind. A product also exchanges data: each tile computes a cube of multiplications,
and exchanges the cube's faces. A cube needs the least data (Irony, Toledo and Tiskin, 2004).
"""

import math
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from popengine.errors import did_you_mean
from popengine.profile import Operation, Profile

from .virtual import StepModel

_MACHINES = files("popvision") / "machines"


class MachineError(ValueError):
    """An error: a machine is unknown, or its file is incomplete."""


@dataclass(frozen=True)
class Machine:
    """A machine with one chip per ipu, each with its own memory (kind "apart"), or this host ("here").

    All rates are per chip, or per core of this host.
    """

    name: str
    description: str
    kind: str = "apart"
    chips: int = 1
    tiles: int = 1  # of a chip
    half: float = 0.0  # FLOPs per second of products in half precision
    single: float = 0.0  # the same in float32
    memory: float = 0.0  # bytes of a chip's own memory
    code: float = 0.0  # bytes of it that the program takes
    local: float = 0.0  # bytes per second of the chip's own memory
    exchange: float = 0.0  # bytes per second between tiles
    links: float = 0.0  # bytes per second between chips of a rack
    gateway: float = 0.0  # bytes per second between racks
    rack: int = 1  # chips that links connect
    streaming: float = 0.0  # bytes per second of the memory beside the chip
    host: float = 0.0  # bytes per second from the host
    launch: float = 0.0  # seconds that an operation takes to begin
    message: float = 0.0  # seconds of latency between chips
    efficiency: Mapping[str, float] = field(default_factory=dict)  # by kind of operation: see `efficiency_of`

    def efficiency_of(self, kind: str) -> float:
        """Return the fraction of the chip's rate that operations of a kind reach; 1 for an unknown kind."""
        return self.efficiency.get(kind, 1.0)


def load_machines(names: str | Sequence[str]) -> list[Machine]:
    """Return the machines with these names (see `load_machine`), given as a list or as a text with commas."""
    parts = names.split(",") if isinstance(names, str) else names
    return [load_machine(str(name).strip()) for name in parts]


def load_machine(name: str) -> Machine:
    """Return the machine with this name; for a name that ends with ".toml", the machine in that file.

    Raises: MachineError, if the machine is not known, or its file is incomplete
    """
    data = _read_machine_file(name)
    made = Machine(Path(name).stem, str(data.get("description", "")), data.get("kind", "apart"))
    if made.kind == "here":  # values move through memory only; rough rates of a core, until they are measured
        free = dict.fromkeys(("exchange", "links", "gateway", "streaming", "host"), math.inf)
        return replace(made, half=50e9, single=50e9, local=10e9, **free)
    try:
        chip, pod, efficiency = (
            {constant: entry["value"] for constant, entry in data[part].items()}
            for part in ("chip", "pod", "efficiency")
        )
        cycles = chip["tiles"] * chip["clock"]
        return replace(
            made,
            half=2 * cycles * chip["half_products"],
            single=2 * cycles * chip["float_products"],
            launch=chip["launch_cycles"] / chip["clock"],
            local=cycles * chip["memory_bytes"],
            exchange=cycles * chip["exchange_bytes"],
            efficiency=efficiency,
            **{name: chip[name] for name in ("tiles", "memory", "code", "links", "streaming", "message")},
            **{name: pod[name] for name in ("chips", "rack", "gateway", "host")},
        )
    except (KeyError, TypeError) as error:
        raise MachineError(
            f"the machine {name} lacks the constant {error}\n"
            '  fix: give it, as `clock = { value = 1.85e9, source = "..." }`, or begin with `extends = "bow"`'
        ) from error


def machine_names() -> list[str]:
    """Return the names of the machines that come with Pando."""
    return sorted(Path(entry.name).stem for entry in _MACHINES.iterdir())


def _read_machine_file(name: str) -> dict[str, Any]:
    """Return a machine's TOML file as a dictionary; its values replace those of the machine that it "extends"."""
    found = Path(name) if name.endswith(".toml") else _MACHINES / f"{name}.toml"
    if not found.is_file():
        known = machine_names()
        raise MachineError(
            f"there is no machine {name!r}{did_you_mean(name, known)}\n  known are {', '.join(known)}\n"
            "  fix: name one of these, or the path of a TOML file, such as my-machine.toml"
        )
    try:
        data = tomllib.loads(found.read_text())
    except tomllib.TOMLDecodeError as error:
        raise MachineError(f"{name} is not TOML: {error}") from error
    base = _read_machine_file(data["extends"]) if "extends" in data else {}
    return {
        key: {**base.get(key, {}), **value} if isinstance(value, dict) else value
        for key, value in (base | data).items()
    }


# ---- costs -----------------------------------------------------------------------------------------------

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
