"""Estimates: the time and memory that a planned program needs on a machine."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from popengine.order import ORDERS
from popengine.profile import Profile, ProfileError

from . import virtual
from .costs import CATEGORIES, Costs
from .machine import Machine
from .memory import IpuMemory, memory_needs
from .units import seconds_text, share_text, size_text, three_digits


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
        step, needs = costs.step, _simulated_needs(profile, costs.rows, accumulation)  # of a replica
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


def _simulated_needs(profile: Profile, rows: Mapping[int, float], micro_batches: int) -> list[IpuMemory]:
    """Return the memory of each ipu of a replica in a simulated step, given the ns of one run of each row."""
    step = virtual.StepModel.of(profile, rows, updates={}, micro_batches=micro_batches)
    return memory_needs(profile, virtual.runs_on_devices(profile, step, rows))


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
