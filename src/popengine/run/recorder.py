"""Records a profile while tasks run: the start and end of each task, and the CPU time of its thread.

The first two steps are recorded in detail: pieces read both clocks after every operation, and the tensors
that each ipu holds between instructions are listed (the second step replaces the first, which includes
warm-up). Of a long training only the first and last steps are stored, so that a profile's size is bounded.
"""

from __future__ import annotations

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
from ..profile import Tensor as Row
from ..programs import programs
from .backends.eager import Code, build
from .devices import synchronize
from .row_functions import RowFunctions

_Memory = tuple[int, int] | int  # a storage; for the user's inputs (micro-batch, data pointer)


class Meter:
    """The tensors that an ipu of replica 0 holds, as if it had its own memory. Times: instruction indices."""

    def __init__(self, rows: RowFunctions, ipu: int) -> None:
        self._rows, self._ipu = rows, ipu
        # Each was made by the instruction `born`, and freed by `died` (-1: not yet); in the order of `born`.
        self.tensors: list[Row] = []
        self._held: dict[_Memory, int] = {}  # memory -> its index in `tensors`
        self._names: Counter[_Memory] = Counter()  # how many names refer to each
        self._memory: dict[tuple[int, str], _Memory] = {}  # by micro-batch and name
        self._inputs = {value.untyped_storage()._cdata for value in rows.call.inputs}
        self._state = self._state_storages()

    def before(self, task: Task, micro_batch: int, first: int) -> None:
        """Record the tensors that a row loads (inputs) and receives (from other ipus), before the row runs.

        Args:
            first: index of the row's first instruction
        """
        frame = self._rows.frames[0].get(micro_batch, {})
        for index, instruction in enumerate(task.instructions, first):
            if instruction.kind == "receive":
                self._note_made(instruction.names, frame, micro_batch, index)
            elif instruction.kind == "load":
                given = dict(zip(instruction.names, instruction.keys, strict=True))
                values = {name: self._rows.input(int(key), micro_batch, 0) for name, key in given.items()}
                self._note_made(instruction.names, values, micro_batch, index)

    def after(self, task: Task, micro_batch: int, first: int) -> None:
        """Record the tensors that a row has made and freed, after the row has run."""
        frame = self._rows.frames[0].get(micro_batch, {})
        for index, instruction in enumerate(task.instructions, first):
            if instruction.kind == "compute":
                self._note_freed(instruction.names, micro_batch, index)
                made = self._rows.plan.partition.pieces[instruction.piece].writes
                self._note_made(made, frame, micro_batch, index)
            elif instruction.kind == "keep":
                self._state = self._state_storages()
            elif instruction.kind == "free":
                self._note_freed(instruction.names, micro_batch, index)

    def _note_made(
        self, names: Iterable[str], values: Mapping[str, Tensor], micro_batch: int, index: int
    ) -> None:
        for name in names:
            if name not in values or (micro_batch, name) in self._memory:
                continue
            value = values[name]
            storage = value.untyped_storage()
            if storage._cdata in self._state:
                continue
            is_input = storage._cdata in self._inputs
            key: _Memory = (micro_batch, value.data_ptr()) if is_input else storage._cdata
            self._memory[micro_batch, name] = key
            self._names[key] += 1
            if key not in self._held:
                size, kind = (value.nbytes, "input") if is_input else (storage.nbytes(), "activation")
                self._held[key] = len(self.tensors)
                self.tensors.append(Row(self._ipu, name, kind, micro_batch, size, index, -1))

    def _note_freed(self, names: Iterable[str], micro_batch: int, index: int) -> None:
        for name in names:
            key = self._memory.pop((micro_batch, name), None)
            if key is not None:
                self._names[key] -= 1
                if not self._names[key]:
                    place = self._held.pop(key)
                    self.tensors[place] = self.tensors[place]._replace(died=index)

    def _state_storages(self) -> set[int]:
        state = self._rows.state
        values = (*state.values[0].values(), *state.new_buffers[0].values())
        return {value.untyped_storage()._cdata for value in values}


DETAILED_STEPS = 2
_WORK = ("compute", "update")  # kinds of instructions that take time
_CALLS = 1000  # number of first calls, and of last calls, whose times are stored


