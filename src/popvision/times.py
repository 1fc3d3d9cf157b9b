"""Times: the steps after warm-up, what cores and ipus did in them, and the cost of each stage's computation.

A cost is the CPU time of a thread, so that other programs do not count. Spans (throughput, the time of a step,
the trace) are in wall-clock time.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, quantiles
from typing import TypeVar

from popengine.profile import Event, Profile

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")

# ---- steps -----------------------------------------------------------------------------------------------


def steady_events(profile: Profile) -> list[Event]:
    """Return the events of all whole steps except the run's first two, in which caches are cold and operations
    are measured. If there is no other, those of the last whole step; if no step is whole, all events."""
    whole, seen = whole_steps(profile), {(run.call, run.step) for run in profile.runs}
    wanted = (set(whole) - {*sorted(seen)[:2]}) or set(whole[-1:]) or seen
    return [event for event in profile.events() if (event.call, event.step) in wanted]


def whole_steps(profile: Profile) -> list[tuple[int, int]]:
    """Return (call, step) of each step of which every run of a task was recorded."""
    runs = group_by(profile.runs, lambda run: (run.call, run.step))
    return sorted(key for key, step_runs in runs.items() if len(step_runs) == profile.facts.get("step_tasks"))


# ---- what cores and ipus did -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Usage:
    """The ns that a core spent in each activity, over all steps; or an ipu, in one step on separate devices."""

    place: int  # the index of a core, or an ipu
    # By phase of computations; "update"; "other": sums of gradients, gathers.
    spent: Mapping[str, float]
    waiting: float


def core_usages(events: Iterable[Event]) -> list[Usage]:
    """Return the usage of each core. A step lasts from its first computation to the end of its last task."""
    window, spent = 0, defaultdict[int, Counter[str]](Counter)
    for step_events in group_by(events, lambda event: (event.call, event.step)).values():
        start = min((event.start for event in step_events if event.computes), default=step_events[0].start)
        window += max(event.end for event in step_events) - start
        for event in step_events:
            activity = event.phase if event.computes else "update" if event.kind == "update" else "other"
            spent[event.core][activity] += max(0, event.end - max(start, event.start))
    # Negative: the threads that talk to other processes.
    return [Usage(at, dict(ns), max(0, window - ns.total())) for at, ns in sorted(spent.items()) if at >= 0]


def measured_bubble(events: Iterable[Event], instance_of: Mapping[int, int]) -> float | None:
    """Return the share of the steps in which an instance ran no task, on average over instances, which `instance_of`
    gives by core; None without events. A step lasts as in `core_usages`."""
    window, busy, instances = 0, 0, len({*instance_of.values()})
    for step_events in group_by(events, lambda event: (event.call, event.step)).values():
        begin = min((event.start for event in step_events if event.computes), default=step_events[0].start)
        window += instances * (max(event.end for event in step_events) - begin)
        on_cores = (event for event in step_events if event.core >= 0)
        for runs in group_by(on_cores, lambda event: instance_of[event.core]).values():
            until = begin
            for event in sorted(runs, key=lambda event: event.start):
                busy += max(0, event.end - max(event.start, until))
                until = max(until, event.end)
    return 1 - busy / window if window else None


def waiting_share(usages: Sequence[Usage]) -> float | None:
    """Return the share of time in which the cores waited; None without any."""
    waiting, busy = sum(use.waiting for use in usages), sum(sum(use.spent.values()) for use in usages)
    return waiting / (waiting + busy) if busy else None


def ideal_bubble(profile: Profile) -> float | None:
    """Return the share of the ipus' time that is idle in a schedule in which each action takes the same time:
    (p-1)/(m+p-1) for a pipeline of p stages on p ipus and m micro-batches. None if the schedule is unknown."""
    length, actions = (profile.facts.get(name, 0) for name in ("schedule_length", "schedule_actions"))
    return 1 - actions / (length * len(profile.devices)) if length and actions else None


def others_share(events: list[Event]) -> float | None:
    """Return the fraction of the computations' time in which their thread had no core, mostly because another program
    used it, or waited for Python's lock; None if that was not measured."""
    computing = [event for event in events if event.computes and event.computed]
    spans = sum(event.end - event.start for event in computing)
    return max(0.0, 1 - sum(event.computed for event in computing) / spans) if spans else None


# ---- what a stage costs ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageTime:
    """The cost of one micro-batch in a stage, in ns."""

    stage: int
    ipu: int
    blocks: str  # names, with commas
    phases: dict[str, float]  # by phase
    around: float  # sums of gradients, gathers
    update: float  # of one weight update
    total: float  # phases and around


