"""Checks a schedule as a pure function: is every action there once, and can all of them run?

Schedules have hundreds of thousands of actions, so inside this file a number stands for each: first all
forwards, then all backwards, each by stage and then by micro-batch.
"""

from __future__ import annotations

from collections import deque

from ...errors import ScheduleError
from ...ir import Action, Schedule


class _Numbers:
    """The actions of a schedule as numbers, and what each of them needs."""

    def __init__(self, schedule: Schedule) -> None:
        self.gap = schedule.micro_batches
        self.size = schedule.stages * self.gap  # of the forwards
        self.tail = self.size - self.gap  # the last stage's first forward
        self.final = (
            self.size if schedule.training else self.tail
        )  # the action after which a micro-batch is gone
        self.in_flight = schedule.in_flight
        self.rows = {ipu: [self.of(*action) for action in row] for ipu, row in schedule.rows.items()}

    def of(self, phase: str, stage: int, micro_batch: int) -> int:
        return (self.size if phase == "B" else 0) + stage * self.gap + micro_batch

    def action(self, number: int) -> Action:
        stage, micro_batch = divmod(number % self.size, self.gap)
        return Action("B" if number >= self.size else "F", stage, micro_batch)

    def needs(self, number: int) -> tuple[int, ...]:
        """What must be done before."""
        forward = number - self.size
        if forward >= 0:  # a backward: its forward, and the next stage's backward
            return (forward, number + self.gap) if forward < self.tail else (forward,)
        if number >= self.gap:
            return (number - self.gap,)
        gone = number - self.in_flight
        return (self.final + gone,) if gone >= 0 else ()


def _simulate(schedule: Schedule, numbers: _Numbers) -> list[int]:
    done = [-1] * (2 * numbers.size)
    position, free = dict.fromkeys(numbers.rows, 0), dict.fromkeys(numbers.rows, 0)
    waiting: dict[int, list[int]] = {}  # action -> ipus whose next action needs it
    runnable = deque(numbers.rows)
    while runnable:
        ipu = runnable.popleft()
        row, at, tick = numbers.rows[ipu], position[ipu], free[ipu]
        while at < len(row):
            number = row[at]
            for need in numbers.needs(number):
                if done[need] < 0:
                    waiting.setdefault(need, []).append(ipu)
                    break
                if done[need] >= tick:
                    tick = done[need] + 1
            else:
                done[number] = tick
                if number in waiting:
                    runnable.extend(waiting.pop(number))
                at, tick = at + 1, tick + 1
                continue
            break
        position[ipu], free[ipu] = at, tick
    stuck = {ipu: numbers.rows[ipu][at] for ipu, at in position.items() if at < len(numbers.rows[ipu])}
    if stuck:
        lines = "\n".join(
            f"  ipu {ipu} waits at {numbers.action(number)} for "
            + ", ".join(str(numbers.action(need)) for need in numbers.needs(number) if done[need] < 0)
            for ipu, number in stuck.items()
        )
        raise ScheduleError(f"deadlock: no ipu can go on\n{lines}")
    return done


def ticks(schedule: Schedule) -> dict[Action, int]:
    """When each action runs if each takes one tick and ipus wait for nothing but their needs.

    Raises:
        ScheduleError: some actions wait for each other, or for one that is in no row
    """
    numbers = _Numbers(schedule)
    done = _simulate(schedule, numbers)
    return {action: done[numbers.of(*action)] for row in schedule.rows.values() for action in row}


def check(schedule: Schedule) -> None:
    """Raises ScheduleError unless each action of the step is in a row, once, and all can run."""
    strays = [
        action
        for row in schedule.rows.values()
        for action in row
        if action.stage >= schedule.stages
        or action.micro_batch >= schedule.micro_batches
        or (action.phase == "B" and not schedule.training)
    ]
    faults = [f"{action} does not belong" for action in strays]
    if not faults:
        numbers = _Numbers(schedule)
        times = [0] * (2 * numbers.size)
        for row in numbers.rows.values():
            for number in row:
                times[number] += 1
        wanted = times if schedule.training else times[: numbers.size]
        faults = [f"{numbers.action(i)} is missing" for i, n in enumerate(wanted) if n == 0]
        faults += [f"{numbers.action(i)} is there {n} times" for i, n in enumerate(wanted) if n > 1]
    if faults:
        raise ScheduleError("incomplete schedule: " + "; ".join(faults[:8]))
    _simulate(schedule, numbers)
