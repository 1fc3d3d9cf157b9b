"""Plans: the time of an update, the throughput and the memory of a program on machines that may be absent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from popengine.profile import PLAN_WISH, Profile, ProfileError, load

from . import virtual
from .costs import CATEGORIES, Costs, Spent
from .machine import Machine
from .machine import machine as bow
from .units import seconds, share, size, table

CORE_FLOPS, CORE_BYTES = 50e9, 10e9  # per second of a core, roughly, for estimates without measurement
KINDS = ("weights", "gradients", "optimizer", "activations", "between", "code")
_HEAD = [
    *("machine", "replicas", "micro-batches", "items/s"),
    *("an update", "bubble", "bound by", "largest ipu", ""),
]


def total_bytes(kinds: Mapping[str, int | None]) -> int:
    """Return the sum of bytes over kinds; an unknown number (None) counts as 0."""
    return sum(count or 0 for count in kinds.values())


@dataclass(frozen=True)
class Estimate:
    """The estimated time and memory of a program on a machine.

    `memory`: bytes by ipu and kind; `problems`: why the program would fail there; empty: it fits.
    """

    machine: Machine
    replicas: int
    accumulation: int  # micro-batches of a step and replica
    seconds_per_update: float
    items_per_second: float
    bubble: float
    spent: Spent  # seconds of the busiest ipu by category
    memory: dict[int, dict[str, int]]
    problems: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def bound_by(self) -> str:
        return max(CATEGORIES, key=lambda category: self.spent[category])

    @property
    def memory_per_ipu(self) -> list[int]:
        return [total_bytes(kinds) for kinds in self.memory.values()]

    def to_dict(self) -> dict[str, Any]:
        """Return an entry of `popvision plan --json`."""
        own = ("items_per_second", "seconds_per_update", "memory_per_ipu", "fits", "bound_by")
        return {"machine": self.machine.name, **{name: getattr(self, name) for name in own}}

    def cells(self) -> list[str]:
        """Return the texts of the estimate's row in `Estimates.table`."""
        return [
            self.machine.name,
            str(self.replicas),
            str(self.accumulation),
            f"{self.items_per_second:,.1f}",
            seconds(self.seconds_per_update),
            share(self.bubble),
            self.bound_by,
            size(max(self.memory_per_ipu, default=0)),
            "fits" if self.fits else "DOES NOT FIT: " + "; ".join(self.problems),
        ]


@dataclass(frozen=True)
class Estimates:
    """Estimates of one program: one per machine, replicas and accumulation; a machine's best comes first."""

    profiles: Mapping[str, Profile]
    estimates: tuple[Estimate, ...]

    @staticmethod
    def of(
        profiles: Mapping[str, Profile],
        machines: Iterable[Machine],
        replicas: Sequence[int] = (),
        accumulation: Sequence[int] = (),
    ) -> Estimates:
        """Return estimates by machine, replicas and accumulation; [] means the program's own number."""
        found = []
        for machine in machines:
            profile = profiles[machine.kind]
            choices = [
                estimate(profile, machine, count, micro_batches)
                for count in replicas or [profile.counts.get("replicas", 1)]
                for micro_batches in accumulation or [profile.facts["schedule_micro_batches"]]
            ]
            found += sorted(choices, key=lambda one: (not one.fits, -one.items_per_second))
        return Estimates(profiles, tuple(found))

    def to_json(self) -> str:
        return json.dumps([one.to_dict() for one in self.estimates], indent=1)

    def save(self, path: str | Path) -> None:
        """Write a page: the machines, a timeline, stages and memory."""
        from .plan_page import page

        Path(path).write_text(page(self))

    @cached_property
    def drawn(self) -> tuple[Machine, Profile, Costs]:
        """Return the machine that the page shows, its profile, and its costs.

        The machine is the first of the estimates with one chip per ipu, else a Bow Pod16.
        """
        machine = next(
            (one.machine for one in self.estimates if one.machine.kind == "apart"), bow("bow-pod16")
        )
        profile = self.profiles.get("apart") or next(iter(self.profiles.values()))
        return machine, profile, Costs(profile, machine, profile.counts.get("replicas", 1))

    def advice(self) -> list[str]:
        """Return sentences about what bounds a step on the machine of `drawn`, and what makes it faster; none if
        all estimates are of this machine."""
        if "apart" not in self.profiles:
            return []
        machine, profile, costs = self.drawn
        micro_batches = profile.facts["schedule_micro_batches"]
        loads = {ipu: sum(spent.values()) for ipu, spent in costs.of_ipus(micro_batches).items()}
        slowest, mean = max(loads, key=lambda ipu: loads[ipu]), sum(loads.values()) / len(loads)
        step = costs.step(micro_batches)
        return [
            f"ipu {slowest} has the most to do: {loads[slowest] / (mean or 1):.2f} times the average ipu."
            f" On {machine.name} ipus wait {step.bubble(virtual.apart(step)):.0%} of the time."
        ] + [
            f"{change.what} would make it {change.apart:.2f} times as fast there. Then {change.also}."
            for change in virtual.changes(profile, step, 0.0)
            if change.apart > 1.03
        ]

    def table(self) -> list[list[str]]:
        """Return a row of column names, and a row of cells for each estimate."""
        return [_HEAD, *(one.cells() for one in self.estimates)]

    def __str__(self) -> str:
        return table(self.table())

    __repr__ = __str__