def row_costs(events: Iterable[Event]) -> dict[int, float]:
    """Return the cost in ns of one run of each row of the table (a row without runs is missing).

    That is the median over steps of the mean in a step: caches are colder for its first micro-batch. Waits inside a
    task (for I/O, say) are part of its cost, but not of `Event.cost`; so it is at least the fastest run's duration.
    """
    costs = {}
    for row, runs in group_by(events, lambda event: event.task).items():
        steps = group_by(runs, lambda event: (event.call, event.step)).values()
        typical = median(fmean(event.cost for event in step) for step in steps)
        costs[row] = max(typical, min(event.end - event.start for event in runs))
    return costs


def stage_times(
    profile: Profile, costs: Mapping[int, float], updates: Mapping[int, float]
) -> list[StageTime]:
    """Return the cost of each stage, given the ns of one run of each row, and of the update of each ipu, which is
    divided equally among its stages."""
    times = []
    for stage, (ipu, blocks) in enumerate(zip(profile.ipus, profile.stages, strict=True)):
        phases, around = dict.fromkeys(profile.phases, 0.0), 0.0
        for row, task in enumerate(profile.tasks):
            if task.stage == stage and task.computes:
                phases[task.phase] += costs.get(row, 0.0)
            elif task.stage == stage and task.phase:
                around += costs.get(row, 0.0)
        update = updates.get(ipu, 0.0) / profile.ipus.count(ipu)
        phases = {phase: ns for phase, ns in phases.items() if ns}
        total = sum(phases.values()) + around
        times.append(StageTime(stage, ipu, blocks, phases, around, update, total))
    return times


def ipu_usages(stages: Sequence[StageTime], micro_batches: int, length: float) -> list[Usage]:
    """Return the usage of each ipu in a step of `length` ns on separate devices."""
    spent = defaultdict[int, defaultdict[str, float]](lambda: defaultdict(float))
    for stage in stages:
        spent[stage.ipu]["update"] += stage.update
        for activity, ns in {**stage.phases, "other": stage.around}.items():
            spent[stage.ipu][activity] += micro_batches * ns
    return [Usage(ipu, dict(ns), max(0.0, length - sum(ns.values()))) for ipu, ns in sorted(spent.items())]


def update_costs(profile: Profile, events: Iterable[Event]) -> dict[int, float]:
    """Return the cost in ns of the weight update of each ipu: of the row that updates all weights, the share of the
    bytes of the ipu's weights. The cost of the row is its median over steps."""
    updates = [(task.ipu, x.bytes) for task in profile.tasks for x in task.instructions if x.kind == "update"]
    total = sum(size for _, size in updates)
    steps = group_by((e for e in events if e.kind == "update"), lambda event: (event.call, event.step))
    if not steps or not total:
        return {}
    cost = median(sum(event.cost for event in step) for step in steps.values())
    return {ipu: cost * size / total for ipu, size in updates}


def with_row_costs(profile: Profile, costs: dict[int, float]) -> Profile:
    """Return the profile with the `ns` of all operations scaled, so that the operations of a row add up to its cost.
    (Operations were measured in one step, but rows in all steps.)"""
    ns, calls, factors = defaultdict(int), defaultdict(int), {}
    for operation in profile.operations:
        ns[operation.task] += operation.ns
        calls[operation.task] = max(calls[operation.task], operation.calls)
    for row, task in enumerate(profile.tasks):
        if task.computes and ns[row]:
            factors[row] = (costs.get(row, 0.0) * calls[row] / ns[row]) or 1.0
    scaled = (one._replace(ns=round(one.ns * factors.get(one.task, 1.0))) for one in profile.operations)
    return replace(profile, operations=tuple(scaled))


def cost_spread(events: Iterable[Event]) -> float:
    """Return the median of the `relative_spread` of all rows that compute and ran at least four times; else 0."""
    runs = group_by((event for event in events if event.computes), lambda event: event.task).values()
    spreads = [relative_spread([event.cost for event in same]) for same in runs if len(same) >= 4]
    return median(spreads or [0.0])


def relative_spread(values: Sequence[float]) -> float:
    """Return half of the interquartile range, divided by the median; 0 for fewer than four values."""
    if len(values) < 4 or not (middle := median(values)):
        return 0.0
    low, _, high = quantiles(values, n=4)
    return (high - low) / 2 / middle


def group_by(values: Iterable[_V], key: Callable[[_V], _K]) -> dict[_K, list[_V]]:
    """Return lists of the values with the same key, by key, in the order of `values`."""
    groups = defaultdict(list)
    for value in values:
        groups[key(value)].append(value)
    return groups
