"""What recording itself costs, so that it can be taken off what was recorded."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from statistics import median
from timeit import repeat
from types import SimpleNamespace
from typing import Any

from ..devices import CPU
from .recorder import Program, Recorder, Times

_FEW, _MANY = 4, 64  # instructions
_ROUNDS = 30  # of each the fastest counts


def recording_costs(recorder: Recorder) -> tuple[float, float, float]:
    """ns that this recorder takes for an instruction that isn't a computation, more for each task, and more for each
    step."""
    return *_of_tasks(), float(median(recorder.ns_of_steps or [0]))


@cache
def _of_tasks() -> tuple[float, float]:
    """Of an instruction and a task: measured once a process, on tasks that do nothing."""
    few, many = _taken(_FEW), _taken(_MANY)
    instruction = max(0.0, (many - few) / (_MANY - _FEW))
    return instruction, max(0.0, few - _FEW * instruction)


def _taken(length: int) -> float:
    """ns that a task of so many instructions takes longer when it is recorded."""
    recorder = Recorder()
    worker: Any = SimpleNamespace(replica=1, ipu=0, device=CPU)
    recorder._times[1, 0] = Times(0, 0, length)
    body: Program = [(_nothing, None)] * length

    def recorded() -> None:
        recorder.perform(worker, 0, body, 0)

    def plain() -> None:
        for handle, instruction in body:
            handle(instruction)

    return max(0.0, _fastest(recorded) - _fastest(plain))


def _fastest(work: Callable[[], None]) -> float:
    return 1e9 * min(repeat(work, number=1, repeat=_ROUNDS))


def _nothing(*_: Any) -> None:
    pass
