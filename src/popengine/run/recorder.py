"""Records a profile while tasks run: the core, start, end and CPU time of each task.

The engine runs the same tasks in the same order with a recorder and without. The first two steps are recorded
in detail: pieces of replica 0 read both clocks after every operation, and the tensors that each ipu holds for
micro-batch 0 are listed (the second step replaces the first, which includes warm-up). Of a long training only
the first and last steps are stored, which bounds the size of a profile.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter_ns, thread_time_ns
from typing import Any, NamedTuple

from torch import Tensor

from ..ir import Task
from ..profile import Call, HostEvent, TaskRun
from ..profile import Tensor as Row
from ..torch_private import storage_id
from .backends.eager import Code, build
from .devices import synchronize
from .row_functions import RowFunctions

_Memory = tuple[str, int]  # ("storage", its id), or of a user's input ("input", data pointer)


class _Seen(NamedTuple):
    """A tensor of micro-batch 0 that a row has loaded, received or made."""

    memory: _Memory
    kind: str  # as in a profile's `Tensor`
    bytes: int


class MemoryMeter:
    """The tensors that each ipu of replica 0 holds for a micro-batch, as if it had a memory of its own.

    All micro-batches hold tensors of the same sizes, so the meter looks at micro-batch 0 only.
    """

    def __init__(self, rows: RowFunctions) -> None:
        self._rows = rows
        self._inputs = {storage_id(value) for value in rows.call.inputs}
        self._seen: dict[tuple[int, str], _Seen] = {}  # by (ipu, name); not weights and buffers

    def record_before(self, task: Task) -> None:
        """Note the inputs that a row loads, and the tensors that it receives, before it runs."""
        frame = self._rows.frames[0].get(0, {})
        for instruction in task.instructions:
            if instruction.kind == "receive":
                self._note(task.ipu, instruction.names, frame, "received")
            elif instruction.kind == "load":
                keys = zip(instruction.names, instruction.keys, strict=True)
                values = {name: self._rows.input_on_host(int(key), 0, 0) for name, key in keys}
                self._note(task.ipu, values, values, "input")

    def record_after(self, task: Task) -> None:
        """Note the tensors that a row has made."""
        for instruction in task.instructions:
            if instruction.kind == "compute":
                made = self._rows.plan.partition.pieces[instruction.piece].writes
                self._note(task.ipu, made, self._rows.frames[0].get(0, {}), "activation")

    def _note(self, ipu: int, names: Iterable[str], values: Mapping[str, Tensor], kind: str) -> None:
        state = self._rows.state
        held = (*state.values[0].values(), *state.new_buffers[0].values())
        of_state = {storage_id(value) for value in held}
        for name in names:
            if name not in values or (memory := storage_id(values[name])) in of_state:
                continue
            value = values[name]
            if memory in self._inputs:  # a view of the whole batch
                self._seen[ipu, name] = _Seen(("input", value.data_ptr()), "input", value.nbytes)
            else:
                self._seen[ipu, name] = _Seen(("storage", memory), kind, value.untyped_storage().nbytes())

    def tensors(self) -> list[Row]:
        """Return the tensors of a micro-batch on all ipus. Values that share memory are one tensor."""
        found: list[Row] = []
        held: dict[tuple[int, _Memory], int] = {}  # index in `found`, by ipu and memory
        names: Counter[tuple[int, _Memory]] = Counter()  # the number of names of each memory that is held
        alive: set[tuple[int, str]] = set()
        pieces = self._rows.plan.partition.pieces
        for row, task in enumerate(self._rows.plan.tasks):
            for kind, own, _, _, _, piece in task.instructions:
                if kind in ("compute", "free"):
                    for key in ((task.ipu, name) for name in own):
                        if key in alive:
                            alive.remove(key)
                            place = task.ipu, self._seen[key].memory
                            names[place] -= 1
                            if not names[place]:
                                number = held.pop(place)
                                found[number] = found[number]._replace(died=row)
                made = (
                    pieces[piece].writes if kind == "compute" else own if kind in ("receive", "load") else ()
                )
                for name in made:
                    key = task.ipu, name
                    if key in self._seen and key not in alive:
                        alive.add(key)
                        memory, of_kind, size = self._seen[key]
                        place = task.ipu, memory
                        names[place] += 1
                        if place not in held:
                            held[place] = len(found)
                            found.append(Row(task.ipu, name, of_kind, size, row, -1))
        return found


DETAILED_STEPS = 2  # number of steps that are recorded in detail
_CALLS = 1000  # number of first calls, and of last calls, whose times are stored


def _append_bounded(values: list[Any], value: Any, most: int) -> None:
    """Append a value to a list; delete values other than the first `most` and the last `most`."""
    values.append(value)
    if len(values) > 2 * most:
        del values[most]


@dataclass
class StepDetail:
    """The detailed record of one step of replica 0: each ipu's tensors, and the times of each operation."""

    call: int
    step: int
    meter: MemoryMeter
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
        """Add the times of the runs in `unread`, which are clock readings (perf_counter_ns, thread_time_ns)
        before the piece's first line, and after each line."""
        for piece, ticks in self.unread:
            took, computed = ([end[i] - start[i] for start, end in pairwise(ticks)] for i in (0, 1))
            before = self.lines.get(piece, [0] * len(computed))
            self.lines[piece] = [a + b for a, b in zip(before, computed, strict=True)]
            self.fastest[piece] = list(map(min, self.fastest.get(piece, took), took))
            self.runs[piece] += 1
        self.unread.clear()