def profiles_of(program: Sequence[str], kinds: Sequence[str]) -> dict[str, Profile]:
    """Run a program until its first model is compiled, and return a profile for each kind of machine.

    The program trains nothing. Its weights have no values, and take no memory; if it fails, it runs again
    with values.

    Raises:
        ProfileError: the program ended before it compiled a model
    """
    code = 0
    for more in ({}, {"values": True}):
        if more:
            said = "the program failed while its weights had no values; again, with values"
            print(f"popvision: {said}", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            wish = json.dumps({"folder": folder, "kinds": list(kinds), **more})
            # Its output goes to standard error, since another program may read the plan on standard output.
            code = subprocess.run(
                [sys.executable, *program], env={**os.environ, PLAN_WISH: wish}, stdout=2, check=False
            ).returncode
            found = {kind: Path(folder) / f"{kind}.pop" for kind in kinds}
            if all(path.exists() for path in found.values()):
                return {kind: load(path) for kind, path in found.items()}
        if not code:
            break
    raise ProfileError(
        f"{' '.join(program)} compiled no model (it ended with {code})\n"
        "  fix: call an executor, or its compile(...), in that program"
    )


def estimate(profile: Profile, machine: Machine, replicas: int, micro_batches: int) -> Estimate:
    """Return the estimate of a plan on a machine; `micro_batches`: of each replica in a step."""
    counts, memory = profile.counts, memory_of(profile)
    problems = []
    if any(None in kinds.values() for kinds in memory.values()):
        problems.append("a kernel needs memory of a size that only it knows")
    loaded = micro_batches * sum(part.bytes for part in profile.parts if part.kind == "load")
    if machine.kind == "here":
        taken, bubble, spent = _seconds_here(profile, replicas, micro_batches)
        problems += _problems_here(profile, memory, replicas, loaded)
    else:
        taken, bubble, spent = _seconds_apart(profile, machine, replicas, micro_batches)
        problems += _problems_apart(profile, memory, machine, replicas)
        if loaded / machine.host > taken:  # a replica's rows reach its first ipu
            taken = spent["host input"] = loaded / machine.host
    groups = replicas if counts.get("groups", 1) == counts.get("replicas", 1) else counts.get("groups", 1)
    items = counts.get("micro_batch_size", 1) * micro_batches * groups / taken
    return Estimate(machine, replicas, micro_batches, taken, items, bubble, spent, memory, tuple(problems))


def memory_of(profile: Profile) -> dict[int, dict[str, Any]]:
    """Return the bytes of each ipu by kind; None for a number that only a kernel knows."""
    facts, unknown = profile.facts, [None] * len(profile.memory)
    found = {}
    for number, row in enumerate(profile.memory):
        waiting = facts.get("activations", unknown)[number], facts.get("between", unknown)[number] or 0
        sizes = (row.weights + row.buffers, row.gradients, row.optimizer, *waiting, 0)
        found[row.ipu] = dict(zip(KINDS, sizes, strict=True))
    return found


def _seconds_apart(
    profile: Profile, machine: Machine, replicas: int, micro_batches: int
) -> tuple[float, float, Spent]:
    """Return a step's seconds on separate devices, its bubble, and the busiest ipu's seconds by category."""
    costs = Costs(profile, machine, replicas)
    step = costs.step(micro_batches)
    length = virtual.apart(step)
    busiest = max(costs.of_ipus(micro_batches).values(), key=lambda spent: sum(spent.values()))
    return length / 1e9, step.bubble(length), busiest


def _problems_apart(
    profile: Profile, memory: dict[int, dict[str, Any]], machine: Machine, replicas: int
) -> Iterator[str]:
    """Yield why a plan fails on separate devices; put their code and optimizer state into `memory`."""
    facts, chips = profile.facts, len(profile.devices) * replicas
    if chips > machine.chips:
        yield f"needs {chips} chips, and has {machine.chips}"
    for ipu, kinds in memory.items():
        if facts.get("shards_optimizer"):
            kinds["optimizer"] = -(-kinds["optimizer"] // replicas)
        if facts.get("optimizer_off_chip"):
            kinds["optimizer"] = 0
        kinds["code"] = round(machine.code)
        if (needed := total_bytes(kinds)) > machine.memory:
            yield f"ipu {ipu} needs up to {size(needed)}, and has {size(machine.memory)}"


# ---- this machine ----------------------------------------------------------------------------------------


def _seconds_here(profile: Profile, replicas: int, micro_batches: int) -> tuple[float, float, Spent]:
    """Return a step's seconds on this host, the idle share of its cores, and a core's rough seconds by
    category. Measured steps are extrapolated (idle share: 0); else a step is simulated."""
    measured, cores, spent = profile.facts["measured"], profile.facts.get("threads", 1), Spent(float)
    for operation in profile.operations:  # to see which of both takes more of a core's time
        spent["compute"] += operation.flops / CORE_FLOPS
        spent["memory bandwidth"] += operation.bytes / CORE_BYTES
    if "steps" in measured:
        return _seconds_on_line(measured["steps"], micro_batches * replicas), 0.0, spent
    costs = dict.fromkeys(((phase, stage) for phase in "FB" for stage in range(len(profile.ipus))), 0.0)
    for piece, took in zip(profile.pieces, measured["pieces"], strict=True):
        costs[piece.phase, piece.stage] += took * 1e9
    step = virtual.StepModel.of(
        profile,
        costs,
        updates={ipu: 1e9 * t for ipu, t in zip(profile.devices, measured["updates"], strict=True)},
        micro_batches=micro_batches,
        replicas=replicas,
        sharing={count: (low, high) for count, low, high in measured["sharing"]},
    )
    found, work = virtual.here(step, cores), step.work_ns * replicas
    taken = work if found is None else found
    return taken / 1e9, max(0.0, 1 - work / (taken * cores)), spent


def _problems_here(
    profile: Profile, memory: Mapping[int, Mapping[str, Any]], replicas: int, loaded: int
) -> Iterator[str]:
    """Yield why a plan fails on this host; `loaded`: the bytes of a replica's rows in a step."""
    facts, by_ipu = profile.facts, memory.values()
    # The host's module has a copy of the weights; `base`: memory of a process and its libraries.
    kept = facts["base"] + sum(2 * kinds["weights"] + kinds["optimizer"] for kinds in by_ipu)
    # In depth-first order up to twice as many micro-batches wait as on separate devices.
    each = sum(kinds["gradients"] + 2 * (kinds["activations"] or 0) + kinds["between"] for kinds in by_ipu)
    each += 2 * loaded * profile.counts.get("iterations", 1)  # the loader holds those of the next call, too
    wanted = kept * facts.get("processes", 1) + replicas * each
    if wanted > facts["available"]:
        yield f"needs {size(wanted)}, and {size(facts['available'])} are free"


def _seconds_on_line(rows: Sequence[Sequence[float]], micro_batches: int) -> float:
    """Return the seconds of a step, by the line through two measurements; with one, in proportion to it. For
    fewer micro-batches than the first measurement has: the larger of both.

    Args: rows: one or two pairs (micro-batches, seconds)
    """
    first, taken = rows[0]
    in_proportion = taken * micro_batches / first
    if len(rows) == 1:
        return in_proportion
    each = max(0.0, rows[1][1] - taken) / (rows[1][0] - first)
    on_line = taken + each * (micro_batches - first)
    return max(in_proportion, on_line) if micro_batches < first else on_line
