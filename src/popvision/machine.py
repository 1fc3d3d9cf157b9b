"""Machines as data: the constants of each are in a TOML file, with their sources. Users can add files."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from popengine.errors import did_you_mean

_MACHINES = files("popvision") / "machines"


class MachineError(ValueError):
    """An error: a machine is unknown, or its file is incomplete."""


@dataclass(frozen=True)
class Machine:
    """A machine with one chip per ipu, each with its own memory. All rates are per chip."""

    name: str
    description: str
    chips: int
    tiles: int  # of a chip
    half: float  # FLOPs per second of products in half precision
    single: float  # the same in float32
    memory: float  # bytes of a chip's own memory
    code: float  # bytes of it that the program takes
    local: float  # bytes per second of the chip's own memory
    exchange: float  # bytes per second between tiles
    links: float  # bytes per second between chips of a rack
    gateway: float  # bytes per second between racks
    rack: int  # chips that links connect
    streaming: float  # bytes per second of the memory beside the chip
    host: float  # bytes per second from the host
    launch: float  # seconds that an operation takes to begin
    message: float  # seconds of latency between chips
    efficiency: Mapping[str, float]  # by kind of operation: see `efficiency_of`

    def efficiency_of(self, kind: str) -> float:
        """Return the fraction of the chip's rate that operations of a kind reach; 1 for an unknown kind."""
        return self.efficiency.get(kind, 1.0)


def load_machines(names: str | Sequence[str]) -> list[Machine]:
    """Return the machines with these names (see `load_machine`), given as a list or as a text with commas."""
    parts = names.split(",") if isinstance(names, str) else names
    return [load_machine(str(name).strip()) for name in parts]


def smallest_memory(machines: Sequence[Machine]) -> float:
    """Return the bytes of the smallest memory of a chip."""
    return min(machine.memory for machine in machines)


def load_machine(name: str) -> Machine:
    """Return the machine with this name; for a name that ends with ".toml", the machine in that file.

    Raises: MachineError, if the machine is not known, or its file is incomplete
    """
    data = _read_machine_file(name)
    try:
        chip, pod, efficiency = (
            {constant: entry["value"] for constant, entry in data[part].items()}
            for part in ("chip", "pod", "efficiency")
        )
        cycles = chip["tiles"] * chip["clock"]
        return Machine(
            name=Path(name).stem,
            description=str(data.get("description", "")),
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
            "  fix: name one of these, or the path of a TOML file: --on my-machine.toml"
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
