"""Plans: estimates of a program's speed and memory on machines that may be absent."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from popengine.environment import PLAN_WISH
from popengine.order import ORDERS
from popengine.profile import Profile, ProfileError, load
from popengine.texts import table_text

from . import times, virtual
from .analysis import operation_sums
from .machine import CATEGORIES, Costs, Machine
from .memory import IpuMemory, memory_needs
from .report import step_data, viewer_page
from .units import layout_text, seconds_text, share_text, size_text, three_digits

_DRAWN = 600  # actions; in a wider picture they are too small to see


class Estimate:
    """The estimated time and memory of a program on a machine.

    Args:
        profile: a plan, as `compile_profiles` returns it for this kind of machine
        accumulation: micro-batches of a step and replica
    """

    def __init__(self, profile: Profile, machine: Machine, replicas: int, accumulation: int) -> None:
        if (order := profile.facts["mode"]) not in ORDERS:
            raise ProfileError(
                f"the schedule {order!r} is known to the program that made it only\n"
                "  fix: make the plan in that program: poptorch.plan(model, options, batch)"
            )
        self.profile, self.machine = profile, machine
        self.replicas, self.accumulation = replicas, accumulation
        self.problems: list[str] = []  # reasons why the program would fail on the machine; empty: it fits
        if not profile.facts.get("sizes_known", True):
            self.problems.append("a kernel needs memory of a size that only it knows")
        facts, measured = profile.facts, profile.facts.get("measured", {})
        self.costs = costs = Costs(
            profile, replace(machine, **measured.get("rates", {})), replicas, accumulation
        )
        step = costs.step  # of a replica
        in_order = replace(step, updates={}, keeps_order=True)
        needs = memory_needs(profile, virtual.runs_on_devices(profile, in_order, costs.rows))
        loaded = accumulation * sum(part.bytes for part in profile.instructions if part.kind == "load")
        # Seconds by category of the busiest ipu.
        self.spent = max(costs.by_ipu.values(), key=lambda spent: sum(spent.values())).copy()
        # Bytes by kind of what each memory holds at most, and the bytes that it can hold.
        self.memory: dict[str, dict[str, int]]
        self.capacity: float
        if machine.kind == "here":
            step = replace(step, replicas=replicas, cores=facts.get("threads", 1))
            processes = facts.get("processes", 1)
            held = _held(needs, processes, replicas)
            held["activations"] *= 2  # in depth-first order up to twice as many micro-batches wait
            held["program"] = processes * facts["base"]  # a process and its libraries
            # The loader also holds the rows of the next call.
            held["inputs"] = replicas * 2 * loaded * profile.counts.get("iterations", 1)
            self.memory = {"the program": held}
            self.capacity = facts["available"]
            self.memory_per_ipu = [need.total for need in needs]
        else:
            # A chip has its program, and of the optimizer's state only what the options keep there.
            shards = replicas if facts.get("shards_optimizer") else 1
            is_on_chip = not facts.get("optimizer_off_chip")
            needs = [replace(need, optimizer=is_on_chip * -(-need.optimizer // shards)) for need in needs]
            code = {"program": round(machine.code)}
            self.memory = {f"ipu {need.ipu}": _held([need]) | code for need in needs}
            self.capacity = machine.memory
            self.memory_per_ipu = [sum(kinds.values()) for kinds in self.memory.values()]
            if (chips := len(needs) * replicas) > machine.chips:
                self.problems.append(f"needs {chips} chips, and has {machine.chips}")
        # `bubble`: share of time in which the ipus (on this host: the cores) wait.
        if "steps" in measured:
            taken, self.bubble = _extrapolated_seconds(measured["steps"], accumulation * replicas), 0.0
        else:
            ns = virtual.simulated_ns(step)
            taken, self.bubble = ns / 1e9, step.bubble(ns)
        if loaded / machine.host > taken:  # a replica's rows reach its first ipu
            taken = self.spent["host input"] = loaded / machine.host
        needed, name = max((sum(kinds.values()), name) for name, kinds in self.memory.items())
        if needed > self.capacity:
            has = f"{size_text(self.capacity)} available"
            self.problems.append(f"{name} needs up to {size_text(needed)}, with {has}")
        counts = profile.counts
        # With a group for each replica, other numbers of replicas have as many groups.
        groups = counts.get("groups", 1)
        groups = replicas if groups == counts.get("replicas", 1) else groups
        self.fits = not self.problems
        self.bound_by = max(CATEGORIES, key=lambda category: self.spent[category])
        self.seconds_per_update = taken
        self.items_per_second = counts.get("micro_batch_size", 1) * accumulation * groups / taken

    @property
    def choice(self) -> str:
        """Return the machine, and the numbers of replicas and micro-batches, in words."""
        return f"{self.machine.name}, replicas: {self.replicas}, micro-batches: {self.accumulation}"

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as `popvision plan --json` prints it."""
        own = ("items_per_second", "seconds_per_update", "memory_per_ipu", "fits", "bound_by")
        return {"machine": self.machine.name, **{name: getattr(self, name) for name in own}}

    def memory_entry(self) -> dict[str, Any]:
        """Return what each memory holds, and its limit, as a dictionary for the page's scripts."""
        needs = [{"name": name, "total": sum(kinds.values()), **kinds} for name, kinds in self.memory.items()]
        return {"name": self.choice, "fits": self.fits, "limit": self.capacity, "needs": needs}

    def table_row(self) -> dict[str, str]:
        """Return the estimate's row of `Estimates.table`: texts with units, by column name."""
        return {
            "machine": self.machine.name,
            "replicas": str(self.replicas),
            "micro-batches": str(self.accumulation),
            "fits": "yes" if self.fits else "NO",
            "items/s": three_digits(self.items_per_second),
            "an update": seconds_text(self.seconds_per_update),
            "bubble": share_text(self.bubble),
            "bound by": self.bound_by,
            "largest ipu": size_text(max(self.memory_per_ipu, default=0)),
        }


