"""Time: who worked when, what a step costs, and what it would cost if the stages were cut in another way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from popengine.profile import Event, Operation, Profile

Costs = Mapping[tuple[str, int], float]  # (phase, stage) -> ns of one micro-batch


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


@dataclass(frozen=True)
class Move:
    """A block given to the next stage, and how much faster a step would be."""

    block: str
    source: int
    target: int
    speedup: float


def steady(profile: Profile) -> list[Event]:
    """The events of whole steps, without the first two if there are more: in them caches are cold and the
    recorder looks closer."""
    places = defaultdict(set)
    for track in profile.tracks:
        if 2 * len(track.durations) == len(profile.programs[track.ipu]):
            places[track.call, track.step].add((track.replica, track.ipu))
    everywhere = max(map(len, places.values()), default=0)
    whole = sorted(key for key, value in places.items() if len(value) == everywhere)
    seen = {(track.call, track.step) for track in profile.tracks}
    warm = [key for key in whole if key not in sorted(seen)[:2]] or whole[-1:]
    wanted = set(warm) or seen  # of a step that was cut off there is only the beginning
    return [event for event in profile.events() if (event.call, event.step) in wanted]


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
    """The mean cost of each stage, for one micro-batch; a step's update is shared among the stages of an ipu."""
    total: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])
    around: dict[int, int] = defaultdict(int)
    updates: dict[int, list[int]] = defaultdict(list)
    for event in events:
        if event.kind == "compute":
            entry = total[event.phase, event.stage]
            entry[0] += event.end - event.start
            entry[1] += 1
        elif event.kind == "update":
            updates[event.ipu].append(event.end - event.start)
        elif event.kind != "receive" and event.stage >= 0:
            around[event.stage] += event.end - event.start
    found = []
    for stage, (ipu, blocks) in enumerate(zip(profile.ipus, profile.stages, strict=True)):
        forward, backward = total["F", stage], total["B", stage]
        update = sum(updates[ipu]) / len(updates[ipu]) if updates[ipu] else 0.0
        found.append(
            StageTime(
                stage,
                ipu,
                blocks,
                forward[0] / (forward[1] or 1),
                backward[0] / (backward[1] or 1),
                around[stage] / (max(forward[1], backward[1]) or 1),
                update / profile.ipus.count(ipu),
            )
        )
    return found


def replay(profile: Profile, costs: Costs, updates: Mapping[int, float] | None = None) -> float:
    """How long a step takes in the schedule's order if actions cost this much and ipus wait for nothing else.

    `updates`: the cost of each ipu's update at the end.
    """
    last, in_flight = len(profile.stages) - 1, profile.facts.get("in_flight", 1 << 62)
    done: dict[tuple[str, int, int], float] = {}
    free: dict[int, float] = defaultdict(float)
    for ipu, phase, stage, micro_batch, _ in profile.schedule:  # in the order of their ticks
        if phase == "B":
            need = ("B", stage + 1, micro_batch) if stage < last else ("F", stage, micro_batch)
        elif stage:
            need = ("F", stage - 1, micro_batch)
        else:  # a new micro-batch enters when another has left
            need = (
                "B" if profile.training else "F",
                0 if profile.training else last,
                micro_batch - in_flight,
            )
        start = max(free[ipu], done.get(need, 0.0))
        done[phase, stage, micro_batch] = free[ipu] = start + costs.get((phase, stage), 0.0)
    return max((free[ipu] + (updates or {}).get(ipu, 0.0) for ipu in free), default=0.0)


def costs_of(times: list[StageTime]) -> dict[tuple[str, int], float]:
    """What `replay` needs of the stages' times; the surroundings are spread over both phases."""
    costs = {}
    for time in times:
        whole = time.forward + time.backward or 1.0
        for phase, own in (("F", time.forward), ("B", time.backward)):
            costs[phase, time.stage] = own + time.around * own / whole
    return costs


def updates_of(times: list[StageTime]) -> dict[int, float]:
    updates: dict[int, float] = defaultdict(float)
    for time in times:
        updates[time.ipu] += time.update
    return dict(updates)


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


def moves(profile: Profile, times: list[StageTime]) -> list[Move]:
    """Blocks at the border of two stages that would better be in the other one, the best first."""
    costs, updates, shares = costs_of(times), updates_of(times), block_shares(profile)
    now = replay(profile, costs, updates)
    by_stage = [[block.name for block in profile.blocks if block.stage == s] for s in range(len(times))]
    found = []
    for stage, blocks in enumerate(by_stage):
        if len(blocks) < 2:  # a stage can't give its only block away
            continue
        for block, target in ((blocks[0], stage - 1), (blocks[-1], stage + 1)):
            if not 0 <= target < len(times) or profile.ipus[target] == profile.ipus[stage]:
                continue
            changed = dict(costs)
            for phase in "FB":
                moved = costs[phase, stage] * shares.get((phase, stage, block), 0.0)
                changed[phase, stage] -= moved
                changed[phase, target] += moved
            then = replay(profile, changed, updates)
            if then and now / then > 1.02:
                found.append(Move(block, stage, target, now / then))
    return sorted(found, key=lambda move: -move.speedup)


def even_cut(profile: Profile, times: list[StageTime]) -> float:
    """How much faster a step would be if all stages cost the same. 1.0: not at all."""
    costs, updates = costs_of(times), updates_of(times)
    even = {
        (phase, time.stage): sum(costs[phase, other.stage] for other in times) / len(times)
        for phase in "FB"
        for time in times
    }
    now, then = replay(profile, costs, updates), replay(profile, even, updates)
    return max(1.0, now / then) if then else 1.0


def blocks_of(operations: list[Operation]) -> list[str]:
    """The names of the blocks, in the order of the data."""
    return list(dict.fromkeys(operation.block for operation in operations))