class Times:
    """The times of one step of one ipu: for each instruction of its program begin and end
    (perf_counter_ns), core, and CPU time (ns; 0: not measured)."""

    def __init__(self, call: int, step: int, length: int) -> None:
        self.call, self.step, self.length = call, step, length
        self.begins, self.ends, self.computed = (array("q", bytes(8 * length)) for _ in range(3))
        self.cores = array("h", bytes(2 * length))

    def note(self, index: int, begin: int, end: int, core: int, computed: int = 0) -> None:
        """Store the times of one instruction, waits included; an index beyond `length` is ignored."""
        if index < self.length:
            self.begins[index], self.ends[index] = begin, end
            self.cores[index], self.computed[index] = core, computed


def _append_bounded(kept: list[Any], entry: Any, most: int) -> None:
    """Append an entry to a list that keeps only its first `most` and its last `most` entries."""
    kept.append(entry)
    if len(kept) > 2 * most:
        del kept[most]


@dataclass
class Detail:
    """The detailed record of one step of replica 0: each ipu's tensors, and the times of each operation."""

    call: int
    step: int
    meters: dict[int, Meter]  # by ipu
    # By piece, for each of its lines: time of the fastest run in any step; CPU time of all runs (ns).
    fastest: dict[int, list[int]]
    lines: dict[int, list[int]] = field(default_factory=dict)
    runs: Counter[int] = field(default_factory=Counter)  # piece -> how often it ran

    def times(self, piece: int) -> list[int]:
        """Return the ns of each line over all runs: CPU time, but at least fastest run × number of runs."""
        least = (ns * self.runs[piece] for ns in self.fastest[piece])
        return [max(pair) for pair in zip(self.lines[piece], least, strict=True)]

    def note(self, piece: int, ticks: list[tuple[int, int]]) -> None:
        """Add one run of a piece; `ticks` are the readings of both clocks around its lines, see `_Ticks`."""
        took, computed = ([end[i] - start[i] for start, end in pairwise(ticks)] for i in (0, 1))
        before = self.lines.get(piece, [0] * len(computed))
        self.lines[piece] = [a + b for a, b in zip(before, computed, strict=True)]
        self.fastest[piece] = list(map(min, self.fastest.get(piece, took), took))
        self.runs[piece] += 1