def _held(needs: Sequence[IpuMemory], processes: int = 1, replicas: int = 1) -> dict[str, int]:
    """Return the bytes of ipus that share a memory, by kind."""
    return {
        "weights": processes * sum(need.weights + need.buffers for need in needs),
        "gradients": replicas * sum(need.gradients for need in needs),
        "optimizer": processes * sum(need.optimizer for need in needs),
        "activations": replicas * sum(need.activations or 0 for need in needs),
        "between": replicas * sum(need.between for need in needs),
    }


def _extrapolated_seconds(rows: Sequence[Sequence[float]], micro_batches: int) -> float:
    """Return the seconds of a step from one or two measured (micro-batches, seconds): in proportion, or by a
    line; for fewer micro-batches than measured the larger of both numbers."""
    first, taken = rows[0]
    in_proportion = taken * micro_batches / first
    if len(rows) == 1:
        return in_proportion
    each = max(0.0, rows[1][1] - taken) / (rows[1][0] - first)
    on_line = taken + each * (micro_batches - first)
    return max(in_proportion, on_line) if micro_batches < first else on_line


class Estimates:
    """An estimate of a program for each machine and combination of `replicas` and `accumulation`, machine by
    machine; the estimates of a machine begin with the best.

    Args:
        profiles: by kind of machine, as `compile_profiles` returns them
        replicas, accumulation: numbers to compare; empty: the program's own number

    Attributes:
        estimates: a list of objects with `machine` (its `name`, ...), `replicas`, `accumulation`, `items_per_second`,
            `seconds_per_update`, `memory_per_ipu` (bytes), `fits`, `problems` (why it does not fit), `bound_by`
    """

    def __init__(
        self,
        profiles: Mapping[str, Profile],
        machines: Iterable[Machine],
        replicas: Sequence[int] = (),
        accumulation: Sequence[int] = (),
    ) -> None:
        self.estimates: list[Estimate] = []
        for machine in machines:
            profile = profiles[machine.kind]
            choices = [
                Estimate(profile, machine, count, micro_batches)
                for count in replicas or [profile.counts.get("replicas", 1)]
                for micro_batches in accumulation or [profile.facts["schedule_micro_batches"]]
            ]
            self.estimates += sorted(choices, key=lambda one: (not one.fits, -one.items_per_second))

    def to_json(self) -> str:
        """Return the estimates as a JSON list, as `popvision plan --json` prints it."""
        return json.dumps([one.to_dict() for one in self.estimates], indent=1)

    def save(self, path: str | Path) -> None:
        """Write an HTML page to the file `path`: machines, advice, memory, and the step of the estimate `drawn`."""
        drawn = self.drawn
        shown = drawn or self.estimates[0]
        plan = {
            "table": self.table(),
            "advice": self.advice(),
            "drawn": drawn and drawn.machine.name,
            "memory": [one.memory_entry() for one in self.estimates],
        }
        page = viewer_page(f"Plan: {layout_text(shown.profile)}", [_step_entry(shown)], plan=plan)
        Path(path).write_text(page)

    @property
    def drawn(self) -> Estimate | None:
        """Return the estimate whose step the page draws: the first one on a machine with a chip per ipu,
        preferably one that fits. Return None without such a machine."""
        apart = [one for one in self.estimates if one.machine.kind == "apart"]
        return next((one for one in apart if one.fits), apart[0] if apart else None)

    def advice(self) -> list[str]:
        """Return sentences: why each estimate that does not fit fails; then, if the estimate `drawn` fits, its
        busiest ipu, and each change that makes a step at least 3 % faster."""
        too_large = [_too_large_sentence(one) for one in self.estimates if not one.fits]
        return too_large + (self._speed_advice(self.drawn) if self.drawn and self.drawn.fits else [])

    def _speed_advice(self, drawn: Estimate) -> list[str]:
        costs = drawn.costs
        loads = {ipu: sum(spent.values()) for ipu, spent in costs.by_ipu.items()}
        slowest, mean = max(loads, key=lambda ipu: loads[ipu]), fmean(loads.values())
        return [
            f"ipu {slowest} has the most to do, {loads[slowest] / (mean or 1):.2f} times the mean of all ipus."
            f" On {drawn.machine.name} ipus wait {drawn.bubble:.0%} of the time."
        ] + [
            f"With {change.what}, a step is {change.apart:.2f} times as fast there. Then {change.also}."
            for change in virtual.advised_changes(costs.profile, costs.step, 0.0)
            if change.apart > 1.03
        ]

    def table(self) -> list[list[str]]:
        """Return a table of all estimates: a row of column names, then a row for each estimate."""
        rows = [one.table_row() for one in self.estimates]
        return [[*rows[0]], *([*row.values()] for row in rows)]

    def __str__(self) -> str:
        return "\n".join([table_text(self.table()), *self.advice()])

    __repr__ = __str__


