"""Virtual time: when tasks would run if each took so long, and devices waited for nothing but what a task needs.

No tensors, no threads, no clock. It draws schedules, proves that they come to an end, and says how long a step
takes on devices that are not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush


@dataclass(frozen=True)
class Timeline:
    """When each task runs, and where.

    Tasks that wait for each other for ever have no device (-1), and no time.
    """

    starts: list[float]
    ends: list[float]
    devices: list[int]  # of each task
    order: list[int]  # the tasks, as they begin
    count: int  # of all devices

    @property
    def length(self) -> float:
        """Until the last task has ended."""
        return max(self.ends, default=0)

    @property
    def busy(self) -> float:
        """The time of all devices in which they have a task."""
        return sum(self.ends) - sum(self.starts)

    @property
    def bubble(self) -> float:
        """The share of the devices' time in which they wait."""
        return 1 - self.busy / (self.length * self.count) if self.length else 0.0


def simulate(
    after: Sequence[Sequence[int]], costs: Sequence[float], devices: int | Sequence[int]
) -> Timeline:
    """Run tasks in virtual time. A device that is free takes the first task that is ready, in the order given.

    Args:
        after:   for each task, the numbers of those that have to end before it begins
        costs:   how long each takes
        devices: how many share all tasks; or the device of each task
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
