"""The ready queue: threads that run each task of a step as soon as the tasks that it waits for are done.

A task is a row of the table with an index (a micro-batch) and a replica. Tasks are numbered in the order of
the step, and a thread takes the first that is ready. Each device has threads and a queue of its own, and so have the
rows that communicate with other processes, in the same order in every process.
"""

import ctypes
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial
from heapq import heappop, heappush
from itertools import pairwise
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any, NamedTuple

import torch

from ..errors import UnrecoverableError
from ..order import After, StepActions, order_named, simulate, timeline
from ..schedules import bounds_of_rows
from ..table import actions
from . import devices
from .call import EngineCall
from .captured_step import CapturedStep
from .recorder import Recorder
from .row_functions import RowFunctions
from .updating import Work

_PAUSE_SOFT = 1  # omp_pause_soft: the library's settings stay


def end_openmp_threads() -> None:
    """End the OpenMP threads of the calling thread, if torch uses GNU's OpenMP library."""
    library = _gnu_openmp()
    if library is not None:
        library.omp_pause_resource_all(_PAUSE_SOFT)


@cache
def _gnu_openmp() -> ctypes.CDLL | None:
    """Return GNU's OpenMP library, if it is loaded and has the function to end threads; otherwise None."""
    with suppress(OSError, AttributeError):  # Windows has no RTLD_NOLOAD
        library = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        return library if hasattr(library, "omp_pause_resource_all") else None
    return None


WORTH_SHARING = 1e-4  # mean seconds of a task; with shorter tasks several cores mostly wait for Python's lock
_JOIN_TIMEOUT = 1.0  # seconds to wait for the end of a thread, which may be waiting for a peer
_POLL_INTERVAL = 0.2  # seconds; an interrupt without a signal wakes no waiting thread, so waits are repeated
MEASURED_TASKS = 16  # number of tasks that are measured, after the same number for warm-up
SENDER = -1  # in place of a core's number: the thread of tasks that communicate with other processes


class BoundTask(NamedTuple):
    """A task: a row of the table for one index and one replica, and the function that runs it."""

    row: int
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]  hides the method of tuples
    replica: int
    work: Work
    lane: int  # index of its device; -1: it communicates with other processes