class Recorder:
    """The measurements of all calls that this recorder was passed to.

    Args:
        budget: number of instructions to store, over all ipus and replicas. At least two steps are stored;
            of a program that is too long for that, only the beginning.
    """

    def __init__(self, budget: int = 120_000) -> None:
        self.budget, self.origin = budget, perf_counter_ns()
        self.kept: list[dict[tuple[int, int], Times]] = []  # the first and the last steps, by replica and ipu
        self.detail: Detail | None = None  # of the latest step that was recorded in detail
        self.in_calls: list[tuple[int, int, int, int]] = []  # the first and the last: call, start, end, steps
        self.host: deque[tuple[str, int, int, int]] = deque(maxlen=4 * _CALLS)  # kind, start, end, bytes
        self.calls = self.failed_calls = self.steps = self.ns_in_calls = 0
        self._call, self._started = -1, 0
        self._times: dict[tuple[int, int], Times] = {}  # of the step that runs
        self.broken: dict[tuple[int, int], Times] = {}  # of the last step that failed, by replica and ipu
        self._detail: Detail | None = None  # of the running step
        self._rows: RowFunctions | None = None
        self._codes_without_clocks: list[Code] = []  # the pieces of replica 0 without clocks
        self._lengths: dict[int, int] = {}  # of each ipu's program
        self._most_steps = 1  # to store, at either end of a training
        self._first_instruction: dict[tuple[int, int], int] = {}  # row, micro-batch -> its first instruction
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
        self.calls, self.steps = self.calls + 1, self.steps + steps
        self.ns_in_calls += end - self._started
        _append_bounded(self.in_calls, (self._call, self._started, end, steps), _CALLS)

    def note(self, kind: str, start: int, size: int = 0) -> None:
        """Record work or a wait of the host, from `start` (perf_counter_ns) until now; `size` in bytes."""
        self.host.append((kind, start, perf_counter_ns(), size))

    # ---- the queue's side --------------------------------------------------------------------------------

    def begin_step(self, rows: RowFunctions) -> None:
        """Prepare to record a step. The first two steps run pieces with clocks in replica 0 (eager)."""
        plan, replicas = rows.plan, range(rows.settings.counts.replicas)
        _, number = rows.state.random_state  # of the step, over all calls
        if self._rows is None or self._rows.plan is not plan:
            made, self.detail = programs(plan), None
            self._lengths = {ipu: len(program.instructions) for ipu, program in made.items()}
            entries = [entry for program in made.values() for entry in program.entries]
            self._first_instruction = {(entry.row, entry.micro_batch): entry.first for entry in entries}
        most = max(1, self.budget // (2 * len(self._lengths) * len(replicas)))
        self._most_steps = max(1, self.budget // (2 * max(1, sum(self._lengths.values()) * len(replicas))))
        self._rows, self._detail = rows, None
        self._times = {
            (replica, ipu): Times(self._call, number, min(most, length))
            for ipu, length in self._lengths.items()
            for replica in replicas
        }
        self._codes_without_clocks = list(rows.codes[0])
        if len(self.kept) < DETAILED_STEPS:
            meters = {ipu: Meter(rows, ipu) for ipu in self._lengths}
            fastest = {} if self.detail is None else self.detail.fastest
            self._detail = Detail(self._call, number, meters, fastest)
            if rows.settings.backend == "eager":  # compiled pieces have no single operations
                tick = self._ticks.note
                rows.codes[0][:] = [
                    build(piece, after="; tick()", tick=tick) for piece in plan.partition.pieces
                ]
        now = perf_counter_ns()
        for row, task in enumerate(plan.tasks):
            if task.kind == "copy":  # no time: in one memory nothing is copied
                for replica in replicas:
                    self._note(task, self._first_instruction[row, -1], replica, now, now, -1, 0)

    def end_step(self, is_finished: bool) -> None:
        """Store the times of the step (if it failed, only in `broken`); restore pieces without clocks."""
        assert self._rows is not None
        self._rows.codes[0][:] = self._codes_without_clocks
        if not is_finished:
            self.broken = self._times
            return
        self.detail = self._detail or self.detail
        _append_bounded(self.kept, self._times, self._most_steps)

    def perform(self, row: int, index: int, replica: int, work: Callable[[int], None], core: int) -> None:
        """Run a task, wait for the device's work, and record the times. Tasks of no program are only run."""
        assert self._rows is not None
        task = self._rows.plan.tasks[row]
        first = self._first_instruction.get((row, index if task.index == "micro_batch" else -1))
        if first is None:
            work(index)
            return
        detail = self._detail if replica == 0 and not task.once else None
        if detail is not None:
            detail.meters[task.ipu].before(task, index, first)
        self._ticks.read.clear()
        begin, before = perf_counter_ns(), thread_time_ns()
        work(index)
        computed = thread_time_ns() - before
        synchronize(self._rows.state.device)
        end = perf_counter_ns()
        for other in range(self._rows.settings.counts.replicas) if task.once else (replica,):
            self._note(task, first, other, begin, end, core, computed)
        if detail is not None:
            detail.meters[task.ipu].after(task, index, first)
            if self._ticks.read and task.kind in ("forward", "backward"):
                detail.note(task.piece, self._ticks.read)

    def _note(
        self, task: Task, first: int, replica: int, begin: int, end: int, core: int, computed: int
    ) -> None:
        """Store the times of a row's instructions: all for its computation, update or first one."""
        times, moment = self._times[replica, task.ipu], begin
        main = next((i for i, x in enumerate(task.instructions) if x.kind in _WORK), None)
        for number in range(len(task.instructions)):
            index = first + number
            if number != (main or 0):
                times.note(index, moment, moment, core)
                continue
            if task.once and index < times.length and times.ends[index]:  # another chunk of the same update
                begin, computed = times.begins[index], computed + times.computed[index]
            times.note(index, begin, end, core, 0 if main is None else computed)
            moment = end


class _Ticks(threading.local):
    """The clock readings of this thread's piece: one before its first line, and one after each line."""

    def __init__(self) -> None:
        self.read: list[tuple[int, int]] = []  # (perf_counter_ns, thread_time_ns)

    def note(self) -> None:
        self.read.append((perf_counter_ns(), thread_time_ns()))
