"""Virtual time: simulate when tasks run, from their costs and dependencies. No tensors, threads or clocks.

The simulation draws schedules, finds deadlocks, and predicts the time of a step on other devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush


@dataclass(frozen=True)
class Timeline:
    """The start, end and device of each task. Tasks in a deadlock have device -1, and start and end at 0."""

    starts: list[float]
    ends: list[float]
    devices: list[int]  # of each task
    order: list[int]  # the tasks, by start
    count: int  # the number of devices

    @property
    def length(self) -> float:
        """Return the end of the last task."""
        return max(self.ends, default=0)

    @property
    def busy(self) -> float:
        """Return the sum of all tasks' durations."""
        return sum(self.ends) - sum(self.starts)

    @property
    def bubble(self) -> float:
        """Return the share of all devices' time in which they are idle, from 0 to 1."""
        return 1 - self.busy / (self.length * self.count) if self.length else 0.0


def simulate(
    after: Sequence[Sequence[int]], costs: Sequence[float], devices: int | Sequence[int]
) -> Timeline:
    """Simulate tasks: a free device runs the first of its ready tasks, in the order of the arguments.

    Args:
        after:   for each task, the tasks that must end before it begins
        costs:   the time of each task
        devices: the number of devices that share all tasks; or the device of each task
    """
    size = len(after)
    followers: list[list[int]] = [[] for _ in range(size)]
    for task, needs in enumerate(after):
        for need in needs:
            followers[need].append(task)
    waits_for = [len(needs) for needs in after]
    owner = [0] * size if isinstance(devices, int) else devices
    count = devices if isinstance(devices, int) else len(set(devices))
    free: dict[int, list[int]] = {device: [device] for device in set(owner)}
    if isinstance(devices, int):
        free = {0: list(range(devices))}
    ready: dict[int, list[int]] = {device: [] for device in free}
    for task, missing in enumerate(waits_for):
        if not missing:
            ready[owner[task]].append(task)  # in order, so it is a heap
    starts, ends, places, order = [0.0] * size, [0.0] * size, [-1] * size, []
    running: list[tuple[float, int]] = []  # end and task
    now, woken = 0.0, set(free)
    while True:
        for group in sorted(woken):
            idle, waiting = free[group], ready[group]
            while idle and waiting:
                task = heappop(waiting)
                starts[task], ends[task], places[task] = now, now + costs[task], heappop(idle)
                heappush(running, (ends[task], task))
                order.append(task)
        if not running:
            return Timeline(starts, ends, places, order, count)
        now, woken = running[0][0], set()
        while running and running[0][0] == now:
            task = heappop(running)[1]
            heappush(free[owner[task]], places[task])
            woken.add(owner[task])
            for follower in followers[task]:
                waits_for[follower] -= 1
                if not waits_for[follower]:
                    heappush(ready[owner[follower]], follower)
                    woken.add(owner[follower])
