"""Times: the steps that count, what ipus did in them, and what each stage's computation costs on one clock.

A cost is the time that a thread computed, so that other programs do not count. Spans (throughput, the bubble,
the trace) are in the clock's time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median, quantiles

from popengine.profile import Event, Profile

from .virtual import StepModel

# ---- steps -----------------------------------------------------------------------------------------------


def steady_events(profile: Profile) -> list[Event]:
    """Return the events of all whole steps but the first two steps of the run, in which caches are cold and
    the recorder measures single operations. If no other step is whole: the events of the last whole step; if
    no step is whole: all events."""
    whole, seen = whole_steps(profile), {(track.call, track.step) for track in profile.tracks}
    warm = [key for key in whole if key not in sorted(seen)[:2]] or whole[-1:]
    wanted = set(warm) or seen  # no whole steps: their beginnings, see `is_cut_off`
    return [event for event in profile.events() if (event.call, event.step) in wanted]


def whole_steps(profile: Profile) -> list[tuple[int, int]]:
    """Return (call, step) of each step of which every instruction of every ipu and replica was recorded."""
    places = defaultdict(set)
    for track in profile.tracks:
        if 2 * len(track.durations) == len(profile.programs[track.ipu]):
            places[track.call, track.step].add((track.replica, track.ipu))
    everywhere = {(track.replica, track.ipu) for track in profile.tracks}
    return sorted(key for key, value in places.items() if value == everywhere)


def is_cut_off(profile: Profile) -> bool:
    """Return whether steps were recorded, but none whole, so that shares of a step's time are unknown."""
    return bool(profile.tracks) and not whole_steps(profile)


# ---- what ipus did ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Usage:
    """The ns that one ipu of one replica spent in each activity, over all steps."""

    ipu: int
    replica: int
    forward: int
    backward: int
    update: int
    moving: int  # loads, sends, sums, stores and so on
    waiting: int


