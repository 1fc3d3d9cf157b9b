"""Checks a schedule as a pure function: is every action there once, and can all of them run?"""

from __future__ import annotations

from collections import Counter, deque

from ...errors import ScheduleError
from ...ir import Action, Schedule


def needs(action: Action, schedule: Schedule) -> list[Action]:
    """What must be done before an action."""
    phase, stage, micro_batch = action.phase, action.stage, action.micro_batch
    last = schedule.stages - 1
    if phase == "B":
        return [
            Action("F", stage, micro_batch),
            *([Action("B", stage + 1, micro_batch)] if stage < last else []),
        ]
    if stage:
        return [Action("F", stage - 1, micro_batch)]
    if micro_batch < schedule.in_flight:
        return []
    gone = micro_batch - schedule.in_flight
    return [Action("B", 0, gone) if schedule.training else Action("F", last, gone)]


def ticks(schedule: Schedule) -> dict[Action, int]:
    """When each action runs if each takes one tick and ipus wait for nothing but their needs.

    Raises:
        ScheduleError: some actions wait for each other, or for one that is in no row
    """
    done: dict[Action, int] = {}
    free = {ipu: 0 for ipu in schedule.rows}
    left = {ipu: deque(row) for ipu, row in schedule.rows.items()}
    waiting: dict[Action, list[int]] = {}  # action -> ipus whose next action needs it
    runnable = deque(schedule.rows)
    while runnable:
        ipu = runnable.popleft()
        while left[ipu]:
            action = left[ipu][0]
            required = needs(action, schedule)
            missing = next((need for need in required if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(ipu)
                break
            done[action] = max([free[ipu], *(done[need] + 1 for need in required)])
            free[ipu] = done[action] + 1
            left[ipu].popleft()
            runnable.extend(waiting.pop(action, ()))
    stuck = {ipu: row[0] for ipu, row in left.items() if row}
    if stuck:
        lines = "\n".join(
            f"  ipu {ipu} waits at {action} for "
            + ", ".join(str(need) for need in needs(action, schedule) if need not in done)
            for ipu, action in stuck.items()
        )
        raise ScheduleError(f"deadlock: no ipu can go on\n{lines}")
    return done


def check(schedule: Schedule) -> None:
    """Raises ScheduleError unless each action of the step is in a row, once, and all can run."""
    count = Counter(action for row in schedule.rows.values() for action in row)
    wanted = {
        Action(phase, stage, micro_batch)
        for phase in (("F", "B") if schedule.training else ("F",))
        for stage in range(schedule.stages)
        for micro_batch in range(schedule.micro_batches)
    }
    faults = [f"{action} is missing" for action in sorted(wanted - set(count), key=str)]
    faults += [f"{action} does not belong" for action in sorted(set(count) - wanted, key=str)]
    faults += [f"{action} is there {times} times" for action, times in count.items() if times > 1]
    if faults:
        raise ScheduleError("incomplete schedule: " + "; ".join(faults[:8]))
    ticks(schedule)