class StepTasks:
    """All tasks of a step in the order of the step, for `cores` cores, and their dependencies, by task number."""

    def __init__(self, workers: Sequence[RowFunctions], cores: int) -> None:
        plan = self._plan = workers[0].plan
        self._replicas = workers[0].settings.counts.replicas
        self._sizes = [plan.micro_batches if task.index == "micro_batch" else 1 for task in plan.tasks]
        step_actions, self._rows_of = actions(plan.tasks)
        self._order = order_named(plan.order)
        self._step = StepActions(tuple(step_actions), plan.micro_batches, cores)
        self._action_of = {row: number for number, rows in enumerate(self._rows_of) for row in rows}
        after = [list(task.after) for task in plan.tasks]
        # The table of several places has the edges by which the order bounds memory.
        for row, edge in () if plan.places else bounds_of_rows(plan, cores):
            after[row].append(edge)
        self.all = sorted(
            (
                BoundTask(row, index, replica, work, -1 if worker.communicates(row) else lane)
                for row, task in enumerate(plan.tasks)
                for replica in range(1 if task.once else self._replicas)
                for lane, worker in enumerate(workers if task.ipu >= 0 else workers[:1])
                if (work := worker.bind(row, replica)) is not None
                for index in range(self._sizes[row])
            ),
            key=self._sort_key,
        )
        for row in {row for worker in workers for row, _ in worker.generators}:
            after[row].append(After(row, 1))  # generators continue from one micro-batch to the next
        number_of = {(task.row, task.index, task.replica): number for number, task in enumerate(self.all)}
        before: list[set[int]] = []
        for task in self.all:
            awaited = (key for edge in after[task.row] for key in self._awaited_tasks(edge, task))
            before.append({number_of[key] for key in awaited if key in number_of})
        receives = (n for n, task in enumerate(self.all) if plan.tasks[task.row].kind == "receive")
        self.receives = {*receives} if workers[0].mail is not None else set()  # of other processes' messages
        for earlier, later in pairwise(self._ordered_gathers(workers[0])):
            before[number_of[later]].add(number_of[earlier])
        # In which one thread runs the tasks. Raises Error for an order that never ends.
        self.order = simulate(before, [1.0] * len(before), devices=1).order
        self.waits_for = [len(needs) for needs in before]
        self.followers: list[list[int]] = [[] for _ in self.all]
        for number, needs in enumerate(before):
            for need in needs:
                self.followers[need].append(number)
        self.first = [number for number, needs in enumerate(before) if not needs]

    def _sort_key(self, task: BoundTask) -> tuple[Any, ...]:
        """Return the sort key of a task: messages first, then sums, then others by the plan's order, then those of a
        step by row."""
        row, position = self._plan.tasks[task.row], (task.index, task.row, task.replica)
        if row.kind in ("send", "receive"):
            return -1, task.row, position
        if row.index != "micro_batch":
            return 2, task.row, position
        action = self._step.actions[self._action_of[task.row]]
        return row.kind != "sum", self._order.key(self._step, action, task.index), position

    def _ordered_gathers(self, rows: RowFunctions) -> list[tuple[int, int, int]]:
        """Return (row, micro-batch, replica) of the gathers over processes, in the one order of all processes."""
        kinds = enumerate(task.kind for task in self._plan.tasks)
        gathers = {row for row, kind in kinds if kind == "gather" and rows.communicates(row)}
        if not gathers:
            return []
        tasks, times = timeline(self._step.actions, self._plan.micro_batches, self._order)
        return [
            (row, tasks[number][1], replica)
            for number in times.order
            for row in self._rows_of[tasks[number][0]]
            if row in gathers
            for replica in range(self._replicas)
        ]

    def _awaited_tasks(self, edge: After, task: BoundTask) -> list[tuple[int, int, int]]:
        """Return (row, index, replica) of each task for which `task` waits because its row has this edge."""
        row = self._plan.tasks[edge.row]
        group = self._replicas if self._plan.tasks[task.row].once else min(edge.group, self._replicas)
        start = task.replica // group * group
        replicas = [0] if row.once else range(start, start + group)
        if edge.behind is not None:
            indices = [task.index - edge.behind if row.index == "micro_batch" else 0]
        else:
            # If each micro-batch waits for the previous one, it is enough to wait for the last.
            is_chain = After(edge.row, 1) in row.after
            indices = range(self._sizes[edge.row])[-1 if is_chain else 0 :]
        return [(edge.row, index, replica) for index in indices if index >= 0 for replica in replicas]


class _Lane:
    """The numbers of ready tasks (a heap) of one device, or of those that communicate; the threads that take them."""

    def __init__(self, lock: threading.Lock, cores: int) -> None:
        self.ready, self.changed = list[int](), threading.Condition(lock)
        self.idle = 0  # number of cores
        self.is_shared = False  # whether cores other than the first take tasks
        self.measured_count, self.spent = 2 * MEASURED_TASKS if cores == 1 else 0, 0.0

    def measure_task(self, seconds: float) -> None:
        """Add the time of a task. Other cores run tasks once the mean of `MEASURED_TASKS` tasks, after a warm-up, is
        above `WORTH_SHARING`."""
        self.measured_count += 1
        if self.measured_count > MEASURED_TASKS:
            self.spent += seconds
        self.is_shared = self.spent > MEASURED_TASKS * WORTH_SHARING


class Core(NamedTuple):
    """A thread that runs tasks of a device."""

    number: int  # among all cores; `SENDER`
    lane: int  # index of the device; -1 for `SENDER`
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]  among the cores of the device


