"""Separate devices: each ipu of a plan in a process of its own, which runs that ipu's program and nothing else.

What ipus hand each other goes through shared memory, and who waits looks at it all the time. So a process is as
near to a device that does one thing at a time as a host's core can be; none shares Python's lock with another.
"""

from __future__ import annotations

import io
import mmap
import multiprocessing
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from cases import Case, Runner  # pyright: ignore[reportMissingImports]
from popengine.run.drivers.leading_thread import Crew
from popengine.run.drivers.worker import Run, Worker
from torch import Tensor

from popengine import ir

_COUNTERS = 16  # bytes: how often it was filled, and emptied


class Box:
    """Tensors on their way from one process to another: a file that both have in memory."""

    def __init__(self, path: Path, values: Sequence[Tensor] | None = None) -> None:
        if values is not None:
            text = io.BytesIO()
            torch.save([(value.shape, value.dtype) for value in values], text)
            draft = path.with_suffix(".part")
            draft.write_bytes(
                bytes(_COUNTERS)
                + len(text.getvalue()).to_bytes(8, "little")
                + text.getvalue().ljust(-(-len(text.getvalue()) // 64) * 64 + 40)
                + bytes(sum(-(-value.nbytes // 64) * 64 for value in values))
            )
            draft.replace(path)
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._counters = memoryview(self._memory).cast("q")
        size = self._counters[2]
        shapes = torch.load(io.BytesIO(self._memory[24 : 24 + size]))
        at = 24 + -(-size // 64) * 64 + 40
        self._values = []
        for shape, dtype in shapes:
            count = shape.numel()
            self._values.append(
                torch.frombuffer(self._memory, dtype=dtype, count=count, offset=at).view(shape)
                if count
                else torch.empty(shape, dtype=dtype)
            )
            at += -(-count * dtype.itemsize // 64) * 64
        self._done = 0

    def fill(self, values: Sequence[Tensor]) -> None:
        while self._counters[1] != self._done:
            pass
        for place, value in zip(self._values, values, strict=True):
            place.copy_(value)
        self._done += 1
        self._counters[0] = self._done

    def take(self) -> list[Tensor]:
        self._done += 1
        while self._counters[0] != self._done:
            pass
        values = [value.clone() for value in self._values]
        self._counters[1] = self._done
        return values


class Boxes:
    """In place of `Channels`: between processes. `waited`: seconds for what was not there yet."""

    stopped = False

    def __init__(self, folder: Path) -> None:
        self._folder, self._boxes, self.waited = folder, {}, 0.0

    def _path(self, name: Any) -> Path:
        return self._folder / "".join(sign if sign.isalnum() else "_" for sign in repr(name))

    def has(self, name: Any) -> bool:
        return True

    def put(self, name: Any, values: Sequence[Tensor]) -> None:
        if name not in self._boxes:
            self._boxes[name] = Box(self._path(name), values)
        self._boxes[name].fill(values)

    def receive(self, name: Any) -> list[Tensor]:
        start = time.perf_counter()
        if name not in self._boxes:
            while not self._path(name).exists():
                time.sleep(1e-4)
            self._boxes[name] = Box(self._path(name))
        found = self._boxes[name].take()
        self.waited += time.perf_counter() - start
        return found


class OneIpu:
    """In place of a driver: one ipu's program, in its order. A micro-batch begins when an earlier one has ended."""

    inside = 1

    def __init__(self, worker: Worker, folder: Path) -> None:
        self._worker, self.boxes = worker, Boxes(folder)
        plan = worker.plan
        self._in_flight, self._count = plan.schedule.in_flight, plan.schedule.micro_batches
        self._last = len(plan.partition.pieces) - 1
        own = {x.piece for x in plan.programs[worker.ipu] if isinstance(x, ir.Compute)}
        self._begins, self._ends = (
            0 in own and self._last not in own,
            self._last in own and 0 not in own,
        )
        self.began = self.steps_took = 0.0

    def __call__(self, run: Run) -> None:
        run.channels = self.boxes  # pyright: ignore[reportAttributeAccessIssue]
        worker = self._worker
        worker.begin(run)
        start = time.perf_counter()
        for step in range(run.steps):
            worker.begin_step(step)
            for handle, instruction in worker.program:
                piece = instruction.piece if isinstance(instruction, ir.Compute) else None
                if piece == 0 and self._begins and instruction.micro_batch >= self._in_flight:
                    self.boxes.receive(("ended", instruction.micro_batch - self._in_flight))
                work, name = handle(instruction), None
                while work is not None and (name := worker.go_on(work, name)) is not None:
                    pass
                is_end = piece == self._last and self._ends
                if is_end and instruction.micro_batch < self._count - self._in_flight:
                    self.boxes.put(("ended", instruction.micro_batch), [])
        for ipu in (worker.ipu, 1 - worker.ipu):  # a call ends when all ipus have
            move = self.boxes.put if ipu == worker.ipu else lambda name, _: self.boxes.receive(name)
            move(("call", ipu), [])
        self.steps_took += time.perf_counter() - start
        worker.finish()

    def close(self) -> None:
        pass


class Pair:
    """Two processes, one an ipu, for many cases one after another."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for ipu in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, ipu), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def ask(self, *message: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(message)
        answers = [pipe.recv() for pipe in self._pipes]
        for answer in answers:
            if isinstance(answer, str):
                raise RuntimeError(answer)
        return answers

    def prepare(self, name: str, case: Case) -> None:
        self.ask("prepare", name, case, tempfile.mkdtemp(dir="/dev/shm", prefix="ipus"))
        self.once(name), self.once(name)

    def once(self, name: str) -> tuple[float, float]:
        """Seconds of a row, and the share of the steps' time in which a process waited, on average."""
        answers = self.ask("once", name)
        return max(answer[0] for answer in answers), sum(answer[1] for answer in answers) / len(answers)

    def step(self, name: str) -> float:
        """Seconds of a step, of the latest `once`."""
        return max(answer[0] for answer in self.ask("step", name))

    def drop(self, name: str) -> None:
        self.ask("drop", name)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)


def _serve(pipe: Connection, ipu: int) -> None:
    """A process: answers messages until there is nobody who asks."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[ipu % len(cores)]})
    found: dict[str, tuple[Runner, OneIpu, Path]] = {}
    latest: dict[str, tuple[float, float]] = {}
    while True:
        try:
            message, name, *more = pipe.recv()
        except EOFError:
            return
        try:
            answer: Any = (0.0, 0.0)
            if message == "prepare":
                runner, folder = Runner(replace(more[0], threads=1)), Path(more[1])
                engine = runner.executor._lease.engine
                worker = next(worker for worker in engine._workers if worker.ipu == ipu)
                driver = OneIpu(worker, folder)
                engine._crews[False] = Crew([worker], driver)  # pyright: ignore[reportArgumentType]
                found[name] = runner, driver, folder
            elif message == "once":
                runner, driver, _ = found[name]
                driver.boxes.waited = driver.steps_took = 0.0
                row = runner.once()
                latest[name] = driver.steps_took / runner.steps, 0.0
                answer = row, driver.boxes.waited / driver.steps_took
            elif message == "step":
                answer = latest[name]
            elif message == "drop":
                runner, _, folder = found.pop(name)
                shutil.rmtree(folder, ignore_errors=True)  # the other one does so, too
                runner.executor.destroy()
            pipe.send(answer)
        except BaseException:
            pipe.send(traceback.format_exc())