def _too_large_sentence(one: Estimate) -> str:
    less = 'recomputation (options._Popart.set("autoRecomputation", 3)) and a smaller micro-batch'
    if one.machine.kind == "apart":
        place = "options.TensorLocations.setOptimizerLocation(poptorch.TensorLocationSettings()"
        less += f", more stages, and optimizer state off chip ({place}.useOnChipStorage(False)))"
    return f"{one.choice} does not fit: {'; '.join(one.problems)}. Less memory is needed with {less}."


def _step_entry(one: Estimate) -> dict[str, Any]:
    """Return the profile of an estimate's step, and its figures, as a dictionary for the page's scripts."""
    if one.machine.kind == "here":
        return step_data(one.profile, [], {}, {"stages": []})
    profile, step, rows = one.costs.profile, one.costs.step, one.costs.rows
    runs = virtual.runs_on_devices(profile, step, rows, most=_DRAWN)
    stages = times.stage_times(profile, rows, step.updates)
    usages = times.ipu_usages(stages, one.accumulation, virtual.simulated_ns(step))
    figures = {"stages": stages, "device_usages": usages, "stages_say": one.machine.description}
    # The schedule of a plan has other micro-batches than its step.
    facts = profile.facts | {"schedule_micro_batches": one.accumulation}
    return step_data(
        replace(profile, schedule=(), tensors=(), facts=facts), runs, operation_sums(profile), figures
    )


def compile_profiles(program: Sequence[str], kinds: Sequence[str]) -> dict[str, Profile]:
    """Run a program until its first model is compiled, and return a profile of the model by kind of machine.
    The model is not trained.

    Args:
        program: the path of a Python file, and its arguments
        kinds: kinds of machines: "apart" or "here"
    Raises: ProfileError, if there is no such file, or the program ended before it compiled a model
    """
    if not Path(program[0]).is_file():
        raise ProfileError(f"there is no file {program[0]}\n  fix: popvision plan [OPTIONS] PROGRAM.py")
    with tempfile.TemporaryDirectory() as folder:
        wish = json.dumps({"folder": folder, "kinds": kinds})
        # Its output goes to standard error, since another program may read the plan on standard output.
        code = subprocess.run(
            [sys.executable, *program], env={**os.environ, PLAN_WISH: wish}, stdout=2, check=False
        ).returncode
        if not code and (paths := sorted(Path(folder).glob("*.pop"))):
            return {path.stem: load(path) for path in paths}
    if code:
        own = [word for word in program[1:] if word in ("--output", "--replicas", "--accumulation", "--json")]
        fix = f"\n  fix: {', '.join(own)} before {program[0]}, where popvision's own options are"
        said = f"{program[0]} failed before it compiled a model (exit code {code}): see above"
        raise ProfileError(said + fix * (code == 2 and bool(own)))
    raise ProfileError(
        f"{program[0]} ended before it compiled a model\n"
        "  fix: call an executor, or its compile(...), in that program"
    )
