"""Simulation of a step: how long it takes with measured costs, on one of two kinds of machine.

    apart    separate devices: each ipu does one thing at a time, in the order of the schedule
    here     a host: its cores share all ipus, and take the earliest micro-batch that can go on

To find what a change of the program gains, a changed `StepModel` is simulated and compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from popengine.order import ORDERS, Action, After, Timeline, step_duration, timeline
from popengine.profile import Profile

from . import memory

WORTH_SHARING = 1e5  # ns of an average task; if tasks are shorter, the engine runs all of them on one core
_DOUBTFUL = 1.4  # factor around WORTH_SHARING within which the engine may use one core or several
_MOST_TASKS = 6_000  # for a longer step two shorter ones are simulated, and their lengths extrapolated
_LEAST = 0.05  # smallest gain that is promised: two measurements of one program differ by as much
_SAFETY = 0.75  # share of a simulated gain that is promised; caches and memory may take the rest

PhaseCosts = Mapping[tuple[str, int], float]  # ns of one micro-batch, by (phase, stage)


@dataclass(frozen=True)
class StepModel:
    """The computations of a step, their costs in ns, and the rules for their order."""

    actions: tuple[Action, ...]  # the computations of a micro-batch, each of which waits for the one before
    costs: tuple[float, ...]  # ns of each action
    updates: Mapping[int, float]  # ns of the weight update, by ipu
    micro_batches: int  # of a replica
    replicas: int = 1
    mode: str = "1f1b"  # a key of `popengine.order.ORDERS`
    between: float = 0.0  # ns between two tasks of a host's core
    fixed: float = 0.0  # ns that a call on a host spends outside its steps, for each step
    # By number of cores: the lowest and the highest measured speed of these cores together, relative to one core.
    sharing: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    keeps_order: bool = True  # on separate devices: whether each ipu runs its program in a fixed order

    @classmethod
    def of(cls, profile: Profile, costs: PhaseCosts, ordered: Collection[int] = (), **more: Any) -> StepModel:
        """Return the model of a profile's step.

        Args:
            ordered: the stages whose forwards must run in the order of the micro-batches
            more:    fields of the model that the profile does not give
        """
        stages = range(len(profile.ipus))
        phases = [("F", i) for i in stages] + [("B", i) for i in reversed(stages) if profile.training]
        actions = []
        for row, (phase, stage) in enumerate(phases):
            after = [After(row - 1)] if row else []
            after += [After(row, 1)] if phase == "F" and stage in ordered else []
            actions.append(Action(phase, stage, profile.ipus[stage], tuple(after)))
        mode = profile.facts.get("mode", "sharded")
        return cls(tuple(actions), tuple(costs[key] for key in phases), mode=mode, **more)

    @property
    def tasks(self) -> list[int]:
        """Return the number of tasks of each action: a backward and its gradient sum are two."""
        return [1 + (action.phase == "B") for action in self.actions]

    @property
    def work_ns(self) -> float:
        """Return the ns of all computations and weight updates of a replica in a step."""
        return self.micro_batches * sum(self.costs) + sum(self.updates.values())

    @property
    def task_count(self) -> int:
        """Return the number of tasks of a replica in a step. An update without a cost is no task."""
        return sum(self.tasks) * self.micro_batches + sum(map(bool, self.updates.values()))

    def bubble(self, length: float) -> float:
        """Return the share of time in which the ipus wait, in a step of `length` ns on separate devices."""
        ipus = {action.ipu for action in self.actions}
        return max(0.0, 1 - self.work_ns / (length * len(ipus))) if length else 0.0


def ns_on_host(step: StepModel, cores: int, least_task: float = WORTH_SHARING) -> tuple[float, ...]:
    """Return the ns of a step on a host whose cores share all ipus: at the lowest and at the highest measured
    speed of so many cores together. Return () if that speed was not measured.

    Args: least_task: ns; if the average task is not longer, one core runs all tasks
    """
    if cores == 1 or step.work_ns <= least_task * step.task_count:
        return ((step.work_ns + step.task_count * step.between) * step.replicas + step.fixed,) * 2
    return tuple(
        step.fixed + simulated_ns(step, cores, [1 + (speed - 1) * n / (cores - 1) for n in range(cores)])
        for speed in step.sharing.get(cores, ())
    )


def speedup_on_host(step: StepModel, other: StepModel, cores: int) -> float | None:
    """Return how many times as fast per row of data `other` is as `step` on a host; None if the speed of so
    many cores together was not measured.

    It is the smallest of four simulated speedups, since it is not sure whether the engine uses one core or
    all, nor how fast the cores are together.
    """
    rows, found = other.micro_batches * other.replicas / (step.micro_batches * step.replicas), []
    for factor in (1 / _DOUBTFUL, _DOUBTFUL):
        before, after = (ns_on_host(one, cores, factor * WORTH_SHARING) for one in (step, other))
        if not before or not after:
            return None
        found += [rows * ns / changed if changed else 1.0 for ns, changed in zip(before, after, strict=True)]
    return min(found)


def _stretched_length(found: Timeline, speed: Sequence[float]) -> float:
    """Return the length of a timeline after it is stretched because cores slow each other down: n busy cores
    together are only `speed[n - 1]` times as fast as one core."""
    changes = sorted([(start, 1) for start in found.starts] + [(end, -1) for end in found.ends])
    length, busy, before = 0.0, 0, 0.0
    for time, change in changes:
        if busy:
            length += (time - before) * busy / speed[busy - 1]
        busy, before = busy + change, time
    return length


def simulated_ns(step: StepModel, cores: int = 0, speed: Sequence[float] = ()) -> float:
    """Return the ns of a step, simulated by `simulate_step`. A long step is extrapolated from two short ones.

    Args: speed: as in `_stretched_length`; empty: n cores are n times as fast as one
    """

    def run(micro_batches: int) -> float:
        found = simulate_step(replace(step, micro_batches=micro_batches), cores)[1]
        return _stretched_length(found, speed) if speed else found.length

    return step_duration(step.actions, step.micro_batches, run, _MOST_TASKS // step.replicas)


def simulate_step(step: StepModel, cores: int = 0) -> tuple[list[tuple[int, int]], Timeline]:
    """Return the tasks of a step, each as (index in `step.actions`, micro-batch), and their timeline. The
    last entries of the timeline are the weight updates, which are not in the list of tasks.

    Args: cores: the number of cores that share the ipus of all replicas; 0: an ipu is a device (1 replica)
    """
    between, replicas = (step.between, step.replicas) if cores else (0.0, 1)
    costs = [cost + count * between for cost, count in zip(step.costs, step.tasks, strict=True)]
    updates = {ipu: cost + between for ipu, cost in step.updates.items() if cost}  # one for all replicas
    order, keeps_order = ORDERS[step.mode], step.keeps_order and not cores
    return timeline(step.actions, step.micro_batches, order, cores, costs, replicas, updates, keeps_order)


# ---- changes of the program ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A change of a program, and how many times as fast per row of data it makes the program."""

    kind: str  # micro-batches, pipeline or replicas
    what: str  # the option to set, as code
    apart: float  # speedup on separate devices
    here: float | None  # speedup on this host's cores; None: unknown
    also: str  # other effects of the change

    @property
    def best_speedup(self) -> float:
        return max(self.apart, self.here or 0.0)


