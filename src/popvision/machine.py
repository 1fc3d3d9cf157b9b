"""Machines as data: the constants of each are in a TOML file, with their sources. Users can add files."""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from popengine.errors import did_you_mean

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
