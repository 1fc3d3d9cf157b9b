"""Records a profile while tasks run: the core, start, end and CPU time of each task.

In the first two steps the pieces of replica 0 also read both clocks after every operation; the second step replaces the
first, which includes warm-up. Of a long training only the first and last steps are stored. If several devices run a
plan, the engine of each has an `EngineRecorder`, and a step's runs are those of all.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter_ns, thread_time_ns, time_ns
from typing import Any

from ..profile import Call, HostEvent, TaskRun
from .backends.eager import Code, build
from .devices import CPU, synchronize, timing_event
from .row_functions import RowFunctions

DETAILED_STEPS = 2  # number of steps that are recorded in detail
_CALLS = 1000  # number of first calls, and of last calls, whose times are stored


def _append_bounded(values: list[Any], value: Any, most: int) -> None:
    """Append a value to a list; delete values other than the first `most` and the last `most`."""
    values.append(value)
    if len(values) > 2 * most:
        del values[most]


@dataclass
class StepDetail:
    """The detailed record of one step of replica 0: the times of each operation."""

    call: int
    step: int
    # By piece, for each of its lines: ns of the fastest run in any step, and CPU time in ns of all runs.
    fastest: dict[int, list[int]]
    lines: dict[int, list[int]] = field(default_factory=dict)
    runs: Counter[int] = field(default_factory=Counter)  # number of runs of each piece
    # Piece and clock readings of each run, until `add_runs`.
    unread: list[tuple[int, list[tuple[int, int]]]] = field(default_factory=list)

    def line_times(self, piece: int) -> list[int]:
        """Return the ns of each line of a piece in all runs: CPU time, but at least runs × fastest run."""
        least = (ns * self.runs[piece] for ns in self.fastest[piece])
        return [max(pair) for pair in zip(self.lines[piece], least, strict=True)]

    def add_runs(self) -> None:
        """Add the times of the runs in `unread`: readings of both clocks at a piece's begin, and after each line."""
        for piece, ticks in self.unread:
            took, computed = ([end[i] - start[i] for start, end in pairwise(ticks)] for i in (0, 1))
            before = self.lines.get(piece, [0] * len(computed))
            self.lines[piece] = [a + b for a, b in zip(before, computed, strict=True)]
            self.fastest[piece] = list(map(min, self.fastest.get(piece, took), took))
            self.runs[piece] += 1
        self.unread.clear()


