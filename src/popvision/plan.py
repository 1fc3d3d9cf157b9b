"""Plans: the time of an update, the throughput and the memory of a program on machines that need not be there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from popengine.profile import CORE_BYTES, CORE_FLOPS, PLAN_WISH, Profile, ProfileError, load

from . import virtual
from .changes import changes
from .costs import CATEGORIES, Costs, Spent, costs_on
from .machine import Machine
from .machine import machine as bow
from .units import seconds, share, size, table

KINDS = ("weights", "gradients", "optimizer", "activations", "between", "code")
_HEAD = [
    *("machine", "replicas", "micro-batches", "items/s"),
    *("an update", "bubble", "bound by", "largest ipu", ""),
]


def total(kinds: Mapping[str, int | None]) -> int:
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
    def bound_by(self) -> str:
        return max(CATEGORIES, key=lambda category: self.spent[category])

    @property
    def memory_per_ipu(self) -> list[int]:
        return [total(kinds) for kinds in self.memory.values()]

    def to_dict(self) -> dict[str, Any]:
        """Return an entry of `popvision plan --json`."""
        return {
            "machine": self.machine.name,
            "items_per_second": self.items_per_second,
            "seconds_per_update": self.seconds_per_update,
            "memory_per_ipu": self.memory_per_ipu,
            "fits": not self.problems,
            "bound_by": self.bound_by,
        }

    def in_words(self) -> list[str]:
        """Return this estimate's cells in `Estimates.table`."""
        return [
            self.machine.name,
            str(self.replicas),
            str(self.accumulation),
            f"{self.items_per_second:,.1f}",
            seconds(self.seconds_per_update),
            share(self.bubble),
            self.bound_by,
            size(max(self.memory_per_ipu, default=0)),
            "DOES NOT FIT: " + "; ".join(self.problems) if self.problems else "fits",
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
            found += sorted(choices, key=lambda one: (bool(one.problems), -one.items_per_second))
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
        return machine, profile, costs_on(profile, machine, profile.counts.get("replicas", 1))

    def advice(self) -> list[str]:
        """Return sentences about what bounds a step on the machine of `drawn`, and what makes it faster."""
        machine, profile, costs = self.drawn
        micro_batches = profile.facts["schedule_micro_batches"]
        loads = {ipu: sum(costs.of_ipu(profile, ipu, micro_batches).values()) for ipu in profile.devices}
        slowest, mean = max(loads, key=lambda ipu: loads[ipu]), sum(loads.values()) / len(loads)
        step = costs.step(profile, micro_batches)
        return [
            f"ipu {slowest} has the most to do: {loads[slowest] / (mean or 1):.2f} times the average ipu."
            f" On {machine.name} ipus wait {step.bubble(virtual.apart(step)):.0%} of the time."
        ] + [
            f"{change.what} would make it {change.apart:.2f} times as fast there. Then {change.also}."
            for change in changes(profile, step, 0.0)
            if change.apart > 1.03
        ]

    def table(self) -> list[list[str]]:
        """Return a row of column names, and a row of cells for each estimate."""
        return [_HEAD, *(one.in_words() for one in self.estimates)]

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
        if not more:
            print(
                "popvision: the program failed while its weights had no values; again, with values",
                file=sys.stderr,
            )
    raise ProfileError(
        f"{' '.join(program)} compiled no model (it ended with {code})\n"
        "  fix: call an executor, or its compile(...), in that program"
    )


def estimate(profile: Profile, machine: Machine, replicas: int, micro_batches: int) -> Estimate:
    """Return the estimate of a plan on a machine; `micro_batches`: of each replica in a step."""
    if machine.kind == "here":
        return _here(profile, machine, replicas, micro_batches)
    costs = costs_on(profile, machine, replicas)
    step = costs.step(profile, micro_batches)
    loads = [costs.of_ipu(profile, ipu, micro_batches) for ipu in profile.devices]
    spent = max(loads, key=lambda load: sum(load.values()))
    length = virtual.apart(step)
    taken = length / 1e9
    from_host = (
        micro_batches * sum(part.bytes for part in profile.parts if part.kind == "load") / machine.host
    )
    if from_host > taken:  # a replica's rows reach its first ipu
        taken, spent["host input"] = from_host, from_host
    facts, memory = profile.facts, memory_of(profile)
    problems = _unknown(memory)
    chips = len(profile.devices) * replicas
    if chips > machine.chips:
        problems.append(f"needs {chips} chips, and has {machine.chips}")
    for number, (ipu, kinds) in enumerate(memory.items()):
        if facts.get("shards_optimizer"):
            kinds["optimizer"] = -(-kinds["optimizer"] // replicas)
        if facts.get("optimizer_off_chip"):
            kinds["optimizer"] = 0
        kinds["code"] = round(machine.code)
        # The most that can wait, whatever the order of the ipus' instructions in time.
        most = facts["between_most"][number] if "between_most" in facts else kinds["between"]
        needed = total({**kinds, "between": most})
        if needed > machine.memory:
            problems.append(f"ipu {ipu} needs up to {size(needed)}, and has {size(machine.memory)}")
    items = _items(profile, replicas, micro_batches) / taken
    return Estimate(
        machine, replicas, micro_batches, taken, items, step.bubble(length), spent, memory, tuple(problems)
    )


def _items(profile: Profile, replicas: int, micro_batches: int) -> int:
    """Return the number of rows in a step, over all instances."""
    counts = profile.counts
    groups = replicas if counts.get("groups", 1) == counts.get("replicas", 1) else counts.get("groups", 1)
    return counts.get("micro_batch_size", 1) * micro_batches * groups * counts.get("instances", 1)


def memory_of(profile: Profile) -> dict[int, dict[str, Any]]:
    """Return the bytes of each ipu by kind; None for a number that only a kernel knows."""
    facts, unknown = profile.facts, [None] * len(profile.memory)
    found = {}
    for number, row in enumerate(profile.memory):
        waiting = facts.get("activations", unknown)[number], facts.get("between", unknown)[number] or 0
        sizes = (row.weights + row.buffers, row.gradients, row.optimizer, *waiting, 0)
        found[row.ipu] = dict(zip(KINDS, sizes, strict=True))
    return found


def _unknown(memory: Mapping[int, Mapping[str, int | None]]) -> list[str]:
    """Return a list of one problem, if a number of bytes is unknown (None); else an empty list."""
    is_unknown = any(None in kinds.values() for kinds in memory.values())
    return ["a kernel needs memory of a size that only it knows"] if is_unknown else []


# ---- this machine ----------------------------------------------------------------------------------------


def _here(profile: Profile, machine: Machine, replicas: int, micro_batches: int) -> Estimate:
    facts, measured = profile.facts, profile.facts["measured"]
    cores = facts.get("threads", 1)
    spent = Spent(float)
    for operation in profile.operations:  # to see which of both takes more of a core's time
        spent["compute"] += operation.flops / CORE_FLOPS
        spent["memory bandwidth"] += operation.bytes / CORE_BYTES
    if "steps" in measured:
        taken, bubble = _line(measured["steps"], micro_batches * replicas), 0.0
    else:
        step = _step_here(profile, measured, replicas, micro_batches)
        found = virtual.here(step, cores)
        taken = (found if found is not None else step.work * replicas) / 1e9
        bubble = max(0.0, 1 - step.work * replicas / 1e9 / (taken * cores))
    memory = memory_of(profile)
    state = sum(kinds["weights"] + kinds["optimizer"] for kinds in memory.values())
    # In depth-first order up to twice as many micro-batches wait as on separate devices.
    each = sum(kinds["gradients"] + 2 * (kinds["activations"] or 0) for kinds in memory.values())
    each += sum(facts.get("between_most") or [0])
    rows = sum(part.bytes for part in profile.parts if part.kind == "load") * micro_batches
    each += 2 * rows * profile.counts.get("iterations", 1)  # the loader holds those of the next call, too
    # The host's module has a copy of the weights; `base`: memory of the process and its libraries.
    wanted = state + sum(kinds["weights"] for kinds in memory.values()) + replicas * each + facts["base"]
    problems = _unknown(memory)
    if wanted > facts["available"]:
        problems.append(f"needs {size(wanted)}, and {size(facts['available'])} are free")
    items = _items(profile, replicas, micro_batches) / taken
    return Estimate(machine, replicas, micro_batches, taken, items, bubble, spent, memory, tuple(problems))


def _line(rows: Sequence[Sequence[float]], micro_batches: int) -> float:
    """Return the seconds of a step, by the line through two measurements; with one, in proportion to it.

    Args: rows: one or two pairs (micro-batches, seconds)
    """
    (first, taken), *more = rows
    if not more:
        return taken * micro_batches / first
    ((second, longer),) = more
    each = max(0.0, longer - taken) / (second - first)
    return max(
        taken * micro_batches / first if micro_batches < first else 0.0,
        taken + each * (micro_batches - first),
    )


def _step_here(
    profile: Profile, measured: Mapping[str, Any], replicas: int, micro_batches: int
) -> virtual.StepModel:
    stages = range(len(profile.ipus))
    spent = {(phase, stage): 0.0 for stage in stages for phase in "FB"}
    for piece, taken in zip(profile.pieces, measured["pieces"], strict=True):
        spent[piece.phase, piece.stage] += taken * 1e9
    return virtual.StepModel(
        profile.ipus,
        tuple(spent["F", stage] for stage in stages),
        tuple(spent["B", stage] for stage in stages) if profile.training else (),
        {ipu: taken * 1e9 for ipu, taken in zip(profile.devices, measured["updates"], strict=True)},
        micro_batches,
        replicas,
        profile.facts.get("mode") != "pipelined",
        sharing={count: (low, high) for count, low, high in measured["sharing"]},
    )
