"""A step in virtual time: how long it takes if its tasks cost what was measured, on one of two machines.

    apart    separate devices: each ipu does one thing at a time, in the order of the schedule
    here     a host: its cores share all ipus, and take the earliest micro-batch that can go on

A change of the program is a change of the value `Step`, so what it gives is found by running it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product

from popengine.virtual_time import Timeline, simulate

WORTH_SHARING = 1e5  # ns that a task takes on average; of less, the driver leaves all to one core
_DOUBTFUL = 1.4  # times as long or short as that: what the driver will find is not known
_MOST_TASKS = 6_000  # of longer steps two shorter ones are run, and the line through them is followed


@dataclass(frozen=True)
class Step:
    """What a step computes, and what that costs in ns: `forward` and `backward` of each stage's micro-batch,
    `updates` of each ipu; on a host also `between` two tasks of a core, and `fixed`, a step's share of its call.

    `ordered`: stages that take micro-batches in their order whatever the machine. `sharing`: number of cores -> how
    many times as much they compute at the same time as one, at the least and at the most. `moves`: what an ipu of
    separate devices takes to bring offloaded state for its update, and to take it back."""

    ipus: tuple[int, ...]  # of each stage
    forward: tuple[float, ...]
    backward: tuple[float, ...]  # empty: inference
    updates: dict[int, float]
    micro_batches: int  # of a replica
    replicas: int = 1
    in_turns: bool = False
    ordered: frozenset[int] = frozenset()
    between: float = 0.0
    fixed: float = 0.0
    sharing: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    moves: Mapping[int, float] = field(default_factory=dict)

    @property
    def phases(self) -> list[tuple[str, int]]:
        """What a micro-batch goes through, in this order."""
        stages = range(len(self.ipus))
        return [("F", s) for s in stages] + [("B", s) for s in reversed(stages) if self.backward]

    @property
    def rows(self) -> int:
        """Micro-batches of all replicas."""
        return self.micro_batches * self.replicas

    @property
    def costs(self) -> list[float]:
        """Of each of `phases`."""
        return [(self.forward if phase == "F" else self.backward)[stage] for phase, stage in self.phases]


def apart(step: Step) -> float:
    """ns on separate devices."""
    return _length(step, lambda shorter: on_devices(shorter).length)


def bubble_apart(step: Step) -> float:
    """The share of separate devices' time in which they wait."""
    length = apart(step)
    busy = step.micro_batches * sum(step.costs) + sum(step.updates.values()) + sum(step.moves.values())
    return 1 - busy / (length * len(set(step.ipus))) if length else 0.0


def here(step: Step, cores: int) -> float | None:
    """ns on a host whose cores share all ipus of all replicas; None: how well they do so was not measured."""
    found = [_on_cores(step, cores if _mean(step) > WORTH_SHARING else 1, end) for end in (0, 1)]
    return None if None in found else sum(filter(None, found)) / 2


def gain_here(step: Step, cores: int, other: Step, others_cores: int) -> float | None:
    """How many times as fast the other step computes a row: the least that may be. The driver may share tasks or leave
    them to one core, and how well cores share was measured with a spread."""
    found = []
    for limit, end in product((1 / _DOUBTFUL, _DOUBTFUL), (0, 1)):
        before, after = (
            _on_cores(one, count if _mean(one) > limit * WORTH_SHARING else 1, end)
            for one, count in ((step, cores), (other, others_cores))
        )
        if before is None or after is None:
            return None
        found.append(before / after * other.rows / step.rows if after else 1.0)
    return min(found)


def _mean(step: Step) -> float:
    """ns of a task."""
    tasks = sum(_tasks(step)) * step.micro_batches + len(set(step.ipus))
    return (step.micro_batches * sum(step.costs) + sum(step.updates.values())) / tasks


def _tasks(step: Step) -> list[int]:
    """Of the driver, for each of `phases`: what a backward adds to the sums of gradients is a task of its own."""
    return [1 + (phase == "B") for phase, _ in step.phases]


def _on_cores(step: Step, cores: int, end: int) -> float | None:
    if cores == 1:
        tasks = sum(_tasks(step)) * step.micro_batches + sum(map(bool, step.updates.values()))
        whole = step.micro_batches * sum(step.costs) + sum(step.updates.values()) + tasks * step.between
        return whole * step.replicas + step.fixed
    if cores not in step.sharing:
        return None
    speed = [1 + (step.sharing[cores][end] - 1) * others / (cores - 1) for others in range(cores)]
    return step.fixed + _length(step, lambda shorter: _stretched(_here(shorter, cores), speed))


