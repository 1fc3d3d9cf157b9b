"""The driver: threads that take the tasks of a step from one ready queue, in the order of the schedule.

    the host's cores    any core takes any task, depth first: it mostly stays with a micro-batch, whose values are in
                        its cache, and nobody is idle while there is something to do
    lanes               each ipu does one thing at a time, in the order of its program: profiles

What waits for what says `tasks.py`. Tasks too short to be shared are left to one core. What an update does is shared
out over all cores (`update_pool.py`), but for lanes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from time import perf_counter
from typing import Any, NamedTuple

import torch

from popengine import ir

from ..instances.ordered_sums import AT_THE_END
from ..state.buffer_chain import chains
from .one_call import Run, Stopped
from .tasks import Task, tasks_of
from .update_pool import UpdatePool
from .worker import Worker

WORTH_SHARING = 1e-4  # seconds that a task takes on average; of less, cores mostly wait for Python's lock
_JUDGED = 32  # tasks, after as many that warm up


class _Node(NamedTuple):
    """A task of one replica."""

    worker: Worker
    start: int  # its first instruction's place in the program of its ipu
    body: list[tuple[Callable[[Any], Any], Any]]
    waits: bool  # maybe: an update does, and a piece that gathers values of replicas or is handed buffers


class Driver:
    """Runs calls of all workers on `threads` threads, one of them the caller's.

    Args:
        lanes:  each ipu does one thing at a time, in the order of its program
        inside: threads within an operation
        cores:  that share an update
    """

    def __init__(
        self, workers: Sequence[Worker], threads: int, lanes: bool, inside: int = 1, cores: int = 1
    ) -> None:
        plan, settings = workers[0].plan, workers[0].settings
        self._workers, self.inside = workers, inside
        self._run: Run
        self._lay_out(tasks_of(plan, settings, threads, lanes), plan, settings.counts.replicas)
        # Tasks that wait for a channel, and those that need not any more: their work, and its name.
        self._paused: dict[int, tuple[Any, Any]] = {}
        self._resumed: dict[int, tuple[Any, Any]] = {}
        self._changed = threading.Condition(threading.Lock())
        self._ready: list[int] = []
        self._missing: list[int] = []
        self._left = self._running = self._idle = 0
        self._failure: BaseException | None = None
        self._closed = False
        # Cores that share an update.
        self._sharing = cores if cores > 1 and settings.training and not lanes else 0
        self._pool: UpdatePool | None = None  # there once a large update has been
        # Several instances wait for each other within updates, which so have to go on at the same time.
        self._is_shared = threads > 1 and settings.counts.instances > 1
        self._judged, self._spent = 2 * _JUDGED if self._is_shared or threads == 1 else 0, 0.0
        for number in range(1, threads):
            threading.Thread(target=self._help, args=(number,), name=f"core {number}", daemon=True).start()

    def _lay_out(self, found: Sequence[Task], plan: ir.Plan, replicas: int) -> None:
        """Number the tasks of all replicas: what is ready is taken in the order of these numbers."""
        of_ipu = {ipu: [worker for worker in self._workers if worker.ipu == ipu] for ipu in plan.programs}
        place = {id(task): index * replicas for index, task in enumerate(found)}
        size = len(found) * replicas
        nodes: list[Any] = [None] * size
        chained = chains(plan, self._workers[0].settings)
        self._followers: list[list[int]] = [[] for _ in range(size)]
        self._waits_for = [0] * size
        for task in found:
            waits = isinstance(plan.programs[task.ipu][task.start], ir.Update) or (
                task.piece >= 0 and (task.piece in chained or plan.partition.pieces[task.piece].gathers > 0)
            )
            for worker in of_ipu[task.ipu]:
                node = place[id(task)] + worker.replica
                nodes[node] = _Node(worker, task.start, worker.program[task.start : task.stop], waits)
                self._waits_for[node] = len(task.after)
                for other in task.after:
                    self._followers[place[id(other)] + worker.replica].append(node)
        self._nodes: list[_Node] = nodes

    # ---- a call ------------------------------------------------------------------------------------------

    def __call__(self, run: Run) -> None:
        self.begin(run)
        self.steps(run)

    def begin(self, run: Run) -> None:
        """Tell all workers of a call."""
        for worker in self._workers:
            worker.begin(run)

    def steps(self, run: Run) -> None:
        """All that a call computes, once every worker has begun it."""
        self._run = run
        run.share = self._share if self._sharing else None
        run.offered = self._offered
        try:
            for step in range(run.steps):
                for worker in self._workers:
                    worker.begin_step(step)
                if run.recorder is None:
                    self._step()
                else:
                    with run.recorder.recording(self._workers, run.first_step + step):
                        self._step()
        finally:
            del self._run

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._pool is not None:
            self._pool.close()

    def _step(self) -> None:
        with self._changed:
            self._missing = self._waits_for.copy()
            self._left, self._failure = len(self._missing), None
            self._ready = [node for node, missing in enumerate(self._missing) if not missing]
        self._work(lambda: not self._running and (not self._left or self._failure is not None), core=0)
        if self._failure is not None:
            raise self._failure
        self._run.is_written = self._run.is_committed

    def _help(self, core: int) -> None:
        torch.set_num_threads(self.inside)
        with torch.inference_mode():
            self._work(lambda: self._closed, core)

    def _work(self, is_over: Callable[[], bool], core: int) -> None:
        """Do what is ready until it's over."""
        done: tuple[int, bool] | None = None
        while (node := self._next(is_over, core == 0, done)) is not None:
            try:
                started = perf_counter()
                done = node, self._perform(node, core)
                if self._judged < 2 * _JUDGED:
                    self._judge(perf_counter() - started)
            except BaseException as error:  # whatever it is, the caller must hear of it
                done = None
                self._failed(error)

    def _next(self, is_over: Callable[[], bool], leads: bool, done: tuple[int, bool] | None) -> int | None:
        """After a task a new one; waits for one. None: there will be none.

        Both at once: so nobody else takes what the task has made ready, whose values are in this core's cache.
        """
        with self._changed:
            if done is not None:
                self._finished(*done)
            while not self._ready or not (leads or self._is_shared):
                if is_over():
                    return None
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
            self._running += 1
            node = heappop(self._ready)
            if self._ready and self._idle and self._is_shared:
                self._changed.notify()
            return node

    def _judge(self, seconds: float) -> None:
        """Look at the first tasks, which one core does, to see whether they are worth more."""
        self._judged += 1
        if self._judged > _JUDGED:
            self._spent += seconds
        self._is_shared = self._judged == 2 * _JUDGED and self._spent > _JUDGED * WORTH_SHARING

    def _perform(self, node: int, core: int) -> bool:
        """Do a task; False if it now waits for another one."""
        worker, start, body, waits = self._nodes[node]
        if waits:
            return self._go_on(node, core)
        if self._run.recorder is None:
            for handle, instruction in body:
                handle(instruction)
        else:
            self._run.recorder.perform(worker, start, body, core)
        return True

    def _go_on(self, node: int, core: int) -> bool:
        """Begin a task that may wait, or go on with it."""
        worker, start, body, _ = self._nodes[node]
        recorder = self._run.recorder
        work, name = self._resumed.pop(node, (None, None))
        if work is None:
            work = recorder.performing(worker, start, body, core) if recorder else worker.performing(body)
        name = worker.go_on(work, name)
        if name is not None:
            self._paused[node] = work, name
        return name is None

    def _share(self, some: Sequence[Callable[[], None]], name: Any) -> None:
        """Let all cores do these tasks of an update, and then let it go on: it waits for this channel."""
        with self._changed:
            self._running += 1
            self._pool = self._pool or UpdatePool(self._sharing)
        channels = self._run.channels
        self._pool.do(
            some, lambda: channels.stopped or self._failure is not None, partial(self._shared, name)
        )

    def _shared(self, name: Any, error: BaseException | None) -> None:
        if error is None and self._run.channels.stopped:
            error = Stopped()
        if error is not None:
            self._failed(error)
            return
        with self._changed:
            self._run.channels.put(name, None)
            self._running -= 1
            self._resume()
            self._changed.notify_all()

    def _offered(self) -> None:
        """A task that goes on has put something into a channel."""
        if self._paused:
            with self._changed:
                self._resume()
                self._changed.notify_all()

    def _finished(self, node: int, is_done: bool) -> None:
        self._running -= 1
        if is_done:
            self._left -= 1
            for follower in self._followers[node]:
                self._missing[follower] -= 1
                if not self._missing[follower]:
                    heappush(self._ready, follower)
        if self._paused:
            self._resume()
        if self._failure is not None:
            self._ready.clear()
        if not self._left or self._failure is not None:
            self._changed.notify_all()

    def _resume(self) -> None:
        """Tasks go on whose channels have something for them."""
        is_end = len(self._paused) == self._left and all(n == AT_THE_END for _, n in self._paused.values())
        for node, (_, name) in list(self._paused.items()):
            if is_end or self._run.channels.has(name):
                self._resumed[node] = self._paused.pop(node)
                heappush(self._ready, node)

    def _failed(self, error: BaseException) -> None:
        self._run.tell(self._run, error)  # others may wait for other instances, which wait for this one
        with self._changed:
            self._running -= 1
            self._failure = self._failure or error
            for waiting in (self._ready, self._paused, self._resumed):
                waiting.clear()
            self._changed.notify_all()
