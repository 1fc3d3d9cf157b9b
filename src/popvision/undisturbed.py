"""What events would have cost alone: cores that compute at the same time disturb each other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from popengine.profile import Event, Profile


def undisturbed(profile: Profile, events: Sequence[Event]) -> Iterator[Event]:
    """Each event as if it alone had been computed: cores that compute at the same time take longer, for they share
    memory and Python's lock, by a factor that was measured."""
    costs = {count: cost for count, *_, cost in profile.facts.get("sharing", [])}
    cores, cost = max(costs.items(), default=(1, 1.0))
    work = [event for event in events if event.computed]
    marks = sorted([(event.start, 1) for event in work] + [(event.end, -1) for event in work])
    times, areas, busy = [0], [0], 0  # until each time, the sum over cores of what they had computed
    for time, change in marks:
        areas.append(areas[-1] + busy * (time - times[-1]))
        times.append(time)
        busy += change

    def area(time: int) -> float:
        place = bisect_right(times, time) - 1
        if place + 1 == len(times):
            return areas[-1]
        span = times[place + 1] - times[place] or 1
        return areas[place] + (areas[place + 1] - areas[place]) * (time - times[place]) / span

    for event in events:
        if cost > 1 and event.computed:
            others = (area(event.end) - area(event.start)) / (event.end - event.start or 1) - 1
            factor = 1 + (cost - 1) * max(0.0, others) / (cores - 1)
            alone = max(1, round(event.computed / factor))
            event = event._replace(computed=alone, end=event.end - event.computed + alone)
        yield event
