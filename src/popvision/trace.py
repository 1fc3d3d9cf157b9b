"""Time: who worked when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from popengine.profile import Event, Profile


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
