"""Cores: some threads that do whatever can be done next, for whichever ipu.

A thread an ipu leaves cores idle where ipus wait for each other, and more threads than cores fight for them. Here
each core takes the first task that is ready: that of the earliest micro-batch. So a core mostly stays with a
micro-batch, whose values are in its cache, and no ipu waits while there is something to do. What has one order
for the sake of equal bits, keeps it: see `tasks.py`. Tasks too short to be shared are left to one core.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from time import perf_counter
from typing import Any

import torch

from .. import ir
from .tasks import tasks
from .worker import Run, Worker

WORTH_SHARING = 1e-4  # seconds that a task takes on average; of less, cores mostly wait for Python's lock
_JUDGED = 32  # tasks, after as many that warm up


class Cores:
    """Runs calls of all workers on `count` threads, one of them the caller's."""

    def __init__(self, workers: Sequence[Worker], count: int) -> None:
        plan, settings = workers[0].plan, workers[0].settings
        self._workers = workers
        self._mail: dict[Any, Any] = {}  # what ipus have sent each other
        self._run: Run
        pipelined = settings.strategy.mode == "pipelined"
        found = tasks(
            plan,
            max(plan.schedule.in_flight, count) if pipelined else plan.schedule.in_flight,
            adds_outputs="sum" in (settings.outputs, *(anchor.outputs for anchor in settings.anchors)),
            in_order=settings.finite_checks,
        )
        replicas = settings.counts.replicas
        size = len(found) * replicas
        self._bodies: list[Any] = [None] * size
        self._followers: list[list[int]] = [[] for _ in range(size)]
        self._waits_for = [0] * size
        self._updates: dict[int, Worker] = {}
        place = {id(task): index * replicas for index, task in enumerate(found)}
        bodies = [(worker, self._body(worker)) for worker in workers]
        of_ipu = {ipu: [(w, body) for w, body in bodies if w.ipu == ipu] for ipu in plan.programs}
        for task in found:
            is_update = isinstance(plan.programs[task.ipu][task.start], ir.Update)
            for worker, body in of_ipu[task.ipu]:
                node = place[id(task)] + worker.replica
                self._bodies[node] = body[task.start : task.stop]
                self._waits_for[node] = len(task.after)
                for other in task.after:
                    self._followers[place[id(other)] + worker.replica].append(node)
                if is_update:
                    self._updates[node] = worker
        # Updates that wait for a channel, and those that need not any more: their work, and its name.
        self._paused: dict[int, tuple[Any, Any]] = {}
        self._resumed: dict[int, tuple[Any, Any]] = {}
        self._changed = threading.Condition(threading.Lock())
        self._ready: list[int] = []
        self._missing: list[int] = []
        self._left = self._running = self._idle = 0
        self._failure: BaseException | None = None
        self._closed = False
        # Several instances wait for each other within updates, which so have to go on at the same time.
        self._is_shared = settings.training and settings.counts.instances > 1
        self._judged, self._spent = 2 * _JUDGED if self._is_shared else 0, 0.0
        for number in range(1, count):
            threading.Thread(target=self._help, name=f"core {number}", daemon=True).start()

    def _body(self, worker: Worker) -> list[tuple[Callable[[Any], None], Any]]:
        """The worker's program; its values go to other ipus without a queue, as nobody has to wait for them."""
        instead = {ir.Send: partial(self._send, worker), ir.Receive: partial(self._receive, worker)}
        return [
            (instead.get(type(instruction), handle), instruction) for handle, instruction in worker.program
        ]

    def _send(self, worker: Worker, instruction: ir.Send) -> None:
        if instruction.names:  # else it bounds what is under way, as the tasks do
            self._mail[worker.replica, instruction.channel, instruction.micro_batch] = worker.sent(
                instruction
            )

    def _receive(self, worker: Worker, instruction: ir.Receive) -> None:
        if instruction.names:
            values = self._mail.pop((worker.replica, instruction.channel, instruction.micro_batch))
            worker.received(instruction, values)

    # ---- a call ------------------------------------------------------------------------------------------

    def __call__(self, run: Run) -> None:
        self._run = run
        for worker in self._workers:
            worker.begin(run)
        try:
            for step in range(run.steps):
                for worker in self._workers:
                    worker.begin_step(step)
                self._step()
        finally:
            self._mail.clear()
            del self._run
        for worker in self._workers:
            worker.finish()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _step(self) -> None:
        with self._changed:
            self._missing = self._waits_for.copy()
            self._left, self._failure = len(self._missing), None
            self._ready = [node for node, missing in enumerate(self._missing) if not missing]
        self._work(lambda: not self._running and (not self._left or self._failure is not None), leads=True)
        if self._failure is not None:
            raise self._failure

    def _help(self) -> None:
        torch.set_num_threads(1)
        with torch.inference_mode():
            self._work(lambda: self._closed, leads=False)

    def _work(self, is_over: Callable[[], bool], leads: bool) -> None:
        """Do what is ready until it's over."""
        done: tuple[int, bool] | None = None
        while (node := self._next(is_over, leads, done)) is not None:
            try:
                started = perf_counter()
                done = node, self._perform(node)
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

    def _perform(self, node: int) -> bool:
        """Do a task; False if it's an update that now waits for another one."""
        worker = self._updates.get(node)
        if worker is not None:
            work, name = self._resumed.pop(node, None) or (worker.updating(self._bodies[node][0][1]), None)
            name = worker.go_on(work, name)
            if name is not None:
                self._paused[node] = work, name
            return name is None
        for handle, instruction in self._bodies[node]:
            handle(instruction)
        return True

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
        """Updates go on whose channels have something for them."""
        for node, (_, name) in list(self._paused.items()):
            if self._run.channels.has(name):
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