class Recorder:
    """The recorded times and memory of all calls to which this recorder was passed.

    Args: budget: number of task runs to store, over all steps. At least two steps are stored; of a step that
        is too long for that, only the beginning.
    """

    def __init__(self, budget: int = 40_000) -> None:
        self.budget, self.origin = budget, perf_counter_ns()
        # The runs of the first and the last steps, and of the last step that failed.
        self.kept: list[list[TaskRun]] = []
        self.broken: list[TaskRun] = []
        self.step_tasks = 0  # number of task runs of a whole step
        self.detail: StepDetail | None = None  # of the latest step that was recorded in detail
        self.in_calls: list[Call] = []  # the first and the last calls
        self.host: deque[HostEvent] = deque(maxlen=4 * _CALLS)
        self.calls = self.failed_calls = self.steps = self.ns_in_calls = 0
        self._call, self._step, self._started = -1, 0, 0
        self._runs: list[TaskRun] = []  # of the running step
        self._detail: StepDetail | None = None  # of the running step
        self._rows: RowFunctions | None = None
        self._codes_without_clocks: list[Code] = []  # the functions of replica 0's pieces
        self._thread = threading.local()  # `ticks`: the clock readings of the piece that the thread runs

    # ---- the host's side ---------------------------------------------------------------------------------

    def begin_call(self) -> None:
        self._call += 1
        self._started = perf_counter_ns() - self.origin

    def end_call(self, steps: int, failed: bool = False) -> None:
        """Store begin and end of a call that has run `steps` steps. If the call failed, only count it."""
        if failed:
            self.failed_calls += 1
            return
        call = Call(self._call, self._started, perf_counter_ns() - self.origin, steps)
        self.calls, self.steps = self.calls + 1, self.steps + steps
        self.ns_in_calls += call.end - call.start
        _append_bounded(self.in_calls, call, _CALLS)

    def record_host_event(self, kind: str, start: int, size: int = 0) -> None:
        """Store work or a wait of the host, from `start` (perf_counter_ns) until now; `size`: bytes moved."""
        self.host.append(HostEvent(kind, start - self.origin, perf_counter_ns() - self.origin, size))

    # ---- the queue's side --------------------------------------------------------------------------------

    def begin_step(self, rows: RowFunctions, tasks: int) -> None:
        """Prepare to record a step of so many task runs. In the first two steps add clock readings to replica
        0's eager pieces."""
        _, self._step = rows.state.shared.random_state  # over all calls
        if self._rows is None or self._rows.plan is not rows.plan:
            self.detail = None
        self._rows, self._detail, self._runs, self.step_tasks = rows, None, [], tasks
        self._codes_without_clocks = list(rows.codes[0])
        if len(self.kept) < DETAILED_STEPS:
            fastest = {} if self.detail is None else self.detail.fastest
            self._detail = StepDetail(self._call, self._step, MemoryMeter(rows), fastest)
            if rows.settings.is_eager:  # compiled pieces have no single operations
                clocks = {"after": "; tick()", "tick": self._read_clocks}
                device, pieces = rows.state.device, rows.plan.partition.pieces
                rows.codes[0][:] = [build(piece, device=device, **clocks) for piece in pieces]

    def end_step(self, is_finished: bool) -> None:
        """Store a step's runs in `kept` (`broken` if it failed); remove the clocks from the pieces."""
        assert self._rows is not None
        self._rows.codes[0][:] = self._codes_without_clocks
        if not is_finished:
            self.broken = self._runs
            return
        if self._detail is not None:
            self._detail.add_runs()
            self.detail = self._detail
        _append_bounded(self.kept, self._runs, max(1, self.budget // (2 * max(1, self.step_tasks))))

    def run_task(self, row: int, index: int, replica: int, work: Callable[[int], None], core: int) -> None:
        """Run a task by `work(index)`, wait for the device's work, and store the times."""
        assert self._rows is not None
        task, ticks = self._rows.plan.tasks[row], list[tuple[int, int]]()
        self._thread.ticks = ticks
        detail = self._detail if replica == 0 and not task.once else None
        if detail is not None and not index:
            detail.meter.record_before(task)
        begin, before = perf_counter_ns(), thread_time_ns()
        work(index)
        computed = thread_time_ns() - before
        synchronize(self._rows.state.device)
        end = perf_counter_ns()
        if 2 * len(self._runs) < self.budget:
            micro_batch = index if task.index == "micro_batch" else -1
            times = begin - self.origin, end - self.origin, computed
            where = row, micro_batch, -1 if task.once else replica, core
            self._runs.append(TaskRun(self._call, self._step, *where, *times))
        if detail is not None:
            if not index:
                detail.meter.record_after(task)
            if ticks:
                detail.unread.append((task.piece, ticks))

    def _read_clocks(self) -> None:
        self._thread.ticks.append((perf_counter_ns(), thread_time_ns()))
