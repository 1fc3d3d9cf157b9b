"""Measures while programs run: one clock reading an instruction. Without a recorder the workers measure nothing.

The first two steps are looked at closer: pieces read the clock after every operation, and what each ipu holds
between instructions is written down (the second step replaces the first, in which memory is cold). Of long
trainings the first and the last steps are kept, so that a profile stays bounded.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter_ns
from typing import Any

from ..ir import Compute, Piece
from .build import build
from .meter import Meter

DETAILED_STEPS = 2
_CALLS = 1000  # first ones, and last ones, whose times are kept

Program = Sequence[tuple[Callable[[Any], None], Any]]
Step = tuple[int, int, array]  # call, step, clock readings


@dataclass
class Kept:
    """The steps of one worker: the first ones and the last ones."""

    most: int  # of either
    first: list[Step] = field(default_factory=list)
    last: deque[Step] = field(default_factory=deque)
    seen: int = 0

    def add(self, call: int, step: int, times: array) -> None:
        self.seen += 1
        if len(self.first) < self.most:
            self.first.append((call, step, times))
            return
        if len(self.last) == self.most:
            self.last.popleft()
        self.last.append((call, step, times))


@dataclass
class Detail:
    """The step that was looked at closer, of one ipu of replica 0."""

    call: int
    step: int
    meter: Meter
    lines: dict[int, list[int]] = field(default_factory=dict)  # piece -> ns of each of its lines
    runs: dict[int, int] = field(default_factory=dict)  # piece -> how often it ran

    def add(self, piece: int, ticks: list[int]) -> None:
        spent = [end - start for start, end in pairwise(ticks)]
        before = self.lines.get(piece)
        self.lines[piece] = spent if before is None else [a + b for a, b in zip(before, spent, strict=True)]
        self.runs[piece] = self.runs.get(piece, 0) + 1


class Recorder:
    """What was measured in the calls it was passed to.

    Args:
        budget: instructions to keep, over all ipus and replicas. At least two steps are kept; of a program too
            long for that, the beginning.
    """

    def __init__(self, budget: int = 120_000) -> None:
        self.budget, self.origin = budget, perf_counter_ns()
        self.kept: dict[tuple[int, int], Kept] = {}  # by replica and ipu
        self.details: dict[int, Detail] = {}  # by ipu
        self.first_calls: list[tuple[int, int, int, int]] = []  # call, start, end, steps
        self.last_calls: deque[tuple[int, int, int, int]] = deque(maxlen=_CALLS)
        self.host: deque[tuple[str, int, int, int]] = deque(maxlen=4 * _CALLS)  # kind, start, end, bytes
        self.calls = self.failed_calls = self.steps = self.ns_in_calls = 0
        self._call, self._started = -1, 0

    # ---- the host's side ---------------------------------------------------------------------------------

    def begin_call(self) -> None:
        self._call += 1
        self._started = perf_counter_ns()

    def end_call(self, steps: int, failed: bool = False) -> None:
        end = perf_counter_ns()
        if failed:
            self.failed_calls += 1
            return
        entry = (self._call, self._started, end, steps)
        self.calls, self.steps = self.calls + 1, self.steps + steps
        self.ns_in_calls += end - self._started
        if len(self.first_calls) < _CALLS:
            self.first_calls.append(entry)
        else:
            self.last_calls.append(entry)

    def note(self, kind: str, start: int, size: int = 0) -> None:
        """Something that the host did or waited for, from `start` (perf_counter_ns) until now."""
        self.host.append((kind, start, perf_counter_ns(), size))

    # ---- a worker's side ---------------------------------------------------------------------------------

    def step(self, worker: Any, program: Program, number: int) -> None:
        """Run a worker's program once, and keep when each instruction ended."""
        call, programs, replicas = self._call, worker.plan.programs, worker.settings.counts.replicas
        kept = self.kept.get((worker.replica, worker.ipu))
        if kept is None:
            length = sum(map(len, programs.values())) * replicas
            kept = self.kept[worker.replica, worker.ipu] = Kept(max(1, self.budget // max(1, 2 * length)))
        most = max(1, self.budget // (2 * len(programs) * replicas))
        if kept.seen < DETAILED_STEPS and worker.replica == 0:
            times = self._detailed(worker, program[:most], call, number)
        else:
            times = timed(program[:most])
        kept.add(call, number, times)
        for handle, instruction in program[most:]:
            handle(instruction)

    def _detailed(self, worker: Any, program: Program, call: int, number: int) -> array:
        ticks: list[int] = []
        plain = worker._code
        if worker.settings.backend == "eager":  # compiled pieces have no operations any more
            worker._code = _ticking(worker.plan.partition.pieces, plain, ticks)
        detail = Detail(call, number, Meter(worker))
        times = array("q", [perf_counter_ns()])
        try:
            for index, (handle, instruction) in enumerate(program):
                ticks.clear()
                handle(instruction)
                detail.meter.after(index, instruction)
                times.append(perf_counter_ns())
                if ticks and isinstance(instruction, Compute):
                    detail.add(instruction.piece, ticks)
        finally:
            worker._code = plain
        self.details[worker.ipu] = detail
        return times


def timed(program: Program) -> array:
    """When the first instruction began and each one ended."""
    now = perf_counter_ns
    times = array("q", [now()])
    note = times.append
    for handle, instruction in program:
        handle(instruction)
        note(now())
    return times


def _ticking(pieces: Sequence[Piece], codes: Mapping[int, Any], ticks: list[int]) -> dict[int, Any]:
    """The same pieces, reading the clock before their first line and after each."""
    note, now = ticks.append, perf_counter_ns
    return {i: build(pieces[i], after_each="; tick()", tick=lambda: note(now())) for i in codes}
