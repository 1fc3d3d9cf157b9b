"""Times: the steps after warm-up, the activities of ipus in them, and the cost of each stage's computation.

A cost is the CPU time of a thread, so that other programs do not count. Spans (throughput, the bubble, the
trace) are in wall-clock time.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median, quantiles
from typing import TypeVar

from popengine.profile import Event, Profile

from .virtual import StepModel

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")

# ---- steps -----------------------------------------------------------------------------------------------


def steady_events(profile: Profile) -> list[Event]:
    """Return the events of all steps that were recorded as a whole, except the run's first two steps, in
    which caches are cold and single operations are measured.

    If no other step is whole, return the events of the last whole step; if no step is whole, all events.
    """
    whole, seen = whole_steps(profile), {(track.call, track.step) for track in profile.tracks}
    wanted = (set(whole) - {*sorted(seen)[:2]}) or set(whole[-1:]) or seen
    return [event for event in profile.events() if (event.call, event.step) in wanted]


def whole_steps(profile: Profile) -> list[tuple[int, int]]:
    """Return (call, step) of each step of which every instruction of every ipu and replica was recorded."""
    places = defaultdict(set)
    for track in profile.tracks:
        if 2 * len(track.durations) == len(profile.programs[track.ipu]):
            places[track.call, track.step].add((track.replica, track.ipu))
    everywhere = {(track.replica, track.ipu) for track in profile.tracks}
    return sorted(key for key, value in places.items() if value == everywhere)


# ---- what ipus did ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Usage:
    """The ns that one ipu of one replica spent in each activity, over all steps."""

    ipu: int
    replica: int
    forward: int
    backward: int
    update: int
    moving: int  # in all other instructions: loads, sends, sums, stores
    waiting: int


def usages(events: list[Event]) -> list[Usage]:
    """Return the usage of each ipu of each replica. Receives and idle time are `waiting`. A replica's step
    begins with its first computation on any ipu, and ends with its last instruction that is no receive."""
    window: Counter[int] = Counter()  # by replica
    spent: dict[tuple[int, int], Counter[str]] = defaultdict(Counter)
    busy = [event for event in events if event.kind != "receive"]
    for (_, _, replica), working in _group_by(busy, lambda one: (one.call, one.step, one.replica)).items():
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
    """Return the share of the ipus' time that is idle in a schedule in which each action takes the same time:
    (p-1)/(m+p-1) for a pipeline of p stages on p ipus and m micro-batches. None if the schedule is unknown."""
    length, actions = (profile.facts.get(name, 0) for name in ("schedule_length", "schedule_actions"))
    return 1 - actions / (length * len(profile.devices)) if length and actions else None


def measured_bubble(usages: list[Usage]) -> float | None:
    """Return the share of time in which ipus waited, over all `usages`; None if no ipu did anything."""
    waiting = sum(use.waiting for use in usages)
    busy = sum(use.forward + use.backward + use.update + use.moving for use in usages)
    return waiting / (waiting + busy) if busy else None


def core_share(events: list[Event]) -> float | None:
    """Return the fraction of the computations' time in which their thread ran on a core; None if that was not
    measured. The rest is waiting, mostly for a core that another program used, or for Python's lock."""
    computing = [event for event in events if event.computed]
    spans = sum(event.end - event.start for event in computing)
    return min(1.0, sum(event.computed for event in computing) / spans) if spans else None


# ---- what a stage costs ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageTime:
    """The cost of one micro-batch in a stage, in ns."""

    stage: int
    ipu: int
    blocks: str  # names, with commas
    forward: float
    backward: float
    around: float  # loads, sends, sums and other instructions except receives
    update: float  # of one weight update
    total: float  # forward, backward and around


def stage_times(profile: Profile, events: list[Event]) -> list[StageTime]:
    """Return the cost of each stage. The weight update of an ipu is divided equally among its stages."""
    alone = _without_contention(profile, events)
    runs = _group_by(alone, lambda event: (event.kind, event.ipu, event.stage, event.phase, event.peer))
    found = []
    for stage, (ipu, blocks) in enumerate(zip(profile.ipus, profile.stages, strict=True)):
        forward, backward = (runs.get(("compute", ipu, stage, phase, -1), []) for phase in "FB")
        costs = _instruction_cost(forward), _instruction_cost(backward)
        around = sum(
            _instruction_cost(same) * len(same)
            for (kind, _, its_stage, *_), same in runs.items()
            if its_stage == stage and kind not in ("compute", "update", "receive")
        ) / (max(len(forward), len(backward)) or 1)
        update = _instruction_cost(runs.get(("update", ipu, -1, "", -1), [])) / profile.ipus.count(ipu)
        found.append(StageTime(stage, ipu, blocks, *costs, around, update, sum(costs) + around))
    return found


def with_stage_costs(profile: Profile, stages: Sequence[StageTime]) -> Profile:
    """Return the profile with the `ns` of all operations scaled, so that the operations of a piece add up to
    the piece's cost in `stages`. (Operations were measured in one step, but stages in all steps.)"""
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


