"""Estimates: the time and memory that a planned program needs on a machine."""

from dataclasses import replace
from typing import Any

from popengine.order import ORDERS
from popengine.profile import Profile, ProfileError

from . import virtual
from .costs import CATEGORIES, Costs
from .machine import Machine
from .memory import Need, memory_needs
from .units import seconds_text, share_text, size_text, three_digits


class Estimate:
    """The estimated time and memory of a program on a machine.

    Args:
        profile: a plan, as `compile_profiles` returns it
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
        self.costs = Costs(profile, machine, replicas, accumulation)
        ns = virtual.simulated_ns(self.costs.step)
        taken, self.bubble = ns / 1e9, self.costs.step.bubble(ns)  # the share of time in which the ipus wait
        # Seconds of the busiest ipu, by category.
        self.spent = max(self.costs.by_ipu.values(), key=lambda spent: sum(spent.values())).copy()
        # A chip has its program, and of the optimizer's state only what the options keep there.
        shards = replicas if profile.facts.get("shards_optimizer") else 1
        is_on_chip = not profile.facts.get("optimizer_off_chip")
        needs = memory_needs(profile)  # of a replica
        needs = [replace(need, optimizer=is_on_chip * -(-need.optimizer // shards)) for need in needs]
        # Bytes that each ipu holds at most, by kind.
        self.memory = {f"ipu {need.ipu}": _held(need) | {"program": round(machine.code)} for need in needs}
        self.memory_per_ipu = [sum(kinds.values()) for kinds in self.memory.values()]
        self.problems: list[str] = []  # reasons why the program would fail on the machine; empty: it fits
        if any(need.activations is None for need in needs):
            self.problems.append("a kernel needs memory of a size that only it knows")
        if (chips := len(needs) * replicas) > machine.chips:
            self.problems.append(f"needs {chips} chips, and has {machine.chips}")
        loaded = accumulation * sum(part.bytes for part in profile.instructions if part.kind == "load")
        if loaded / machine.host > taken:  # a replica's rows reach its first ipu
            taken = self.spent["host input"] = loaded / machine.host
        needed, name = max((sum(kinds.values()), name) for name, kinds in self.memory.items())
        if needed > machine.memory:
            has = f"{size_text(machine.memory)} available"
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
        return {"name": self.choice, "fits": self.fits, "limit": self.machine.memory, "needs": needs}

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


def _held(need: Need) -> dict[str, int]:
    """Return the bytes that an ipu holds, by kind."""
    return {
        "weights": need.weights + need.buffers,
        "gradients": need.gradients,
        "optimizer": need.optimizer,
        "activations": need.activations or 0,
        "between": need.between,
    }
