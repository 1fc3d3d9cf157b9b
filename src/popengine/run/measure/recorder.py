"""Measures while tasks run: one clock reading an instruction, and the thread's own time of a computation, in which no
other program is. Without a recorder the driver measures nothing.

The first two steps are looked at closer: pieces read both clocks after every operation, and what each ipu holds
between instructions is written down (the second step replaces the first, in which memory is cold). Of long
trainings the first and the last steps are kept, so that a profile stays bounded.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter_ns, thread_time_ns
from typing import Any

from popengine.ir import Compute, Piece, Update

from .. import devices
from ..backends.eager import Code, build
from ..instances.ordered_sums import AT_THE_END
from .memory_meter import Meter

DETAILED_STEPS = 2
Program = Sequence[tuple[Callable[[Any], None], Any]]
_CALLS = 1000  # first ones, and last ones, whose times are kept


class Times:
    """One step of one ipu: when each instruction of its program began and ended, and on which core; for how long a
    core computed in it (0: not measured)."""

    def __init__(self, call: int, step: int, length: int) -> None:
        self.call, self.step, self.length = call, step, length
        self.begins, self.ends, self.computed = (array("q", bytes(8 * length)) for _ in range(3))
        self.cores = array("h", bytes(2 * length))

    def note(self, index: int, begin: int, end: int, core: int, computed: int = 0) -> None:
        """An instruction has run, with its waits."""
        if index < self.length:
            self.begins[index], self.ends[index] = begin, end
            self.cores[index], self.computed[index] = core, computed


@dataclass
class Kept:
    """The steps of one worker: the first ones and the last ones."""

    most: int  # of either
    first: list[Times] = field(default_factory=list)
    last: deque[Times] = field(default_factory=deque)
    seen: int = 0

    def add(self, times: Times) -> None:
        self.seen += 1
        if len(self.first) < self.most:
            self.first.append(times)
            return
        if len(self.last) == self.most:
            self.last.popleft()
        self.last.append(times)


@dataclass
class Detail:
    """The step that was looked at closer, of one ipu of replica 0."""

    call: int
    step: int
    meter: Meter
    # By piece, for each of its lines: ns that its thread computed in all runs; ns of its fastest run in any step.
    lines: dict[int, list[int]] = field(default_factory=dict)
    fastest: dict[int, list[int]] = field(default_factory=dict)
    runs: dict[int, int] = field(default_factory=dict)  # piece -> how often it ran

    def times(self, piece: int) -> list[int]:
        """Return the ns of each line in all runs: what was computed, or what the fastest run took if that is more."""
        least = (ns * self.runs[piece] for ns in self.fastest[piece])
        return [max(pair) for pair in zip(self.lines[piece], least, strict=True)]

    def after(self, index: int, instruction: Any, ticks: list[tuple[int, int]]) -> None:
        """Note what is held now; `ticks`: clock and thread's time, before the first operation and after each."""
        self.meter.after(index, instruction)
        if ticks and isinstance(instruction, Compute):
            self._add(instruction.piece, ticks)

    def _add(self, piece: int, ticks: list[tuple[int, int]]) -> None:
        took, computed = ([end[i] - start[i] for start, end in pairwise(ticks)] for i in (0, 1))
        if piece in self.lines:
            computed = [a + b for a, b in zip(self.lines[piece], computed, strict=True)]
        if piece in self.fastest:
            took = list(map(min, self.fastest[piece], took))
        self.lines[piece], self.fastest[piece] = computed, took
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
        self.ns_of_steps: deque[int] = deque(maxlen=_CALLS)  # that recording took around each
        self._call, self._started = -1, 0
        self._times: dict[tuple[int, int], Times] = {}  # of the step that runs
        self.broken: dict[tuple[int, int], Times] = {}  # of the last step that failed, by replica and ipu
        self._looking: dict[int, Detail] = {}  # by ipu of replica 0: closer, in this step
        self._ticks = _Ticks()

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

    # ---- the driver's side -------------------------------------------------------------------------------

    @contextmanager
    def recording(self, workers: Sequence[Any], number: int) -> Iterator[None]:
        """A step runs inside; if it comes to its end, its times are kept."""
        began = perf_counter_ns()
        programs = workers[0].plan.programs
        length = sum(map(len, programs.values())) * workers[0].settings.counts.replicas
        most = max(1, self.budget // (2 * len(workers)))
        plain = {worker.ipu: worker._code for worker in workers if worker.replica == 0}
        self._times, self._looking = {}, {}
        for worker in workers:
            place = worker.replica, worker.ipu
            kept = self.kept.setdefault(place, Kept(max(1, self.budget // max(1, 2 * length))))
            self._times[place] = Times(self._call, number, min(most, len(worker.program)))
            if kept.seen < DETAILED_STEPS and worker.replica == 0:
                detail = self._looking[worker.ipu] = Detail(self._call, number, Meter(worker))
                if worker.ipu in self.details:
                    detail.fastest = self.details[worker.ipu].fastest
                if worker.settings.backend == "eager":  # compiled pieces have no operations any more
                    worker._code = _ticking(worker, self._ticks)
        inside = perf_counter_ns()
        try:
            yield
        except BaseException:
            self.broken = self._times
            raise
        finally:
            outside = perf_counter_ns()
            for worker in workers:
                if worker.replica == 0:
                    worker._code = plain[worker.ipu]
        self.details.update(self._looking)
        for place, times in self._times.items():
            self.kept[place].add(times)
        self.ns_of_steps.append(inside - began + perf_counter_ns() - outside)

    def perform(self, worker: Any, start: int, body: Program, core: int) -> None:
        """Run instructions `start` ... of a worker's program, none of which waits."""
        for _ in self.performing(worker, start, body, core):
            raise AssertionError("nothing that waits is performed at once")

    def performing(self, worker: Any, start: int, body: Program, core: int) -> Generator[Any, Any, None]:
        """Run instructions `start` ... of a worker's program; yields the name of each channel that one waits for.

        What a device has begun is waited for, so that the time is that of the work and not of starting it.
        """
        times = self._times[worker.replica, worker.ipu]
        detail = self._looking.get(worker.ipu) if worker.replica == 0 else None
        is_host = worker.device.type == "cpu"
        begin = perf_counter_ns()
        for index, (handle, instruction) in enumerate(body, start):
            self._ticks.read.clear()
            is_work = is_host and type(instruction) in (Compute, Update)
            before = thread_time_ns() if is_work else 0
            work = handle(instruction)
            computed = thread_time_ns() - before if is_work else 0
            if work is not None:
                spent, begun = yield from _timed(work)
                computed, begin = computed + spent, begun or begin
            devices.settle(worker.device)
            end = perf_counter_ns()
            times.note(index, begin, end, core, computed if is_work else 0)
            if detail is not None and index < times.length:
                detail.after(index, instruction, self._ticks.read if work is None else [])
                end = perf_counter_ns()
            begin = end


def _timed(work: Generator[Any, Any, Any]) -> Generator[Any, Any, tuple[int, int]]:
    """Yields what work yields; returns the time that threads computed in it (after a wait another one may go on), and
    when it went on after it had waited for everything else (0: it did not): such a wait is nobody's work."""
    spent, begun = 0, 0
    name = answer = None
    while True:
        before = thread_time_ns()
        if name == AT_THE_END:
            begun = perf_counter_ns()
        try:
            name = work.send(answer)
        except StopIteration:
            return spent + thread_time_ns() - before, begun
        spent += thread_time_ns() - before
        answer = yield name


class _Ticks(threading.local):
    """The clock readings of the piece that a thread runs."""

    def __init__(self) -> None:
        self.read: list[tuple[int, int]] = []  # clock, thread's time

    def note(self) -> None:
        self.read.append((perf_counter_ns(), thread_time_ns()))


def _ticking(worker: Any, ticks: _Ticks) -> dict[int, Code]:
    """The same pieces, reading the clock before their first line and after each."""
    pieces: Mapping[int, Piece] = {i: worker.plan.partition.pieces[i] for i in worker._code}
    everywhere = {i: dict.fromkeys(range(-1, len(piece.lines)), "; tick()") for i, piece in pieces.items()}
    return {
        i: build(piece, device=worker.device, after=everywhere[i], tick=ticks.note)
        for i, piece in pieces.items()
    }
