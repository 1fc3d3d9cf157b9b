"""Draw a schedule as a grid: one row for each lane, one column for each tick."""

from __future__ import annotations

from ...ir import Schedule
from .check import ticks


def draw(schedule: Schedule) -> str:
    """Return the grid that tests and errors print. With several stages in a lane, the stage comes before the dot.

    F2 is the forward of micro-batch 2, B1.2 the backward of stage 1 on micro-batch 2, `..` an idle tick.
    """
    when = ticks(schedule)
    shared = any(len({action.stage for action in row}) > 1 for row in schedule.rows.values())
    length = max(when.values(), default=-1) + 1
    rows = {}
    for lane, row in schedule.rows.items():
        cells = [".."] * length
        for action in row:
            cells[when[action]] = str(action) if shared else f"{action.phase}{action.micro_batch}"
        rows[lane] = cells
    width = max((len(cell) for cells in rows.values() for cell in cells), default=2)
    return "".join(
        f"{schedule.lanes} {lane} | {' '.join(cell.ljust(width) for cell in cells).rstrip()}\n"
        for lane, cells in rows.items()
    )