class Recorder:
    """The recorded times of all calls to which this recorder was passed: `budget` runs of tasks over all steps, but at
    least two steps; of a step that is too long for that, only the beginning."""

    def __init__(self, budget: int = 40_000) -> None:
        self.budget, self.origin = budget, perf_counter_ns()
        self.time_of_origin = time_ns()  # since 1970
        # The runs of the first and the last steps, and of the last step that failed.
        self.kept: list[list[TaskRun]] = []
        self.broken: list[TaskRun] = []
        self.in_calls: list[Call] = []  # the first and the last calls
        self.host: deque[HostEvent] = deque(maxlen=4 * _CALLS)
        self.calls = self.failed_calls = self.steps = self.ns_in_calls = 0
        self.call, self._started = -1, 0  # the running call
        self.engines: list[EngineRecorder] = []
        self._lock = threading.Lock()

    # ---- the host's side ---------------------------------------------------------------------------------

    def begin_call(self) -> None:
        self.call += 1
        self._started = perf_counter_ns() - self.origin

    def end_call(self, steps: int, failed: bool = False) -> None:
        """Store begin and end of a call that has run `steps` steps. If the call failed, only count it."""
        if failed:
            self.failed_calls += 1
            return
        call = Call(self.call, self._started, perf_counter_ns() - self.origin, steps)
        self.calls, self.steps = self.calls + 1, self.steps + steps
        self.ns_in_calls += call.end - call.start
        _append_bounded(self.in_calls, call, _CALLS)

    def record_host_event(self, kind: str, start: int) -> None:
        """Store work or a wait of the host, from `start` (perf_counter_ns) until now."""
        self.host.append(HostEvent(kind, start - self.origin, perf_counter_ns() - self.origin))

    # ---- the engines' side -------------------------------------------------------------------------------

    def engine(self, number: int, cores: int) -> "EngineRecorder":
        """Return the recorder of engine `number`, which has so many cores; engines 0, 1, ... are added in order."""
        if number == len(self.engines):
            self.engines.append(EngineRecorder(self, number, cores))
        return self.engines[number]

    def add_runs(self, runs: list[TaskRun], is_finished: bool) -> None:
        """Add an engine's runs of a step to `kept` (`broken` if it failed). All engines add a step before the next."""
        with self._lock:
            if not is_finished:
                self.broken = self.broken + runs if _are_of_one_step(self.broken, runs) else runs
            elif self.kept and _are_of_one_step(self.kept[-1], runs):
                self.kept[-1] += runs
            else:
                _append_bounded(self.kept, runs, max(1, self.budget // (2 * max(1, self.step_tasks))))

    @property
    def step_tasks(self) -> int:
        """Return the number of task runs of a whole step."""
        return sum(engine.step_tasks for engine in self.engines)

    @property
    def detail(self) -> StepDetail | None:
        """Return the detailed record of the latest step that has one."""
        found = [engine.detail for engine in self.engines if engine.detail is not None]
        whole = max(found, key=lambda detail: (detail.call, detail.step), default=None)
        if whole is None or len(found) == 1:
            return whole
        whole = StepDetail(whole.call, whole.step, {})
        for detail in (each for each in found if (each.call, each.step) == (whole.call, whole.step)):
            whole.fastest |= detail.fastest  # each piece runs on one device
            whole.lines |= detail.lines
            whole.runs += detail.runs
        return whole


def _are_of_one_step(some: list[TaskRun], others: list[TaskRun]) -> bool:
    return bool(some and others) and some[0][:2] == others[0][:2]


class EngineRecorder:
    """Records the tasks of an engine, whose cores are numbered behind those of earlier engines."""

    def __init__(self, whole: Recorder, number: int, cores: int) -> None:
        self.cores, self.first_core = cores, sum(engine.cores for engine in whole.engines)
        self.step_tasks = 0  # number of task runs of a whole step
        self.detail: StepDetail | None = None  # of the latest step that was recorded in detail
        self._whole, self._number = whole, number
        self._step = self._finished = 0
        self._runs: list[TaskRun] = []  # of the running step
        self._detail: StepDetail | None = None  # of the running step
        self._rows: RowFunctions | None = None
        self._codes_without_clocks: list[Code] = []  # the functions of replica 0's pieces
        self._thread = threading.local()  # `ticks`: the clock readings of the piece that the thread runs

    def core_number(self, core: int) -> int:
        """Return the number of a core, or of the thread that communicates (-1), among those of all engines."""
        return core + self.first_core if core >= 0 else core - self._number

    def begin_step(self, rows: RowFunctions, tasks: int) -> None:
        """Prepare to record a step of so many tasks. In the first two steps replica 0's eager pieces read clocks."""
        _, self._step = rows.state.train_state.random_state  # over all calls
        if self._rows is None or self._rows.plan is not rows.plan:
            self.detail = None
        self._rows, self._detail, self._runs, self.step_tasks = rows, None, [], tasks
        self._codes_without_clocks = list(rows.codes[0])
        if self._finished < DETAILED_STEPS:
            fastest = {} if self.detail is None else self.detail.fastest
            self._detail = StepDetail(self._whole.call, self._step, fastest)
            if rows.settings.is_eager:  # compiled pieces have no single operations
                clocks = {"after": "; tick()", "tick": self._read_clocks}
                device, pieces = rows.state.device, rows.plan.partition.pieces
                rows.codes[0][:] = [build(piece, device=device, **clocks) for piece in pieces]

    def end_step(self, is_finished: bool) -> None:
        """Store a step's runs; remove the clocks from the pieces."""
        assert self._rows is not None
        self._rows.codes[0][:] = self._codes_without_clocks
        self._whole.add_runs(self._runs, is_finished)
        self._finished += is_finished
        if is_finished and self._detail is not None:
            self._detail.add_runs()
            self.detail = self._detail

    def run_task(self, row: int, index: int, replica: int, work: Callable[[int], None], core: int) -> None:
        """Run a task by `work(index)`, wait for the device's work, and store the times: of an accelerator its own time
        in place of the CPU time, which starts the kernels."""
        assert self._rows is not None
        device = self._rows.state.device
        task, ticks = self._rows.plan.tasks[row], list[tuple[int, int]]()
        self._thread.ticks = ticks
        begin, before = perf_counter_ns(), thread_time_ns()
        started = timing_event(device)
        work(index)
        computed, finished = thread_time_ns() - before, timing_event(device)
        synchronize(device)
        if started is not None:
            computed = round(1e6 * started.elapsed_time(finished))
        end = perf_counter_ns()
        if 2 * len(self._runs) < self._whole.budget // len(self._whole.engines):
            micro_batch = index if task.index == "micro_batch" else -1
            times = begin - self._whole.origin, end - self._whole.origin, computed
            where = row, micro_batch, -1 if task.once else replica, self.core_number(core)
            self._runs.append(TaskRun(self._whole.call, self._step, *where, *times))
        if ticks and self._detail is not None:
            self._detail.unread.append((task.piece, ticks))

    def _read_clocks(self) -> None:
        assert self._rows is not None
        now, computed = perf_counter_ns(), thread_time_ns()
        if (device := self._rows.state.device) != CPU:
            synchronize(device)
            now = computed = perf_counter_ns()
        self._thread.ticks.append((now, computed))
