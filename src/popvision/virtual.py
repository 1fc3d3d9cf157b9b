"""A step in virtual time: a simulation of how long it takes with measured costs, on one of two machines.

    apart    separate devices: each ipu does one thing at a time, in the order of the schedule
    here     a host: its cores share all ipus, and take the earliest micro-batch that can go on

A change of the program is a change of the value `StepModel`, so the gain is found by simulating the changed step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from popengine.order import ORDERS, Action, After, Timeline, length, timeline
from popengine.profile import Profile

WORTH_SHARING = 1e5  # ns of an average task; if tasks are shorter, the engine runs all of them on one core
_DOUBTFUL = 1.4  # factor around WORTH_SHARING within which the engine may use one core or several
_MOST_TASKS = 6_000  # for a longer step two shorter ones are simulated, and their lengths extrapolated


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
        """Return the model of a plan's step; `costs`: ns by (phase, stage), `more`: the fields from `updates` on."""
        forward, backward = (
            tuple(costs[phase, stage] for stage in range(len(profile.ipus))) for phase in "FB"
        )
        mode = profile.facts.get("mode", "sharded")
        return cls(profile.ipus, forward, backward if profile.training else (), mode=mode, **more)

    @property
    def phases(self) -> list[tuple[str, int]]:
        """Return (phase, stage) of each computation of a micro-batch, in order."""
        stages = range(len(self.ipus))
        return [("F", s) for s in stages] + [("B", s) for s in reversed(stages) if self.backward]

    @property
    def costs(self) -> list[float]:
        """Return the ns of each of `phases`."""
        return [(self.forward if phase == "F" else self.backward)[stage] for phase, stage in self.phases]

    @property
    def work(self) -> float:
        """Return the ns of all computations of a replica in a step."""
        return self.micro_batches * sum(self.costs) + sum(self.updates.values())

    @property
    def tasks(self) -> int:
        """Return the number of tasks of a replica in a step; a backward has a second one, its gradient sum."""
        each = len(self.forward) + 2 * len(self.backward)
        return each * self.micro_batches + sum(map(bool, self.updates.values()))

    @property
    def mean(self) -> float:
        """Return the ns of an average task."""
        return self.work / (self.tasks or 1)

    def bubble(self, length: float) -> float:
        """Return the share of time in which the ipus wait, in a step of `length` ns on separate devices."""
        return 1 - self.work / (length * len(set(self.ipus))) if length else 0.0


def apart(step: StepModel) -> float:
    """Return the ns of a step on separate devices."""
    return _length(step, lambda shorter: on_devices(shorter)[1].length)


def here(step: StepModel, cores: int) -> float | None:
    """Return the ns of a step on a host whose cores share all ipus; None if the cores were not measured."""
    found = [_on_cores(step, cores if step.mean > WORTH_SHARING else 1, end) for end in (0, 1)]
    return None if None in found else sum(filter(None, found)) / 2


def speedup_here(step: StepModel, other: StepModel, cores: int) -> float | None:
    """Return the smallest speedup per row of `other` against `step`; None if the cores were not measured. It
    is the minimum over several cases: the engine may use one core or all, and their measured speed has a
    spread."""
    found = []
    for limit, end in product((1 / _DOUBTFUL, _DOUBTFUL), (0, 1)):
        before, after = (
            _on_cores(one, cores if one.mean > limit * WORTH_SHARING else 1, end) for one in (step, other)
        )
        if before is None or after is None:
            return None
        rows = [one.micro_batches * one.replicas for one in (step, other)]
        found.append(before / after * rows[1] / rows[0] if after else 1.0)
    return min(found)


def _on_cores(step: StepModel, cores: int, end: int) -> float | None:
    if cores == 1:
        return (step.work + step.tasks * step.between) * step.replicas + step.fixed
    if cores not in step.sharing:
        return None
    speed = [1 + (step.sharing[cores][end] - 1) * others / (cores - 1) for others in range(cores)]
    return step.fixed + _length(step, lambda shorter: _stretched(_here(shorter, cores), speed))


def _stretched(found: Timeline, speed: Sequence[float]) -> float:
    """Return the length of a timeline if n cores together are speed[n - 1] times as fast as one core."""
    changes = sorted([(start, 1) for start in found.starts] + [(end, -1) for end in found.ends])
    length, busy, before = 0.0, 0, 0.0
    for time, change in changes:
        if busy:
            length += (time - before) * busy / speed[busy - 1]
        busy, before = busy + change, time
    return length


def _length(step: StepModel, run: Callable[[StepModel], float]) -> float:
    return length(
        _actions(step),
        step.micro_batches,
        lambda count: run(replace(step, micro_batches=count)),
        _MOST_TASKS // step.replicas,
    )


def _actions(step: StepModel) -> list[Action]:
    """Return the phases as rows of a table. Each row waits for the previous row; a forward of an ordered
    stage also waits for the same row of the previous micro-batch."""
    found = []
    for row, (phase, stage) in enumerate(step.phases):
        after = [After(row - 1)] if row else []
        if phase == "F" and stage in step.ordered:
            after.append(After(row, 1))
        found.append(Action(phase, stage, step.ipus[stage], tuple(after)))
    return found


def on_devices(step: StepModel) -> tuple[list[tuple[int, int]], Timeline]:
    """Simulate a step on separate devices. Returns: as `timeline`; an action is an index of `step.phases`."""
    return timeline(
        _actions(step),
        step.micro_batches,
        ORDERS[step.mode][0],
        costs=step.costs,
        updates={ipu: cost for ipu, cost in step.updates.items() if cost},
        keeps_order=step.keeps_order,
    )


def _here(step: StepModel, cores: int) -> Timeline:
    """Simulate a step on cores that share all ipus of all replicas. The replicas have one copy of weights."""
    tasks = [1] * len(step.forward) + [2] * len(step.backward)
    costs = [cost + count * step.between for cost, count in zip(step.costs, tasks, strict=True)]
    updates = {ipu: cost + step.between for ipu, cost in step.updates.items() if cost}
    order = ORDERS[step.mode][1]
    return timeline(_actions(step), step.micro_batches, order, cores, costs, step.replicas, updates)[1]
