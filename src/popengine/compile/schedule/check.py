"""Check that a schedule has each action once, and is free of deadlocks.

Schedules have hundreds of thousands of actions, so this file numbers them, depth first: all actions of micro-batch 0 in
the order of the data, then those of micro-batch 1.
"""

from __future__ import annotations

from ...errors import ScheduleError
from ...ir import Action, Schedule
from ...virtual_time import Timeline, simulate


class Numbers:
    """The actions of a step as numbers, and what each of them needs."""

    def __init__(self, stages: int, micro_batches: int, training: bool, in_flight: int) -> None:
        self.stages, self.training, self.in_flight = stages, training, in_flight
        self.pieces = 2 * stages if training else stages  # of a micro-batch: F0 F1 ... B1 B0
        self.size = self.pieces * micro_batches

    def of(self, phase: str, stage: int, micro_batch: int) -> int:
        return micro_batch * self.pieces + (stage if phase == "F" else self.pieces - 1 - stage)

    def action(self, number: int) -> Action:
        micro_batch, piece = divmod(number, self.pieces)
        is_forward = piece < self.stages
        return Action(
            "F" if is_forward else "B", piece if is_forward else self.pieces - 1 - piece, micro_batch
        )

    def need(self, number: int) -> int:
        """Return the last action that must be done before; negative, if there is none."""
        if number % self.pieces:
            return number - 1
        return number - (self.in_flight - 1) * self.pieces - 1

    def needs(self, action: Action) -> list[Action]:
        """Return all actions that an action needs, for a message."""
        number = self.of(*action)
        found = [Action("F", action.stage, action.micro_batch)] if action.phase == "B" else []
        if (need := self.need(number)) >= 0 and self.action(need) not in found:
            found.append(self.action(need))
        return found


def timeline_of(schedule: Schedule) -> tuple[list[Action], Timeline]:
    """Return all actions, and when each runs if an action takes one tick and waits for its needs and its lane only.

    Raises:
        ScheduleError: some actions wait for each other
    """
    numbers = Numbers(schedule.stages, schedule.micro_batches, schedule.training, schedule.in_flight)
    actions = [action for row in schedule.rows.values() for action in row]
    lanes = [lane for lane, row in schedule.rows.items() for _ in row]
    place = [-1] * numbers.size
    order = [numbers.of(*action) for action in actions]
    for position, number in enumerate(order):
        place[number] = position
    needs = [numbers.need(number) for number in order]
    after = [[place[need]] if need >= 0 else [] for need in needs]
    start = 0
    for row in schedule.rows.values():
        for position in range(start + 1, start + len(row)):
            after[position].append(position - 1)
        start += len(row)
    timeline = simulate(after, [1] * len(actions), lanes)
    stuck: dict[int, Action] = {}
    for action, lane, device in zip(actions, lanes, timeline.devices, strict=True):
        if device < 0:
            stuck.setdefault(lane, action)
    if stuck:
        done = {action for action, device in zip(actions, timeline.devices, strict=True) if device >= 0}
        lines = "\n".join(
            f"  {schedule.lanes} {lane} waits at {action} for "
            + ", ".join(str(need) for need in numbers.needs(action) if need not in done)
            for lane, action in stuck.items()
        )
        raise ScheduleError(f"deadlock: no {schedule.lanes} can go on\n{lines}")
    return actions, timeline


def ticks(schedule: Schedule) -> dict[Action, int]:
    """Return the tick of each action, if each takes one tick. Raises: ScheduleError, see `timeline_of`."""
    actions, timeline = timeline_of(schedule)
    return {action: int(start) for action, start in zip(actions, timeline.starts, strict=True)}


def check(schedule: Schedule) -> None:
    """Check that each action of the step is in one of the rows, once, and that all can run. Raises: ScheduleError."""
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
        numbers = Numbers(schedule.stages, schedule.micro_batches, schedule.training, schedule.in_flight)
        times = [0] * numbers.size
        for row in schedule.rows.values():
            for action in row:
                times[numbers.of(*action)] += 1
        faults = [f"{numbers.action(i)} is missing" for i, n in enumerate(times) if n == 0]
        faults += [f"{numbers.action(i)} is there {n} times" for i, n in enumerate(times) if n > 1]
    if faults:
        raise ScheduleError("incomplete schedule: " + "; ".join(faults[:8]))
    timeline_of(schedule)
