"""A step in virtual time: a simulation of how long it takes with measured costs, on one of two machines.

    apart    separate devices: each ipu does one thing at a time, in the order of the schedule
    here     a host: its cores share all ipus, and take the earliest micro-batch that can go on

A change of the program is a change of the value `StepModel`, whose gain a simulation finds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from popengine.order import ORDERS, Action, After, Timeline, length, timeline
from popengine.profile import Profile

from . import memory

WORTH_SHARING = 1e5  # ns of an average task; if tasks are shorter, the engine runs all of them on one core
_DOUBTFUL = 1.4  # factor around WORTH_SHARING within which the engine may use one core or several
_MOST_TASKS = 6_000  # for a longer step two shorter ones are simulated, and their lengths extrapolated
_LEAST = 0.05  # smallest gain that is promised: two measurements of one program differ by as much
_SAFETY = 0.75  # share of a simulated gain that is promised; caches and memory may take the rest


@dataclass(frozen=True)
class StepModel:
    """The computations of a step and their costs in ns: `forward` and `backward` of one micro-batch by stage,
    and `updates` by ipu. On a host also `between`: the time between two tasks of a core, and `fixed`: a
    step's share of the call's time outside steps.

    `keeps_order`: whether separate devices run the programs of a recorded step. `ordered`: stages that take
    micro-batches in their order on any machine. `sharing`: by number of cores, the smallest and the largest
    speed of these cores together, relative to one core."""

    ipus: tuple[int, ...]  # of each stage
    forward: tuple[float, ...]
    backward: tuple[float, ...]  # empty: inference
    updates: dict[int, float]
    micro_batches: int  # of a replica
    replicas: int = 1
    mode: str = "pipelined"  # see `popengine.order.ORDERS`
    ordered: frozenset[int] = frozenset()
    between: float = 0.0
    fixed: float = 0.0
    sharing: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    keeps_order: bool = True

    @classmethod
    def of(cls, profile: Profile, costs: Mapping[tuple[str, int], float], **more: Any) -> StepModel:
        """Return the model of a plan's step; `costs`: ns by (phase, stage); `more`: other fields."""
        forward, backward = (
            tuple(costs[phase, stage] for stage in range(len(profile.ipus))) for phase in "FB"
        )
        mode = profile.facts.get("mode", "sharded")
        return cls(profile.ipus, forward, backward if profile.training else (), mode=mode, **more)

    @property
    def actions(self) -> list[Action]:
        """Return the computations of a micro-batch. Each waits for the previous one; a forward of an ordered
        stage also waits for itself in the previous micro-batch."""
        stages = range(len(self.ipus))
        phases = [("F", s) for s in stages] + [("B", s) for s in reversed(stages) if self.backward]
        found = []
        for row, (phase, stage) in enumerate(phases):
            after = [After(row - 1)] if row else []
            after += [After(row, 1)] if phase == "F" and stage in self.ordered else []
            found.append(Action(phase, stage, self.ipus[stage], tuple(after)))
        return found

    @property
    def costs(self) -> list[float]:
        """Return the ns of each of `actions`."""
        return [*self.forward, *reversed(self.backward)]

    @property
    def work_ns(self) -> float:
        """Return the ns of all computations and weight updates of a replica in a step."""
        return self.micro_batches * sum(self.costs) + sum(self.updates.values())

    @property
    def task_count(self) -> int:
        """Return the number of tasks of a replica in a step: each forward is one, each backward two (with its
        gradient sum), and each ipu's update one if it has a cost."""
        each = len(self.forward) + 2 * len(self.backward)
        return each * self.micro_batches + sum(map(bool, self.updates.values()))

    @property
    def mean_task_ns(self) -> float:
        """Return the ns of an average task."""
        return self.work_ns / (self.task_count or 1)

    def bubble(self, length: float) -> float:
        """Return the share of time in which the ipus wait, in a step of `length` ns on separate devices."""
        return max(0.0, 1 - self.work_ns / (length * len(set(self.ipus)))) if length else 0.0


