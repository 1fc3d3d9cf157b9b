"""Records a profile while tasks run: the core, start, end and CPU time of each task.

In the first two steps the pieces of replica 0 also read both clocks after every operation; the second step replaces the
first, which includes warm-up. Of a long run only the first and last steps are stored.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from time import perf_counter_ns, thread_time_ns, time_ns
from typing import Any

import torch

from ..ir import Plan
from ..profile import Call, HostEvent, TaskRun
from .backends.eager import Code, build
from .devices import CPU, synchronize, timing_event
from .row_functions import RowFunctions

DETAILED_STEPS = 2  # number of steps that are recorded in detail
_CALLS = 1000  # number of first calls, and of last calls, whose times are stored


def _append_bounded(values: list[Any], value: Any, limit: int) -> None:
    """Append a value to a list; delete values other than the first `limit` and the last `limit`."""
    values.append(value)
    if len(values) > 2 * limit:
        del values[limit]


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
        self.step_tasks = 0  # number of task runs of a whole step
        self.detail: StepDetail | None = None  # of the latest step that was recorded in detail
        self._plan: Plan | None = None
        self._step = self._finished = 0
        # Of the running step:
        self._runs: list[TaskRun] = []
        self._detail: StepDetail | None = None
        self._without_clocks: list[tuple[list[Code], list[Code]]] = []  # pieces' functions: list, its content
        self._thread = threading.local()  # `ticks`: the clock readings of the piece that the thread runs

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

    # ---- the engine's side ---------------------------------------------------------------------------------

    def begin_step(self, workers: Sequence[RowFunctions], tasks: int) -> None:
        """Prepare to record a step of so many tasks. In the first two steps replica 0's eager pieces read clocks."""
        _, self._step = workers[0].state.train_state.random_state  # over all calls
        if self._plan is not workers[0].plan:
            self._plan, self.detail = workers[0].plan, None
        self._detail, self._runs, self.step_tasks = None, [], tasks
        if self._finished < DETAILED_STEPS:
            fastest = {} if self.detail is None else self.detail.fastest
            self._detail = StepDetail(self.call, self._step, fastest)
        # Compiled pieces have no single operations.
        for worker in workers if self._detail is not None and workers[0].settings.is_eager else ():
            device = worker.state.device
            clocks = {"after": "; tick()", "tick": partial(self._read_clocks, device)}
            self._without_clocks.append((worker.codes[0], list(worker.codes[0])))
            pieces = worker.plan.partition.pieces
            worker.codes[0][:] = [build(piece, device=device, **clocks) for piece in pieces]

    def end_step(self, is_finished: bool) -> None:
        """Store a step's runs; remove the clocks from the pieces."""
        for codes, without_clocks in self._without_clocks:
            codes[:] = without_clocks
        self._without_clocks.clear()
        if not is_finished:
            self.broken = self._runs
            return
        _append_bounded(self.kept, self._runs, max(1, self.budget // (2 * max(1, self.step_tasks))))
        self._finished += 1
        if self._detail is not None:
            self._detail.add_runs()
            self.detail = self._detail

    def run_task(self, worker: RowFunctions, task: Any, work: Callable[[int], None], core: int) -> None:
        """Run a `BoundTask` by `work(index)`, wait for the device's work, and store the times: of an accelerator its
        own time in place of the CPU time, which starts the kernels."""
        device, row, ticks = worker.state.device, worker.plan.tasks[task.row], list[tuple[int, int]]()
        self._thread.ticks = ticks
        begin, before = perf_counter_ns(), thread_time_ns()
        started = timing_event(device)
        work(task.index)
        computed, finished = thread_time_ns() - before, timing_event(device)
        synchronize(device)
        if started is not None:
            computed = round(1e6 * started.elapsed_time(finished))
        end = perf_counter_ns()
        if 2 * len(self._runs) < self.budget:
            micro_batch = task.index if row.index == "micro_batch" else -1
            times = begin - self.origin, end - self.origin, computed
            where = task.row, micro_batch, -1 if row.once else task.replica, core
            self._runs.append(TaskRun(self.call, self._step, *where, *times))
        if ticks and self._detail is not None:
            self._detail.unread.append((row.piece, ticks))

    def _read_clocks(self, device: torch.device) -> None:
        now, computed = perf_counter_ns(), thread_time_ns()
        if device != CPU:
            synchronize(device)
            now = computed = perf_counter_ns()
        self._thread.ticks.append((now, computed))
