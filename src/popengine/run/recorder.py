"""Records a profile while tasks run: the start and end of each task, and the CPU time of its thread.

The first two steps are recorded in detail: pieces read both clocks after every operation, and the tensors
that each ipu holds between instructions are listed (the second step replaces the first, which includes
warm-up). Of a long training only the first and last steps are stored, which bounds the size of a profile.
"""

import threading
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter_ns, thread_time_ns
from typing import Any

from torch import Tensor

from ..ir import Task
from ..profile import Call, HostEvent
from ..profile import Tensor as Row
from ..programs import programs
from ..torch_private import storage_id
from .backends.eager import Code, build
from .devices import synchronize
from .row_functions import RowFunctions

_Memory = tuple[int, int] | int  # the id of a storage; for the user's inputs (micro-batch, data pointer)


class MemoryMeter:
    """The list of tensors that an ipu of replica 0 holds during a step, as if it had a memory of its own."""

    def __init__(self, rows: RowFunctions, ipu: int) -> None:
        self._rows, self._ipu = rows, ipu
        self.tensors: list[Row] = []  # in the order in which they were made; died -1: not freed yet
        self._held: dict[_Memory, int] = {}  # the index in `tensors` of each memory that is not freed yet
        self._names: Counter[_Memory] = Counter()  # the number of names that refer to each memory
        self._memory: dict[tuple[int, str], _Memory] = {}  # by micro-batch and name
        # Ids of the storages of the user's inputs, and of the weights and buffers.
        self._inputs = {storage_id(value) for value in rows.call.inputs}
        self._state = self._state_storages()

    def record_before(self, task: Task, micro_batch: int, first: int) -> None:
        """Add the inputs that a row loads, and the tensors that it receives from other ipus, before it runs.

        Args: first: index of the row's first instruction in the ipu's program
        """
        frame = self._rows.frames[0].get(micro_batch, {})
        for index, instruction in enumerate(task.instructions, first):
            if instruction.kind == "receive":
                self._add_tensors(instruction.names, frame, micro_batch, index)
            elif instruction.kind == "load":
                keys = zip(instruction.names, instruction.keys, strict=True)
                values = {name: self._rows.input_on_host(int(key), micro_batch, 0) for name, key in keys}
                self._add_tensors(values, values, micro_batch, index)

    def record_after(self, task: Task, micro_batch: int, first: int) -> None:
        """After a row has run, add the tensors that it has made, and mark those that it has freed."""
        frame = self._rows.frames[0].get(micro_batch, {})
        for index, instruction in enumerate(task.instructions, first):
            if instruction.kind == "compute":
                self._mark_freed(instruction.names, micro_batch, index)
                made = self._rows.plan.partition.pieces[instruction.piece].writes
                self._add_tensors(made, frame, micro_batch, index)
            elif instruction.kind == "keep":
                self._state = self._state_storages()
            elif instruction.kind == "free":
                self._mark_freed(instruction.names, micro_batch, index)

    def _add_tensors(
        self, names: Iterable[str], values: Mapping[str, Tensor], micro_batch: int, index: int
    ) -> None:
        """Add the tensors `names`, which instruction number `index` has made. Views share the memory of their
        base; weights and buffers are left out."""
        for name in names:
            if name not in values or (micro_batch, name) in self._memory:
                continue
            value = values[name]
            storage = value.untyped_storage()
            if storage_id(value) in self._state:
                continue
            is_input = storage_id(value) in self._inputs
            key: _Memory = (micro_batch, value.data_ptr()) if is_input else storage_id(value)
            self._memory[micro_batch, name] = key
            self._names[key] += 1
            if key not in self._held:
                size, kind = (value.nbytes, "input") if is_input else (storage.nbytes(), "activation")
                self._held[key] = len(self.tensors)
                self.tensors.append(Row(self._ipu, name, kind, micro_batch, size, index, -1))

    def _mark_freed(self, names: Iterable[str], micro_batch: int, index: int) -> None:
        """Remove names of tensors; mark memory that has no name any more as freed by instruction `index`."""
        for name in names:
            key = self._memory.pop((micro_batch, name), None)
            if key is not None:
                self._names[key] -= 1
                if not self._names[key]:
                    number = self._held.pop(key)
                    self.tensors[number] = self.tensors[number]._replace(died=index)

    def _state_storages(self) -> set[int]:
        """Return the addresses of the storage objects of replica 0's weights, buffers and constants."""
        state = self._rows.state
        values = (*state.values[0].values(), *state.new_buffers[0].values())
        return {storage_id(value) for value in values}