def apart(step: StepModel) -> float:
    """Return the ns of a step on separate devices."""
    return _ns_of_step(step, lambda shorter: on_devices(shorter)[1].length)


def here(step: StepModel, cores: int) -> float | None:
    """Return the ns of a step on a host whose cores share all ipus; None if the speed of so many cores
    together was not measured. It is the mean of the ns at their smallest and at their largest speed."""
    found = [_ns_on_cores(step, cores if step.mean_task_ns > WORTH_SHARING else 1, end) for end in (0, 1)]
    return None if None in found else sum(filter(None, found)) / 2


def speedup_here(step: StepModel, other: StepModel, cores: int) -> float | None:
    """Return the speedup per row of `other` against `step` on a host; None if the speed of so many cores
    together was not measured. It is the smallest of four simulated speedups, since the engine may use one
    core or all, and the cores' measured speed has a spread."""
    found = []
    for limit, end in product((1 / _DOUBTFUL, _DOUBTFUL), (0, 1)):
        before, after = (
            _ns_on_cores(one, cores if one.mean_task_ns > limit * WORTH_SHARING else 1, end)
            for one in (step, other)
        )
        if before is None or after is None:
            return None
        rows = [one.micro_batches * one.replicas for one in (step, other)]
        found.append(before / after * rows[1] / rows[0] if after else 1.0)
    return min(found)


def _ns_on_cores(step: StepModel, cores: int, end: int) -> float | None:
    """Return the ns of a step on cores with their lowest (`end`: 0) or highest (1) speed; None if
    unmeasured."""
    if cores == 1:
        return (step.work_ns + step.task_count * step.between) * step.replicas + step.fixed
    if cores not in step.sharing:
        return None
    speed = [1 + (step.sharing[cores][end] - 1) * others / (cores - 1) for others in range(cores)]
    return step.fixed + _ns_of_step(step, lambda shorter: _stretched_length(_on_host(shorter, cores), speed))


def _stretched_length(found: Timeline, speed: Sequence[float]) -> float:
    """Return the length of a timeline if n busy cores together are `speed[n - 1]` times as fast as one."""
    changes = sorted([(start, 1) for start in found.starts] + [(end, -1) for end in found.ends])
    length, busy, before = 0.0, 0, 0.0
    for time, change in changes:
        if busy:
            length += (time - before) * busy / speed[busy - 1]
        busy, before = busy + change, time
    return length


def _ns_of_step(step: StepModel, run: Callable[[StepModel], float]) -> float:
    """Return the ns of a step, which `run` simulates; a long step is extrapolated from two shorter ones."""
    most = _MOST_TASKS // step.replicas
    return length(
        step.actions, step.micro_batches, lambda count: run(replace(step, micro_batches=count)), most
    )


def on_devices(step: StepModel) -> tuple[list[tuple[int, int]], Timeline]:
    """Return the tasks, (index in `step.actions`, micro-batch), and timeline of a step on devices."""
    updates = {ipu: cost for ipu, cost in step.updates.items() if cost}
    order, keeps_order = ORDERS[step.mode][0], step.keeps_order
    return timeline(step.actions, step.micro_batches, order, 0, step.costs, 1, updates, keeps_order)


def _on_host(step: StepModel, cores: int) -> Timeline:
    """Return the timeline of a step on cores that share all ipus; an update is one for all replicas."""
    tasks = [1] * len(step.forward) + [2] * len(step.backward)
    costs = [cost + count * step.between for cost, count in zip(step.costs, tasks, strict=True)]
    updates = {ipu: cost + step.between for ipu, cost in step.updates.items() if cost}
    order = ORDERS[step.mode][1]
    return timeline(step.actions, step.micro_batches, order, cores, costs, step.replicas, updates)[1]


