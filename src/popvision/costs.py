"""What a step's tasks cost without a recorder, as it was measured with one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, quantiles

from popengine.profile import Event, Profile

from .memory import is_offloaded
from .undisturbed import undisturbed
from .virtual import Step


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


def stage_times(profile: Profile, events: list[Event]) -> list[StageTime]:
    """What each stage costs for one micro-batch. A step's update is shared among the stages of an ipu."""
    recording = _recording(profile)[0]
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
        surroundings = sum(_cost(same, recording) * len(same) for same in around[stage].values()) / runs
        update = _cost(updates[ipu]) / profile.ipus.count(ipu)
        found.append(StageTime(stage, ipu, blocks, _cost(forward), _cost(backward), surroundings, update))
    return found


def _cost(events: Sequence[Event], recording: float = 0.0) -> float:
    """What an instruction costs that ran so often, in ns: the time that a core computed, so that what other programs
    did meanwhile does not count; but never less than its fastest run, for it may wait by itself. A step's first
    micro-batch finds colder caches, and a real step has it too: so of each step the mean, and of these the median.

    Args:
        recording: ns that the recorder took within what was not measured as computed
    """
    if not events:
        return 0.0
    least = min(event.end - event.start for event in events)
    return max(0.0, max(_of_steps((event, event.cost) for event in events), least) - recording)


def _of_steps(values: Iterable[tuple[Event, float]]) -> float:
    """The median of the steps' means."""
    steps: dict[tuple[int, int], list[float]] = defaultdict(list)
    for event, value in values:
        steps[event.call, event.step].append(value)
    return _median([fmean(own) for own in steps.values()])


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
        _between(events, _recording(profile)[1]),
        _fixed(profile),
        {count: (low, high) for count, low, high, _ in profile.facts.get("sharing", [])},
        moves(profile) if is_offloaded(profile) else {},
    )


def moves(profile: Profile) -> dict[int, float]:
    """ns in which each ipu would bring its optimizer's state and take it back, if it were as near as this machine's own
    memory: no link to another memory is faster. Empty: not measured."""
    speed = profile.facts.get("copying")
    own = [row for row in profile.memory if row.replica == 0]
    return {row.ipu: 2e9 * row.optimizer / speed for row in own} if speed else {}


def _between(events: list[Event], recording: float) -> float:
    """ns between two tasks of a core that has the next one at once. One core always has; of several a quarter of the
    times are shorter, and the others hold waits.

    Args:
        recording: ns that the recorder took there
    """
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
    found = _of_steps(gaps) if len(cores) == 1 else quantiles([gap for _, gap in gaps], n=4)[0]
    return max(0.0, found - recording)


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
    return max(0.0, _median(found) - _recording(profile)[2])


def _recording(profile: Profile) -> tuple[float, float, float]:
    """ns that recording took: for an instruction, a task and a step."""
    return tuple(profile.facts.get("recording", (0.0, 0.0, 0.0)))