DETAILED_STEPS = 2  # number of steps that are recorded in detail
_WORK = ("compute", "update")  # kinds of instructions that take time
_CALLS = 1000  # number of first calls, and of last calls, whose times are stored


class ProgramTimes:
    """The times of one ipu in one step: begin and end (perf_counter_ns), core, and CPU time (ns; 0: not
    measured) of the first `length` instructions of its program."""

    def __init__(self, call: int, step: int, length: int) -> None:
        self.call, self.step, self.length = call, step, length
        self.begins, self.ends, self.computed = (array("q", bytes(8 * length)) for _ in range(3))
        self.cores = array("h", bytes(2 * length))

    def store(self, index: int, begin: int, end: int, core: int, computed: int = 0) -> None:
        """Store the times of one instruction; an index beyond `length` is ignored."""
        if index < self.length:
            self.begins[index], self.ends[index] = begin, end
            self.cores[index], self.computed[index] = core, computed


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
    meters: dict[int, MemoryMeter]  # by ipu
    # By piece, for each of its lines: ns of the fastest run in any step, and CPU time in ns of all runs.
    fastest: dict[int, list[int]]
    lines: dict[int, list[int]] = field(default_factory=dict)
    runs: Counter[int] = field(default_factory=Counter)  # number of runs of each piece

    def line_times(self, piece: int) -> list[int]:
        """Return the ns of each line of a piece in all runs: CPU time, but at least runs × fastest run."""
        least = (ns * self.runs[piece] for ns in self.fastest[piece])
        return [max(pair) for pair in zip(self.lines[piece], least, strict=True)]

    def add_run(self, piece: int, ticks: list[tuple[int, int]]) -> None:
        """Add the times of one run of a piece.

        Args: ticks: (perf_counter_ns, thread_time_ns) before the piece's first line, and after each line
        """
        took, computed = ([end[i] - start[i] for start, end in pairwise(ticks)] for i in (0, 1))
        before = self.lines.get(piece, [0] * len(computed))
        self.lines[piece] = [a + b for a, b in zip(before, computed, strict=True)]
        self.fastest[piece] = list(map(min, self.fastest.get(piece, took), took))
        self.runs[piece] += 1