def cost_spread(events: list[Event]) -> float:
    """Return the spread (see `relative_spread`) of the costs of one piece's runs: the median over all pieces
    that ran at least four times; 0 without such pieces."""
    computing = (event for event in events if event.kind == "compute")
    runs = _group_by(computing, lambda event: (event.phase, event.stage)).values()
    found = [relative_spread([event.cost for event in same]) for same in runs if len(same) >= 4]
    return median(found or [0.0])


def relative_spread(values: Sequence[float]) -> float:
    """Return half of the interquartile range, divided by the median; 0 for fewer than four values."""
    if len(values) < 4 or not (middle := median(values)):
        return 0.0
    low, _, high = quantiles(values, n=4)
    return (high - low) / 2 / middle


def _instruction_cost(events: Sequence[Event]) -> float:
    """Return the cost in ns of an instruction; 0 without events. `events` are its runs.

    That is the median over steps of the mean cost in a step (caches are colder for the first micro-batch of
    each step). `Event.cost` leaves out waits, also those inside an instruction (for I/O, say), which are part
    of its cost; so the result is at least the duration of the fastest run.
    """
    if not events:
        return 0.0
    fastest = min(event.end - event.start for event in events)
    return max(_median_of_steps((event, event.cost) for event in events), fastest)


def _median_of_steps(values: Iterable[tuple[Event, float]]) -> float:
    """Return the median over steps of each step's mean. `values`: at least one pair (event, value); a
    value belongs to the step of its event."""
    steps = _group_by(values, lambda pair: (pair[0].call, pair[0].step)).values()
    return median([fmean(value for _, value in own) for own in steps])


def _group_by(values: Iterable[_V], key: Callable[[_V], _K]) -> dict[_K, list[_V]]:
    """Return lists of the values with the same key, by key, in the order of `values`."""
    found = defaultdict(list)
    for value in values:
        found[key(value)].append(value)
    return found


def _without_contention(profile: Profile, events: Sequence[Event]) -> Iterator[Event]:
    """Yield each event with the computing time that it would have had if no other core had computed. (Cores
    share memory and Python's lock. The measured slowdown is the fact `sharing`; 1 without it.)"""
    factors = {count: factor for count, *_, factor in profile.facts.get("sharing", [])}
    cores, slower = max(factors.items(), default=(1, 1.0))
    work = [event for event in events if event.computed]
    changes = sorted([(event.start, 1) for event in work] + [(event.end, -1) for event in work])
    areas, area, busy, before = {}, 0, 0, 0  # `areas`: by time, the computing time of all cores before it
    for time, change in changes:
        areas[time] = area = area + busy * (time - before)
        busy, before = busy + change, time
    for event in events:
        if slower > 1 and event.computed:
            others = (areas[event.end] - areas[event.start]) / (event.end - event.start or 1) - 1
            factor = 1 + (slower - 1) * max(0.0, others) / (cores - 1)
            alone = max(1, round(event.computed / factor))
            event = event._replace(computed=alone, end=event.end - event.computed + alone)
        yield event


# ---- the step for virtual time ---------------------------------------------------------------------------


def step_model(profile: Profile, events: list[Event], times: list[StageTime]) -> StepModel:
    """Return the model of a step with measured costs, for the simulation in `virtual`."""
    costs, updates = {}, defaultdict(float)
    for time in times:
        stretch = time.total / (time.forward + time.backward or 1.0)  # adds `around` in proportion
        costs["F", time.stage], costs["B", time.stage] = time.forward * stretch, time.backward * stretch
        updates[time.ipu] += time.update
    sharing = profile.facts.get("sharing", [])
    return StepModel.of(
        profile,
        costs,
        updates=updates,
        micro_batches=profile.facts.get("schedule_micro_batches", 1),
        replicas=profile.counts.get("replicas", 1),
        ordered={event.stage for event in events if event.kind == "keep"},
        between=_ns_between_tasks(events),
        fixed=_ns_outside_steps(profile),
        sharing={count: (low, high) for count, low, high, _ in sharing},
    )


def _ns_between_tasks(events: list[Event]) -> float:
    """Return the ns from the end of a task to the start of the next task on the same core, if that task does
    not have to wait for other cores; 0 if fewer than four such gaps were recorded.

    With one core it is the median gap; with several the lower quartile, since longer gaps include waits.
    """
    cores = _group_by(sorted(events, key=lambda event: event.start), lambda event: event.core)
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
    recorded, except the first call, in which memory is cold; 0 without such calls."""
    spans: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))  # by call and step
    for track in profile.tracks:
        spans[track.call][track.step] += [track.start, *(end for _, end in track.spans())]
    found = []
    for call in profile.calls[1:]:
        steps = [max(times) - min(times) for times in spans[call.call].values()]
        if steps and len(steps) == call.steps:
            found.append((call.end - call.start - sum(steps)) / call.steps)
    return max(0.0, median(found or [0.0]))