# ---- changes of the program ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A change of a program, and the simulated speedup per row of data.

    `apart`: speedup on separate devices; `here`: on this host's cores (None: unknown). `also`: other effects.
    `setting`: the change as data: `{"accumulation": 8}`, `{"pipelined": True}`, `{"replicas": 2}` ...
    """

    kind: str
    what: str
    apart: float
    here: float | None
    also: str
    setting: Mapping[str, Any]

    @property
    def best(self) -> float:
        return max(self.apart, self.here or 0.0)


def promised(speedup: float | None, spread: float) -> float | None:
    """Return the speedup to promise: 1 plus 75 % of the simulated gain. Return None if these 75 % are not
    above both 5 % and `spread`."""
    sure = 1 + _SAFETY * ((speedup or 1.0) - 1)
    return sure if sure > 1 + max(_LEAST, spread) else None


def changes(profile: Profile, step: StepModel, spread: float) -> list[Change]:
    """Return the changes whose speedup is `promised` on some machine, one per kind, the best first."""
    if not sum(step.costs):
        return []
    facts = profile.facts
    # With more tasks, operations that use several cores would use fewer: how fast they are then is not measured.
    is_host = facts.get("device", "cpu") == "cpu" and facts.get("threads_inside", 1) == 1
    cores = facts.get("threads", 0) if is_host else 0
    before = apart(step)

    def change(kind: str, changed: StepModel, what: str, also: str, **setting: Any) -> Change:
        on_cores = speedup_here(step, changed, cores) if cores else None
        faster = before / apart(changed) * changed.micro_batches / step.micro_batches
        # On separate devices more replicas take more devices.
        return Change(
            kind, what, faster if changed.replicas == step.replicas else 1.0, on_cores, also, setting
        )

    found = [
        *_more_micro_batches(step, change),
        *_pipeline(profile, step, change),
        *_replicas(profile, step, cores, change),
    ]
    return sorted((one for one in found if promised(one.best, spread) is not None), key=lambda one: -one.best)


def _more_micro_batches(step: StepModel, change: Callable[..., Change]) -> list[Change]:
    """Return the change to the fewest micro-batches with 70 % of the largest gain; nothing if none gains."""
    found = []
    for factor in (2, 4, 8, 16):
        count, option, setting = factor * step.micro_batches, "options.deviceIterations", "iterations"
        also = f"a call takes {factor} times the rows"
        if step.backward:
            option, setting = "options.Training.gradientAccumulation", "accumulation"
            also = f"the effective batch becomes {factor} times as large, so the learning rate may have to change"
        more = replace(step, micro_batches=count)
        found.append(change("micro-batches", more, f"{option}({count})", also, **{setting: count}))
    most = max(one.best for one in found)
    return [one for one in found if one.best - 1 >= 0.7 * max(0.0, most - 1)][:1]


def _pipeline(profile: Profile, step: StepModel, change: Callable[..., Change]) -> list[Change]:
    """Return the change from sharded stages to a pipeline; nothing if that is impossible."""
    stages = len(step.ipus)
    enough = 2 * stages - 1 if step.backward else stages
    is_in_order = list(step.ipus) == sorted(step.ipus)
    if profile.facts.get("mode") != "sharded" or not is_in_order or not step.micro_batches >= enough > 1:
        return []
    also = "up to as many micro-batches as there are stages are held at the same time"
    pipelined = replace(step, mode="pipelined")
    return [change("pipeline", pipelined, "poptorch.PipelinedExecution", also, pipelined=True)]


def _replicas(profile: Profile, step: StepModel, cores: int, change: Callable[..., Change]) -> list[Change]:
    """Return the change to more replicas, for idle cores; nothing if cores or memory are too few, or in
    a run of several instances."""
    factor, held_by = cores // step.replicas, profile.facts.get("capacity") or {}
    limit, wanted = memory.capacity(profile, memory.needs(profile))
    is_too_large = limit and held_by.get("shared") and factor * wanted > limit
    if factor < 2 or profile.counts.get("instances", 1) > 1 or is_too_large:
        return []
    count = factor * step.replicas
    also = f"a call takes {factor} times the rows"
    also += ", and the effective batch becomes as many times as large" if step.backward else ""
    more = replace(step, replicas=count)
    return [change("replicas", more, f"options.replicationFactor({count})", also, replicas=count)]