def usages(events: list[Event]) -> list[Usage]:
    """Return the time that each ipu spent in each activity; receives and idle time are `waiting`. A replica's
    step begins with its first computation on any ipu, and ends with its last instruction but receives."""
    steps: dict[tuple[int, int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event.kind != "receive":
            steps[event.call, event.step, event.replica].append(event)
    window: Counter[int] = Counter()  # by replica
    spent: dict[tuple[int, int], Counter[str]] = defaultdict(Counter)
    for (_, _, replica), working in steps.items():
        computing = [event.start for event in working if event.kind == "compute"]
        start = min(computing, default=min(event.start for event in working))
        window[replica] += max(event.end for event in working) - start
        for event in working:
            kind = event.phase if event.kind == "compute" else "U" if event.kind == "update" else "moving"
            spent[replica, event.ipu][kind] += max(0, event.end - max(start, event.start))
    return [
        Usage(ipu, replica, ns["F"], ns["B"], ns["U"], ns["moving"], max(0, window[replica] - ns.total()))
        for (replica, ipu), ns in sorted(spent.items())
    ]


def ideal_bubble(profile: Profile) -> float | None:
    """Return the share of the schedule's ticks in which ipus are idle; None if the schedule is unknown.

    Each action takes one tick. A pipeline of p stages and m micro-batches has the share (p-1)/(m+p-1).
    """
    length, actions = profile.facts.get("schedule_length"), profile.facts.get("schedule_actions")
    if not length or not actions:
        return None
    return 1 - actions / (length * len(profile.devices))


def measured_bubble(usages: list[Usage]) -> float | None:
    """Return the share of the ipus' time in which they waited; None without events."""
    waiting = sum(use.waiting for use in usages)
    busy = sum(use.forward + use.backward + use.update + use.moving for use in usages)
    return waiting / (waiting + busy) if busy else None


def core_share(events: list[Event]) -> float | None:
    """Return the share of the computations' time in which their thread had a core; None if not measured. In
    the rest the thread waited, mostly for a core that another program used, or for Python's lock."""
    computing = [event for event in events if event.computed]
    spans = sum(event.end - event.start for event in computing)
    return min(1.0, sum(event.computed for event in computing) / spans) if spans else None


# ---- what a stage costs ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageTime:
    """The cost of one micro-batch in a stage, in ns; `around`: loads, sends, sums and the like."""

    stage: int
    ipu: int
    blocks: str
    forward: float
    backward: float
    around: float
    update: float  # of one weight update
    total: float  # without the update


def stage_times(profile: Profile, events: list[Event]) -> list[StageTime]:
    """Return each stage's cost of one micro-batch. An ipu's update is divided equally among its stages."""
    computed: dict[tuple[str, int], list[Event]] = defaultdict(list)
    around: dict[int, dict[tuple[str, str, int], list[Event]]] = defaultdict(lambda: defaultdict(list))
    updates: dict[int, list[Event]] = defaultdict(list)
    for event in _without_contention(profile, events):
        if event.kind == "compute":
            computed[event.phase, event.stage].append(event)
        elif event.kind == "update":
            updates[event.ipu].append(event)
        elif event.kind != "receive" and event.stage >= 0:
            around[event.stage][event.phase, event.kind, event.peer].append(event)
    found = []
    for stage, (ipu, blocks) in enumerate(zip(profile.ipus, profile.stages, strict=True)):
        forward, backward = computed["F", stage], computed["B", stage]
        costs = _cost(forward), _cost(backward)
        surroundings = sum(_cost(same) * len(same) for same in around[stage].values())
        each = surroundings / (max(len(forward), len(backward)) or 1)
        update = _cost(updates[ipu]) / profile.ipus.count(ipu)
        found.append(StageTime(stage, ipu, blocks, *costs, each, update, sum(costs) + each))
    return found


def with_stage_costs(profile: Profile, stages: Sequence[StageTime]) -> Profile:
    """Return the profile with the `ns` of operations scaled so that those of a piece add up to its cost in
    `stages`. Single operations were measured in one step, but a stage's cost comes from all steps."""
    ns, calls = defaultdict(int), defaultdict(int)
    for operation in profile.operations:
        ns[operation.piece] += operation.ns
        calls[operation.piece] = max(calls[operation.piece], operation.calls)
    factors = []
    for index, piece in enumerate(profile.pieces):
        stage = stages[piece.stage]
        cost = (stage.forward if piece.phase == "F" else stage.backward) * calls[index]
        factors.append(cost / ns[index] if cost and ns[index] else 1.0)
    operations = (row._replace(ns=round(row.ns * factors[row.piece])) for row in profile.operations)
    return replace(profile, operations=tuple(operations))


def spread(events: list[Event]) -> float:
    """Return the median over pieces of `spread_of` a piece's costs; 0 if no piece ran four times."""
    costs: dict[tuple[str, int], list[int]] = defaultdict(list)
    for event in events:
        if event.kind == "compute":
            costs[event.phase, event.stage].append(event.cost)
    return _median([spread_of(values) for values in costs.values() if len(values) >= 4])


def spread_of(values: Sequence[float]) -> float:
    """Return half of the interquartile range as a share of the median; 0 for fewer than four values."""
    if len(values) < 4 or not (middle := median(values)):
        return 0.0
    low, _, high = quantiles(values, n=4)
    return (high - low) / 2 / middle


def _cost(events: Sequence[Event]) -> float:
    """Return the cost in ns of an instruction, given its runs: the median over steps of each step's mean
    cost, because caches are colder for the first micro-batch of each step. The result is at least the length
    of the fastest run, since an instruction may itself wait (for I/O, say); 0 without runs."""
    if not events:
        return 0.0
    fastest = min(event.end - event.start for event in events)
    return max(_median_of_steps((event, event.cost) for event in events), fastest)


def _median_of_steps(values: Iterable[tuple[Event, float]]) -> float:
    """Return the median over steps of the mean of each step's values."""
    steps: dict[tuple[int, int], list[float]] = defaultdict(list)
    for event, value in values:
        steps[event.call, event.step].append(value)
    return _median([fmean(own) for own in steps.values()])


def _median(values: Sequence[float]) -> float:
    """Return the median; 0 without values."""
    return median(values) if values else 0.0


def _without_contention(profile: Profile, events: Sequence[Event]) -> Iterator[Event]:
    """Yield each event, its computing time divided by a measured slowdown (`sharing`; if missing: 1): cores
    that compute at the same time slow each other down, since they share memory and Python's lock."""
    factors = {count: factor for count, *_, factor in profile.facts.get("sharing", [])}
    cores, slower = max(factors.items(), default=(1, 1.0))
    work = [event for event in events if event.computed]
    changes = sorted([(event.start, 1) for event in work] + [(event.end, -1) for event in work])
    # At each time, the cores' computing time before it (`areas`), and the cores that compute then (`busy`).
    times, areas, busy = ([0] for _ in range(3))
    for time, change in changes:
        areas.append(areas[-1] + busy[-1] * (time - times[-1]))
        times.append(time)
        busy.append(busy[-1] + change)

    def area(time: int) -> float:
        place = bisect_right(times, time) - 1
        return areas[place] + busy[place] * (time - times[place])

    for event in events:
        if slower > 1 and event.computed:
            others = (area(event.end) - area(event.start)) / (event.end - event.start or 1) - 1
            factor = 1 + (slower - 1) * max(0.0, others) / (cores - 1)
            alone = max(1, round(event.computed / factor))
            event = event._replace(computed=alone, end=event.end - event.computed + alone)
        yield event


# ---- the step for virtual time ---------------------------------------------------------------------------


def step_of(profile: Profile, events: list[Event], times: list[StageTime]) -> StepModel:
    """Return the model of a step for the simulation in virtual time, with measured costs."""
    costs, updates = {}, defaultdict(float)
    for time in times:
        # `around` is added to both phases in proportion.
        stretch = time.total / (time.forward + time.backward or 1.0)
        costs["F", time.stage], costs["B", time.stage] = time.forward * stretch, time.backward * stretch
        updates[time.ipu] += time.update
    sharing = profile.facts.get("sharing", [])
    return StepModel.of(
        profile,
        costs,
        updates=updates,
        micro_batches=profile.facts.get("schedule_micro_batches", 1),
        replicas=profile.counts.get("replicas", 1),
        ordered=frozenset(event.stage for event in events if event.kind == "keep"),
        between=_gap_of_tasks(events),
        fixed=_ns_outside_steps(profile),
        sharing={count: (low, high) for count, low, high, _ in sharing},
    )


def _gap_of_tasks(events: list[Event]) -> float:
    """Return the ns between two tasks of a core if the next task is ready; 0 for fewer than four gaps. With
    one core this is the typical gap; with several, the lower quartile, since longer gaps include waits."""
    cores: dict[int, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.start):
        cores[event.core].append(event)
    gaps = [
        (later, later.start - earlier.end)
        for core, own in cores.items()
        for earlier, later in pairwise(own)
        if core >= 0
        and later.start > earlier.end
        and (earlier.call, earlier.step) == (later.call, later.step)
    ]
    if len(gaps) < 4:
        return 0.0
    return _median_of_steps(gaps) if len(cores) == 1 else quantiles([gap for _, gap in gaps], n=4)[0]


def _ns_outside_steps(profile: Profile) -> float:
    """Return the ns per step that a call spends outside its steps: the median over calls whose steps were all
    recorded, without the first call; 0 without such calls."""
    spans: dict[tuple[int, int], list[int]] = defaultdict(list)
    for track in profile.tracks:
        end = max((end for _, end in track.spans()), default=track.start)
        spans[track.call, track.step] += [track.start, end]
    found = []
    for call in profile.calls[1:]:  # without the first call, in which memory is cold
        own = [max(span) - min(span) for (number, _), span in spans.items() if number == call.call]
        if call.steps and len(own) == call.steps:
            found.append((call.end - call.start - sum(own)) / call.steps)
    return max(0.0, _median(found))