def promised_speedup(speedup: float | None, spread: float) -> float | None:
    """Return the speedup that advice may state for a simulated `speedup`: 1 + 75 % of the gain. Return None
    if these 75 % are not above 5 % and above `spread`, or if `speedup` is None."""
    sure = 1 + _SAFETY * ((speedup or 1.0) - 1)
    return sure if sure > 1 + max(_LEAST, spread) else None


def advised_changes(profile: Profile, step: StepModel, spread: float) -> list[Change]:
    """Return at most one change of each kind, sorted by speedup, the fastest first.

    Of the changes of a kind the first one is taken that has 70 % of the kind's largest gain; it is left out
    if `promised_speedup` returns None for its speedup on both kinds of machine.
    """
    if not sum(step.costs):
        return []
    facts = profile.facts
    # With more tasks, operations that use several cores would use fewer: how fast they are then is not measured.
    is_host = facts.get("device", "cpu") == "cpu" and facts.get("threads_inside", 1) == 1
    cores = facts.get("threads", 0) if is_host else 0
    before, by_kind = simulated_ns(step), defaultdict(list)
    for kind, changed, what, also in _candidate_changes(profile, step, cores):
        faster = before / simulated_ns(changed) * changed.micro_batches / step.micro_batches
        # More replicas take more separate devices, and then each row takes as long as before.
        on_devices = faster if changed.replicas == step.replicas else 1.0
        on_cores = speedup_on_host(step, changed, cores) if cores else None
        by_kind[kind].append(Change(kind, what, on_devices, on_cores, also))
    found = []
    for same in by_kind.values():
        least = 1 + 0.7 * max(0.0, max(one.best_speedup for one in same) - 1)
        found += [one for one in same if one.best_speedup >= least][:1]
    return sorted(
        (one for one in found if promised_speedup(one.best_speedup, spread)),
        key=lambda one: -one.best_speedup,
    )


def _candidate_changes(
    profile: Profile, step: StepModel, cores: int
) -> Iterator[tuple[str, StepModel, str, str]]:
    """Yield (kind, changed step, what, also) of each change to simulate; see the fields of `Change`.

    The changes are more micro-batches, a pipeline in place of sharded stages, and more replicas of a single
    process, so that each core has one.
    """
    for factor in (2, 4, 8, 16):
        count, option = factor * step.micro_batches, "options.deviceIterations"
        also = f"a call takes {factor} times the rows"
        if profile.training:
            option = "options.Training.gradientAccumulation"
            also = f"the effective batch becomes {factor} times as large, so the learning rate may have to change"
        yield "micro-batches", replace(step, micro_batches=count), f"{option}({count})", also

    stages, ipus = len(profile.ipus), list(profile.ipus)
    least = ORDERS["1f1b"].least_micro_batches(stages, profile.training)
    if not ORDERS[step.mode].overlaps and ipus == sorted(ipus) and step.micro_batches >= least > 1:
        also = "up to as many micro-batches as there are stages are held at the same time"
        yield "pipeline", replace(step, mode="1f1b"), "poptorch.PipelinedExecution", also

    factor, held_by = cores // step.replicas, profile.facts.get("capacity") or {}
    limit, wanted = memory.capacity_and_need(profile, memory.memory_needs(profile))
    fits = not (limit and held_by.get("shared") and factor * wanted > limit)
    if factor > 1 and profile.counts.get("instances", 1) == 1 and fits:
        count, also = factor * step.replicas, f"a call takes {factor} times the rows"
        also += ", and the effective batch becomes as many times as large" if profile.training else ""
        yield "replicas", replace(step, replicas=count), f"options.replicationFactor({count})", also
