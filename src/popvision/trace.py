"""Time: who worked when, and what each stage costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles

from popengine.profile import Event, Profile

from .undisturbed import undisturbed
from .virtual import Step


@dataclass(frozen=True)
class Usage:
    """How one ipu spent the steps, in ns."""

    ipu: int
    replica: int
    forward: int
    backward: int
    update: int
    moving: int  # loads, sends, sums, stores and so on
    waiting: int


@dataclass(frozen=True)
class StageTime:
    """What one micro-batch costs in a stage, in ns; `around` is what surrounds the computation."""

    stage: int
    ipu: int
    blocks: str
    forward: float
    backward: float
    around: float
    update: float  # of one weight update

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.around


def steady(profile: Profile) -> list[Event]:
    """The events of whole steps, without the first two if there are more: in them caches are cold and the
    recorder looks closer."""
    whole, seen = whole_steps(profile), {(track.call, track.step) for track in profile.tracks}
    warm = [key for key in whole if key not in sorted(seen)[:2]] or whole[-1:]
    wanted = set(warm) or seen  # of a step that was cut off there is only the beginning: see `cut_off`
    return [event for event in profile.events() if (event.call, event.step) in wanted]


def whole_steps(profile: Profile) -> list[tuple[int, int]]:
    """Call and step of those of which everything was kept, on all ipus."""
    places = defaultdict(set)
    for track in profile.tracks:
        if 2 * len(track.durations) == len(profile.programs[track.ipu]):
            places[track.call, track.step].add((track.replica, track.ipu))
    everywhere = {(track.replica, track.ipu) for track in profile.tracks}
    return sorted(key for key, value in places.items() if value == everywhere)


def cut_off(profile: Profile) -> bool:
    """Whether only the beginnings of steps were kept: what ipus did there says nothing of the whole."""
    return bool(profile.tracks) and not whole_steps(profile)


def usage(events: list[Event]) -> list[Usage]:
    """What each ipu did within the steps: a step begins with its first computation on any ipu, and ends with
    the last instruction that isn't waiting."""
    steps: dict[tuple[int, int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event.kind != "receive":
            steps[event.call, event.step, event.replica].append(event)
    window: dict[int, int] = defaultdict(int)  # by replica
    spent: dict[tuple[int, int], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for (_, _, replica), working in steps.items():
        computing = [event.start for event in working if event.kind == "compute"]
        start = min(computing, default=min(event.start for event in working))
        window[replica] += max(event.end for event in working) - start
        for event in working:
            lasted = max(0, event.end - max(start, event.start))
            kind = event.phase if event.kind == "compute" else event.kind
            spent[replica, event.ipu][kind if kind in ("F", "B", "update") else "moving"] += lasted
    found = []
    for (replica, ipu), ns in sorted(spent.items()):
        waiting = max(0, window[replica] - sum(ns.values()))
        found.append(Usage(ipu, replica, ns["F"], ns["B"], ns["update"], ns["moving"], waiting))
    return found


def ideal_bubble(profile: Profile) -> float | None:
    """The idle share of the schedule if every action took one tick: (p-1)/(m+p-1) for a pipeline."""
    length, actions = profile.facts.get("schedule_length"), profile.facts.get("schedule_actions")
    if not length or not actions:
        return None
    return 1 - actions / (length * len(profile.devices))


def measured_bubble(usages: list[Usage]) -> float | None:
    """The share of the ipus' time in which they waited."""
    waiting = sum(use.waiting for use in usages)
    busy = sum(use.forward + use.backward + use.update + use.moving for use in usages)
    return waiting / (waiting + busy) if busy else None


def stage_times(profile: Profile, events: list[Event]) -> list[StageTime]:
    """What each stage costs for one micro-batch. A step's update is shared among the stages of an ipu."""
    computed: dict[tuple[str, int], list[Event]] = defaultdict(list)
    around: dict[int, dict[tuple[str, str, int], list[Event]]] = defaultdict(lambda: defaultdict(list))
    updates: dict[int, list[Event]] = defaultdict(list)
    for event in undisturbed(profile, events):
        if event.kind == "compute":
            computed[event.phase, event.stage].append(event)
        elif event.kind == "update":
            updates[event.ipu].append(event)
        elif event.kind != "receive" and event.stage >= 0:
            around[event.stage][event.phase, event.kind, event.peer].append(event)
    found = []
    for stage, (ipu, blocks) in enumerate(zip(profile.ipus, profile.stages, strict=True)):
        forward, backward = computed["F", stage], computed["B", stage]
        runs = max(len(forward), len(backward)) or 1
        surroundings = sum(_cost(same) * len(same) for same in around[stage].values()) / runs
        update = _cost(updates[ipu]) / profile.ipus.count(ipu)
        found.append(StageTime(stage, ipu, blocks, _cost(forward), _cost(backward), surroundings, update))
    return found


def _cost(events: Sequence[Event]) -> float:
    """What an instruction costs that ran so often: the median of the time that a core computed, so that what other
    programs did meanwhile does not count; but never less than its fastest run, for it may wait by itself."""
    if not events:
        return 0.0
    return float(
        max(median(event.cost for event in events), min(event.end - event.start for event in events))
    )


def _median(values: Sequence[float]) -> float:
    return median(values) if values else 0.0


def spread(events: list[Event]) -> float:
    """How far apart the costs of equal computations are; of all pieces the middle one."""
    costs: dict[tuple[str, int], list[int]] = defaultdict(list)
    for event in events:
        if event.kind == "compute":
            costs[event.phase, event.stage].append(event.cost)
    return _median([spread_of(values) for values in costs.values() if len(values) >= 4])


def spread_of(values: Sequence[float]) -> float:
    """Half of the range that the middle half of them takes, as a share of their median; 0 for fewer than four."""
    if len(values) < 4 or not (middle := median(values)):
        return 0.0
    low, _, high = quantiles(values, n=4)
    return (high - low) / 2 / middle


def step_of(profile: Profile, events: list[Event], times: list[StageTime]) -> Step:
    """The step that was measured, for virtual time; what surrounds a computation is spread over both phases."""
    forward, backward = [], []
    for time in times:
        factor = 1 + time.around / (time.forward + time.backward or 1.0)
        forward.append(time.forward * factor)
        backward.append(time.backward * factor)
    updates: dict[int, float] = defaultdict(float)
    for time in times:
        updates[time.ipu] += time.update
    return Step(
        profile.ipus,
        tuple(forward),
        tuple(backward) if profile.training else (),
        dict(updates),
        profile.facts.get("schedule_micro_batches", 1),
        profile.counts.get("replicas", 1),
        profile.facts.get("mode") != "pipelined",
        frozenset(event.stage for event in events if event.kind == "keep"),
        _between(events),
        _fixed(profile),
        {count: (low, high) for count, low, high, _ in profile.facts.get("sharing", [])},
    )


def _between(events: list[Event]) -> float:
    """ns between two tasks of a core that has the next one at once: a quarter of the times are shorter."""
    cores: dict[int, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.start):
        cores[event.core].append(event)
    gaps = [
        later.start - earlier.end
        for core, own in cores.items()
        for earlier, later in pairwise(own)
        if core >= 0
        and later.start > earlier.end
        and (earlier.call, earlier.step) == (later.call, later.step)
    ]
    return quantiles(gaps, n=4)[0] if len(gaps) > 3 else 0.0


def _fixed(profile: Profile) -> float:
    """ns of a call outside its steps, a step."""
    spans: dict[tuple[int, int], list[int]] = defaultdict(list)
    for track in profile.tracks:
        end = max((end for _, end in track.spans()), default=track.start)
        spans[track.call, track.step] += [track.start, end]
    found = []
    for call in profile.calls[1:]:  # the first one pays for cold memory
        own = [max(span) - min(span) for (number, _), span in spans.items() if number == call.call]
        if call.steps and len(own) == call.steps:
            found.append((call.end - call.start - sum(own)) / call.steps)
    return max(0.0, _median(found))


def block_shares(profile: Profile) -> dict[tuple[str, int, str], float]:
    """(phase, stage, block) -> its share of that piece's time."""
    pieces = profile.pieces
    ns: dict[tuple[str, int, str], int] = defaultdict(int)
    for operation in profile.operations:
        piece = pieces[operation.piece]
        ns[piece.phase, piece.stage, operation.block] += operation.ns
    return {key: value / (_sum(ns, key[:2]) or 1) for key, value in ns.items()}


def _sum(ns: Mapping[tuple[str, int, str], int], place: tuple[str, int]) -> int:
    return sum(value for key, value in ns.items() if key[:2] == place)
