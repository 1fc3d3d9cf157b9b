"""The depth-first order of cores that share all ipus: a core takes the earliest micro-batch that can go on.

core 0 | F0.0 F1.0 B1.0 B0.0 F0.2 F1.2 B1.2 B0.2        A core mostly stays with a micro-batch, whose values
core 1 | F0.1 F1.1 B1.1 B0.1 F0.3 F1.3 B1.3 B0.3        are in its cache, and few micro-batches are in memory.
"""

from __future__ import annotations

from ...ir import Schedule
from ...virtual_time import simulate
from .check import Numbers


def depth_first(stages: int, micro_batches: int, training: bool, cores: int) -> Schedule:
    """Return the order of one step's actions on cores, if each action takes one tick."""
    in_flight = max(stages, cores)
    numbers = Numbers(stages, micro_batches, training, in_flight)
    needs = map(numbers.need, range(numbers.size))
    timeline = simulate([[need] if need >= 0 else [] for need in needs], [1] * numbers.size, cores)
    rows: dict[int, list[int]] = {core: [] for core in range(cores)}
    for number in sorted(range(numbers.size), key=timeline.starts.__getitem__):
        rows[timeline.devices[number]].append(number)
    found = {core: tuple(map(numbers.action, row)) for core, row in rows.items()}
    return Schedule(found, stages, micro_batches, training, in_flight, "depth first", "core")


def as_run(schedule: Schedule, cores: int) -> Schedule:
    """Return the order in which cores that share all ipus run a plan: depth first, if it is a pipeline."""
    if not schedule.overlaps:
        return schedule
    return depth_first(schedule.stages, schedule.micro_batches, schedule.training, cores)