def _stretched(found: Timeline, speed: Sequence[float]) -> float:
    """The length if n cores that compute at the same time are together speed[n - 1] times as fast as one."""
    changes = sorted([(start, 1) for start in found.starts] + [(end, -1) for end in found.ends])
    length, busy, before = 0.0, 0, 0.0
    for time, change in changes:
        if busy:
            length += (time - before) * busy / speed[busy - 1]
        busy, before = busy + change, time
    return length


def _length(step: Step, run: Callable[[Step], float]) -> float:
    size, more = len(step.phases), len(step.ipus)
    some = more + 4  # enough to fill the pipeline
    if size * step.micro_batches * step.replicas <= _MOST_TASKS or step.micro_batches <= some + more:
        return run(step)
    one, two = (run(replace(step, micro_batches=count)) for count in (some, some + more))
    return two + (two - one) / more * (step.micro_batches - some - more)


def schedule(step: Step) -> dict[int, list[int]]:
    """For each ipu its tasks in the order of the schedule: task m * len(phases) + i is phase i of micro-batch m."""
    phases, size = step.phases, len(step.phases)
    after = _needs(step)
    owners = [step.ipus[stage] for _, stage in phases] * step.micro_batches
    if step.in_turns:
        order: Sequence[int] = range(len(after))
    else:  # as if each took one tick: backward before forward, later stages before earlier ones
        wish = [(phase, -stage) for phase, stage in phases]
        ranked = sorted(range(len(after)), key=lambda task: (wish[task % size], task))
        place = {task: rank for rank, task in enumerate(ranked)}
        ticks = simulate(
            [[place[need] for need in after[task]] for task in ranked],
            [1] * len(ranked),
            [owners[task] for task in ranked],
        )
        order = [ranked[rank] for rank in ticks.order]
    rows: dict[int, list[int]] = {ipu: [] for ipu in sorted(set(step.ipus))}
    for task in order:
        rows[owners[task]].append(task)
    return rows


def on_devices(step: Step) -> Timeline:
    """The whole step on separate devices: task m * len(phases) + i is phase i of micro-batch m; updates come last."""
    after = _needs(step)
    owners = [step.ipus[stage] for _, stage in step.phases] * step.micro_batches
    costs = step.costs * step.micro_batches
    for ipu, row in schedule(step).items():
        for before, task in pairwise(row):
            after[task].append(before)
        if update := step.updates.get(ipu, 0.0) + step.moves.get(ipu, 0.0):
            after.append(row[-1:])
            costs.append(update)
            owners.append(ipu)
    return simulate(after, costs, owners)


def _needs(step: Step) -> list[list[int]]:
    """What each task waits for: the phase before; the same of the micro-batch before; and room for one more."""
    phases, size, stages = step.phases, len(step.phases), len(step.ipus)
    found: list[list[int]] = []
    for micro_batch in range(step.micro_batches):
        first = micro_batch * size
        for i, (phase, stage) in enumerate(phases):
            needs = [first + i - 1] if i else []
            if micro_batch and not step.in_turns:
                needs.append(first - size + i)
            elif micro_batch and not i:
                needs.append(first - 1)
            room = stages - stage
            if phase == "F" and step.backward and not step.in_turns and micro_batch >= room:
                needs.append(first - room * size + 2 * stages - 1 - stage)
            found.append(needs)
    return found


def _here(step: Step, cores: int) -> Timeline:
    phases, size, copies = step.phases, len(step.phases), step.replicas
    in_flight = 1 if step.in_turns else max(len(step.ipus), cores)
    after: list[list[int]] = []
    for micro_batch in range(step.micro_batches):
        for i, (phase, stage) in enumerate(phases):
            for replica in range(copies):

                def number(earlier: int, phase: int, replica: int = replica) -> int:
                    return (earlier * size + phase) * copies + replica

                needs = [number(micro_batch, i - 1)] if i else []
                if not i and micro_batch >= in_flight:
                    needs.append(number(micro_batch - in_flight, size - 1))
                if micro_batch and phase == "F" and stage in step.ordered:
                    needs.append(number(micro_batch - 1, i))
                after.append(needs)
    each = [cost + tasks * step.between for cost, tasks in zip(step.costs, _tasks(step), strict=True)]
    costs = [cost for cost in each * step.micro_batches for _ in range(copies)]
    of_ipu = {ipu: [i for i, (_, s) in enumerate(phases) if step.ipus[s] == ipu] for ipu in set(step.ipus)}
    for ipu, cost in step.updates.items():
        for replica in range(copies if cost else 0):
            after.append(
                [(m * size + i) * copies + replica for m in range(step.micro_batches) for i in of_ipu[ipu]]
            )
            costs.append(cost + step.between)
    return simulate(after, costs, cores)