class Recorder:
    """The recorded times and memory of all calls to which this recorder was passed.

    Args: budget: number of instructions to store, over all steps, ipus and replicas. At least two steps are
        stored; of a program that is too long for that, only the beginning.
    """

    def __init__(self, budget: int = 120_000) -> None:
        self.budget, self.origin = budget, perf_counter_ns()
        # The times of the first and the last steps, and of the last step that failed, by replica and ipu.
        self.kept: list[dict[tuple[int, int], ProgramTimes]] = []
        self.broken: dict[tuple[int, int], ProgramTimes] = {}
        self.detail: StepDetail | None = None  # of the latest step that was recorded in detail
        self.in_calls: list[Call] = []  # the first and the last calls
        self.host: deque[HostEvent] = deque(maxlen=4 * _CALLS)
        self.calls = self.failed_calls = self.steps = self.ns_in_calls = 0
        self._call, self._started = -1, 0
        self._times: dict[tuple[int, int], ProgramTimes] = {}  # of the running step, by replica and ipu
        self._detail: StepDetail | None = None  # of the running step
        self._rows: RowFunctions | None = None
        self._codes_without_clocks: list[Code] = []  # the functions of replica 0's pieces
        self._lengths: dict[int, int] = {}  # number of instructions of each ipu's program
        self._most_steps = 1  # number of first steps, and of last steps, to store
        self._first_instruction: dict[tuple[int, int], int] = {}  # by (row, micro-batch; -1: the whole step)
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

    def begin_step(self, rows: RowFunctions) -> None:
        """Prepare to record a step. In the first two steps add clock readings to replica 0's eager pieces."""
        plan, replicas = rows.plan, range(rows.settings.counts.replicas)
        _, number = rows.state.shared.random_state  # of the step, over all calls
        if self._rows is None or self._rows.plan is not plan:
            self._lengths, self._first_instruction, self.detail = {}, {}, None
            for ipu, program in programs(plan).items():
                self._lengths[ipu] = 0
                for row, micro_batch in program:
                    self._first_instruction[row, micro_batch] = self._lengths[ipu]
                    self._lengths[ipu] += len(plan.tasks[row].instructions)
        most = max(1, self.budget // (2 * len(self._lengths) * len(replicas)))
        self._most_steps = max(1, self.budget // (2 * max(1, sum(self._lengths.values()) * len(replicas))))
        self._rows, self._detail = rows, None
        self._times = {
            (replica, ipu): ProgramTimes(self._call, number, min(most, length))
            for ipu, length in self._lengths.items()
            for replica in replicas
        }
        self._codes_without_clocks = list(rows.codes[0])
        if len(self.kept) < DETAILED_STEPS:
            meters = {ipu: MemoryMeter(rows, ipu) for ipu in self._lengths}
            fastest = {} if self.detail is None else self.detail.fastest
            self._detail = StepDetail(self._call, number, meters, fastest)
            if rows.settings.is_eager:  # compiled pieces have no single operations
                clocks = {"after": "; tick()", "tick": self._read_clocks}
                device, pieces = rows.state.device, plan.partition.pieces
                rows.codes[0][:] = [build(piece, device=device, **clocks) for piece in pieces]
        now = perf_counter_ns()
        for row, task in enumerate(plan.tasks):
            if task.kind == "copy":  # no time: in one memory nothing is copied
                for replica in replicas:
                    self._store_times(task, self._first_instruction[row, -1], replica, now, now, -1, 0)

    def end_step(self, is_finished: bool) -> None:
        """Store a step's times in `kept` (`broken` if it failed); remove the clocks from the pieces."""
        assert self._rows is not None
        self._rows.codes[0][:] = self._codes_without_clocks
        if not is_finished:
            self.broken = self._times
            return
        self.detail = self._detail or self.detail
        _append_bounded(self.kept, self._times, self._most_steps)

    def run_task(self, row: int, index: int, replica: int, work: Callable[[int], None], core: int) -> None:
        """Run a task by `work(index)`. If its row is in an ipu's program, then wait for the device's work,
        and store the times."""
        assert self._rows is not None
        task, ticks = self._rows.plan.tasks[row], list[tuple[int, int]]()
        self._thread.ticks = ticks
        first = self._first_instruction.get((row, index if task.index == "micro_batch" else -1))
        if first is None:
            work(index)
            return
        detail = self._detail if replica == 0 and not task.once else None
        if detail is not None:
            detail.meters[task.ipu].record_before(task, index, first)
        begin, before = perf_counter_ns(), thread_time_ns()
        work(index)
        computed = thread_time_ns() - before
        synchronize(self._rows.state.device)
        end = perf_counter_ns()
        for other in range(self._rows.settings.counts.replicas) if task.once else (replica,):
            self._store_times(task, first, other, begin, end, core, computed)
        if detail is not None:
            detail.meters[task.ipu].record_after(task, index, first)
            if ticks:
                detail.add_run(task.piece, ticks)

    def _read_clocks(self) -> None:
        self._thread.ticks.append((perf_counter_ns(), thread_time_ns()))

    def _store_times(
        self, task: Task, first: int, replica: int, begin: int, end: int, core: int, computed: int
    ) -> None:
        """Store the time of a row as that of its "compute" or "update" instruction (without one, of the first
        instruction); the others take no time. The times of an update's chunks are added up."""
        times, moment = self._times[replica, task.ipu], begin
        main = next((i for i, x in enumerate(task.instructions) if x.kind in _WORK), None)
        for number in range(len(task.instructions)):
            index = first + number
            if number != (main or 0):
                times.store(index, moment, moment, core)
                continue
            if task.once and index < times.length and times.ends[index]:  # of another chunk
                begin, computed = times.begins[index], computed + times.computed[index]
            times.store(index, begin, end, core, 0 if main is None else computed)
            moment = end
