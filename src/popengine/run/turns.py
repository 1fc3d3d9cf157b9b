"""Turns: the order in which one thread drives all workers, so that none of them ever waits.

Found before by running the programs on counted tokens instead of values. In each round every worker computes at
most one piece, as it would beside the others: so that the kernels of all ipus are started early.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..ir import Compute, Instruction, Receive, Send, Update
from .worker import Run, Worker


def order(
    programs: Mapping[int, Sequence[Instruction]], credits: Mapping[Any, int]
) -> list[tuple[int, int, int]]:
    """One step of all ipus of a replica, as slices (ipu, start, stop) of their programs; without the updates."""
    tokens = Counter(credits)
    ends = {
        ipu: len(program) - any(isinstance(last, Update) for last in program[-1:])
        for ipu, program in programs.items()
    }
    at = dict.fromkeys(programs, 0)
    found: list[tuple[int, int, int]] = []
    while any(at[ipu] < ends[ipu] for ipu in programs):
        before = len(found)
        for ipu, program in programs.items():
            stop = _go_on(program, at[ipu], ends[ipu], tokens)
            if stop > at[ipu]:
                found.append((ipu, at[ipu], stop))
                at[ipu] = stop
        assert len(found) > before, "every ipu waits for another one"
    return found


def _go_on(program: Sequence[Instruction], at: int, end: int, tokens: Counter[Any]) -> int:
    """How far a program runs: until it waits, or is about to compute a second time."""
    computed = False
    for index in range(at, end):
        instruction = program[index]
        if isinstance(instruction, Receive):
            if not tokens[instruction.channel]:
                return index
            tokens[instruction.channel] -= 1
        elif isinstance(instruction, Send):
            tokens[instruction.channel] += 1
        elif isinstance(instruction, Compute):
            if computed:
                return index
            computed = True
    return end


class Turns:
    """Runs all steps of all workers, in one thread."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers
        plan = workers[0].plan
        found = order(plan.programs, plan.credits)
        self._parts = [
            (worker, worker.program[start:stop])
            for ipu, start, stop in found
            for worker in workers
            if worker.ipu == ipu
        ]
        self._updates = [
            (worker, worker.program[-1][1])
            for worker in workers
            if worker.program and isinstance(worker.program[-1][1], Update)
        ]

    def __call__(self, run: Run) -> None:
        run.inputs = [self._workers[0].device.on_host(value) for value in run.inputs]
        self.begin(run)
        self.steps(run)

    def begin(self, run: Run) -> None:
        """Tell all workers of a call."""
        for worker in self._workers:
            with worker.device.running():
                worker.begin(run)

    def steps(self, run: Run) -> None:
        """All that a call computes, once every worker has begun it."""
        for step in range(run.steps):
            for worker in self._workers:
                with worker.device.running():
                    worker.begin_step(step)
            for worker, part in self._parts:
                with worker.device.running():
                    for handle, instruction in part:
                        handle(instruction)
            self._update(run)
        for worker in self._workers:
            with worker.device.running():
                worker.finish()

    def _update(self, run: Run) -> None:
        """All updates, each as far as it can go without what another one has still to give."""
        waiting = [(worker, worker.updating(instruction), None) for worker, instruction in self._updates]
        while waiting:
            reached = [(worker, work, _advance(worker, work, name)) for worker, work, name in waiting]
            still = [entry for entry in reached if entry[2] is not None]
            assert [entry[2] for entry in waiting] != [entry[2] for entry in still], (
                "updates wait in a circle"
            )
            waiting = still


def _advance(worker: Worker, work: Any, name: Any) -> Any:
    with worker.device.running():
        return worker.go_on(work, name)