class ReadyQueue:
    """The threads that run calls, and the queues from which they take tasks.

    Args:
        workers: the rows of each device
        cores:   the number of cores of each device
        threads: the number of threads of each operation, on each device
    """

    def __init__(self, workers: Sequence[RowFunctions], cores: Sequence[int], threads: Sequence[int]) -> None:
        self.workers, self._cores_of_first, self._threads = workers, cores[0], threads
        self._train_state = workers[0].state.train_state
        self._table: StepTasks | None = None  # made for the first step
        has_queue = any(devices.has_queue(worker.state.device) for worker in workers)
        self._captured = CapturedStep(workers) if has_queue else None
        self._tasks: StepTasks  # of the running step
        self._call: EngineCall | None = None
        self._recorder: Recorder | None = None
        lock = threading.Lock()
        self._lanes = [_Lane(lock, count) for count in (*cores, 1)]  # the last: tasks that communicate
        self._missing: list[int] = []  # by task, the number of tasks that it still waits for
        self._unfinished = self._running = 0  # numbers of unfinished tasks, running tasks
        self._failure: BaseException | None = None
        self._is_closed = False
        self._inbox: SimpleQueue[EngineCall | SimpleQueue[None] | None] = SimpleQueue()
        rows = workers[0]
        places = [(lane, index) for lane, count in enumerate(cores) for index in range(count)]
        self.cores = [Core(number, *place) for number, place in enumerate(places)]
        communicates = rows.mail or (rows.settings.training and rows.settings.counts.instances > 1)
        sender = [Core(SENDER, -1, 0)] if communicates else []
        self._all = [threading.Thread(target=self._serve_engine_calls, name="core 0", daemon=True)]
        for core in [*self.cores[1:], *sender]:
            work = partial(self._run_tasks_until_closed, core)
            self._all.append(threading.Thread(target=work, name=f"core {core.number}", daemon=True))
        for thread in self._all:
            thread.start()

    # ---- calls -----------------------------------------------------------------------------------------------

    def start(self, call: EngineCall, recorder: Recorder | None) -> None:
        """Start a call without waiting for its end. The previous call must have ended."""
        self._recorder = recorder
        for device in {worker.state.device for worker in self.workers}:
            if devices.has_queue(device):
                call.begins_after.append((devices.event_of(device), device))
        if self._threads[0] > 1:
            end_openmp_threads()
        self._inbox.put(call)

    def wait_until_idle(self) -> None:
        """Wait until each started call, or the thread that runs calls, has ended."""
        answers: SimpleQueue[None] = SimpleQueue()
        self._inbox.put(answers)
        while self._all[0].is_alive():
            with suppress(Empty):
                return answers.get(timeout=_POLL_INTERVAL)

    def close(self) -> None:
        """End the threads, and wait for each at most `_JOIN_TIMEOUT` seconds: while Python finalizes it could abort."""
        self._inbox.put(None)
        with self._lanes[0].changed:
            self._is_closed = True
            for lane in self._lanes:
                lane.changed.notify_all()
        for thread in self._all:
            if thread is not threading.current_thread():
                thread.join(_JOIN_TIMEOUT)

    def _serve_engine_calls(self) -> None:
        """Run the calls in the inbox one after another until `close`: the function of core 0's thread."""
        while (call := self._inbox.get()) is not None:
            if not isinstance(call, EngineCall):
                call.put(None)
                continue
            error: BaseException | None = None
            try:
                torch.set_num_threads(self._threads[0])
                with torch.inference_mode(), devices.as_current_device(self.workers[0].state.device):
                    try:
                        for event, device in call.begins_after:
                            devices.wait_for(event, device)
                        self._run_steps(call)
                    finally:
                        for worker in self.workers:
                            worker.clear()
                        self._wait_for_devices()
                if self._threads[0] > 1:
                    end_openmp_threads()
            except BaseException as failure:  # whatever it is, the caller raises it
                error = failure
                if call.begins_after and isinstance(failure, UnrecoverableError):
                    devices.keep_for_ever(call)
            torch.set_num_threads(call.threads)
            call.failure = call.commit.end(error)
            del call, error

    def _wait_for_devices(self) -> None:
        """Wait until all devices have run a call. Raises UnrecoverableError if one failed: the weights are lost."""
        failure: UnrecoverableError | None = None
        for worker in self.workers:
            try:
                devices.synchronize(worker.state.device)
            except UnrecoverableError as error:
                failure = failure or error
        if failure is not None:
            self._train_state.commit.lose(failure)
            raise failure

    def _run_steps(self, call: EngineCall) -> None:
        """Run the steps of a call. Raises the first error of a task; after an interrupt Stopped."""
        self._table = self._table or StepTasks(self.workers, self._cores_of_first)
        while call.commit.done < call.commit.steps:
            for worker in self.workers:
                worker.begin_step(call)
            self._train_state.held = None
            self._run_step(call, self._table)
            for worker in self.workers:
                worker.end_step(call)
            self.workers[0].updates.end_step()
            call.commit.finish_step()
        self.workers[0].share_results(call)

    def _run_step(self, call: EngineCall, tasks: StepTasks) -> None:
        """Run the tasks of a step; raise the first error."""
        recorder = self._recorder
        if self._captured is not None and recorder is None and self._captured.run(tasks, call):
            return
        if recorder is not None:
            recorder.begin_step(self.workers, len(tasks.all))
        lane = self._lanes[0]
        with lane.changed:
            self._call, self._tasks, self._missing = call, tasks, tasks.waits_for.copy()
            self._unfinished, self._failure = len(tasks.all), None
            for task in tasks.first:
                self._add_ready(task, lane)
        self._run_tasks(self.cores[0])
        self._call = None
        if recorder is not None:
            recorder.end_step(is_finished=self._failure is None)
        if self._failure is not None:
            raise self._failure

    # ---- threads ---------------------------------------------------------------------------------------------

    def _run_tasks_until_closed(self, core: Core) -> None:
        """Run tasks of all calls until the queue is closed: the function of each thread except core 0's."""
        torch.set_num_threads(1 if core.number == SENDER else self._threads[core.lane])
        device = self.workers[max(core.lane, 0)].state.device
        with torch.inference_mode(), devices.as_current_device(device):
            self._run_tasks(core)

    def _run_tasks(self, core: Core) -> None:
        """Run ready tasks: core 0 until the end of the step, other cores until `close`. Errors go to `_fail_step`."""
        done: int | None = None
        lane = self._lanes[core.lane]
        while (number := self._next_task(lane, core, done)) is not None:
            try:
                task, call, started = self._tasks.all[number], self._call, perf_counter()
                assert call is not None
                if self._recorder is None:
                    task.work(call, task.index)
                else:
                    work, worker = partial(task.work, call), self.workers[max(core.lane, 0)]
                    self._recorder.run_task(worker, task, work, core.number)
                del call
                if lane.measured_count < 2 * MEASURED_TASKS and self._is_of_micro_batch(task):
                    lane.measure_task(perf_counter() - started)
                done = number
            except BaseException as error:  # whatever it is, the caller raises it
                done = None
                self._fail_step(error)

    def _is_of_micro_batch(self, task: BoundTask) -> bool:
        """Return whether a task is one of many. An update, which one core runs, may take as long as all others."""
        return self.workers[0].plan.tasks[task.row].index == "micro_batch"

    def _next_task(self, lane: _Lane, core: Core, done: int | None) -> int | None:
        """Mark the task `done` as finished, and return the number of a ready task; None at the end. Under one lock, so
        that this core, which has the results of `done` in its cache, takes a task that `done` made ready."""
        with lane.changed:
            if done is not None:
                self._mark_finished(done, lane)
            while not lane.ready or not (core.index == 0 or lane.is_shared):
                has_ended = not self._running and (not self._unfinished or self._failure is not None)
                if has_ended if core.number == 0 else self._is_closed:
                    return None
                lane.idle += 1
                lane.changed.wait()
                lane.idle -= 1
            self._running += 1
            number = heappop(lane.ready)
            if lane.ready and lane.idle and lane.is_shared:
                lane.changed.notify()
            return number

    def _mark_finished(self, number: int, lane: _Lane) -> None:
        """Decrement the counter of each task that waits for task `number` of a lane; queue those that become ready."""
        self._running -= 1
        self._unfinished -= 1
        for follower in self._tasks.followers[number] if self._failure is None else ():
            self._missing[follower] -= 1
            if not self._missing[follower]:
                self._add_ready(follower, lane)
        if not self._unfinished or self._failure is not None:
            self._lanes[0].changed.notify_all()

    def _add_ready(self, number: int, caller: _Lane | None = None) -> None:
        """Add a ready task to the heap of its lane, and wake the lane's threads, but not those of the calling thread's
        lane. A receive is ready when its message is here, so that no core waits for a message."""
        task = self._tasks.all[number]
        if number in self._tasks.receives and caller is not None:
            mail = self.workers[0].mail
            assert mail is not None
            key = self.workers[0].message_key(task.row, task.index, task.replica)
            if not mail.begin_receive(key, partial(self._add_arrived, number, self._missing)):
                return
        lane = self._lanes[task.lane]
        heappush(lane.ready, number)
        if lane is not caller:
            lane.changed.notify_all()

    def _add_arrived(self, number: int, missing: list[int]) -> None:
        """Add a receive whose message has arrived to the ready tasks, unless its step (`missing`) has ended."""
        with self._lanes[0].changed:
            if self._failure is None and missing is self._missing:
                self._add_ready(number)

    def _fail_step(self, error: BaseException) -> None:
        """Store a task's error, if the step has none; drop the ready tasks; wake the cores and the peers."""
        self.workers[0].wake_peers(error)  # other processes may wait for this one
        with self._lanes[0].changed:
            self._running -= 1
            self._failure = self._failure or error
            for lane in self._lanes:
                lane.ready.clear()
            self._lanes[0].changed.notify_all()
