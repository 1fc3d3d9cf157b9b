"""What recording itself costs, so that it can be taken off what was recorded."""

from __future__ import annotations

from functools import cache
from statistics import median
from timeit import repeat
from types import SimpleNamespace
from typing import Any

import torch

from popengine.ir import Compute, Task

from .recorder import Recorder, Times

_TASKS, _ROUNDS = 64, 30  # of the rounds the fastest counts


def recording_costs(recorder: Recorder) -> tuple[float, float, float]:
    """ns that this recorder takes for an instruction that isn't a computation (none: they are not timed one by one),
    for each task, and more for each step."""
    return 0.0, _of_a_task(), float(median(recorder.ns_of_steps or [0]))


@cache
def _of_a_task() -> float:
    """ns, measured once a process on tasks that do nothing."""
    recorder = Recorder()
    task = Task("forward", 0, 0, "F", piece=0, instructions=(Compute(0, ()),))
    state = SimpleNamespace(device=torch.device("cpu"))
    rows: Any = SimpleNamespace(plan=SimpleNamespace(tasks=(task,)), state=state)
    recorder._rows, recorder._place, recorder._times[1, 0] = rows, {(0, 0): 0}, Times(0, 0, 1)

    def recorded() -> None:
        for _ in range(_TASKS):
            recorder.perform(0, 0, 1, _nothing, 0)

    def plain() -> None:
        for _ in range(_TASKS):
            _nothing(0)

    fastest = [1e9 * min(repeat(work, number=1, repeat=_ROUNDS)) for work in (recorded, plain)]
    return max(0.0, fastest[0] - fastest[1]) / _TASKS


def _nothing(_: int) -> None:
    pass
