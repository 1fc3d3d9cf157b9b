"""Separate devices on this host: an executor whose ipus have a core each, and run only their own tasks in the order of
the schedule. For benchmarks only: the engine lets each core run tasks of any ipu, which is faster here."""

from __future__ import annotations

import threading
import types
from collections import defaultdict
from typing import Any

import torch

from popengine.order import order_named, timeline
from popengine.run.call import EngineCall
from popengine.run.ready_queue import ReadyQueue, StepTasks
from popengine.schedules import actions


def give_each_ipu_a_core(executor: Any) -> None:
    """Let each ipu of a compiled executor of one replica run its own tasks, one at a time, in a thread of its own."""
    queue: ReadyQueue = executor._plans.engine._queues[0]
    lanes: list[list[int]] = []

    def run_step(queue: ReadyQueue, call: EngineCall) -> None:
        rows = queue.rows
        if not lanes:
            queue._table = StepTasks(rows, len(set(rows.plan.partition.ipus)))
            lanes.extend(_lanes(queue._table, rows.plan))
        tasks = queue._table
        assert tasks is not None
        waits, changed = tasks.waits_for.copy(), threading.Condition()

        def run(lane: list[int]) -> None:
            torch.set_num_threads(1)
            with torch.inference_mode():
                for number in lane:
                    with changed:
                        changed.wait_for(lambda number=number: not waits[number])
                    task = tasks.all[number]
                    task.work(call, task.index)
                    with changed:
                        for follower in tasks.followers[number]:
                            waits[follower] -= 1
                        changed.notify_all()

        others = [threading.Thread(target=run, args=(lane,)) for lane in lanes[1:]]
        for thread in others:
            thread.start()
        run(lanes[0])
        for thread in others:
            thread.join()

    queue._run_step = types.MethodType(run_step, queue)  # type: ignore[method-assign]


def _lanes(tasks: StepTasks, plan: Any) -> list[list[int]]:
    """Return the numbers of each ipu's tasks, in the order in which it runs them. The tasks of the whole step without
    an ipu are the first ipu's."""
    numbers = defaultdict(list)
    for number, task in enumerate(tasks.all):
        key = task.row, task.index if plan.tasks[task.row].index == "micro_batch" else -1
        numbers[key].append(number)
    found = []
    actions_of_plan, rows_of = actions(plan)
    order, times = timeline(actions_of_plan, plan.micro_batches, order_named(plan.order))
    rows = [(row, order[i][1]) for i in times.order for row in rows_of[order[i][0]]]
    for ipu in sorted(set(plan.partition.ipus)):
        program = [(row, micro_batch) for row, micro_batch in rows if plan.tasks[row].ipu == ipu]
        in_program = {row for row, _ in program}
        lane = [number for key in program if key[0] in in_program for number in numbers[key]]
        whole = [
            number
            for number, task in enumerate(tasks.all)
            if task.row not in in_program and plan.tasks[task.row].ipu in (ipu, *([-1] if not found else []))
        ]
        before = [number for number in whole if plan.tasks[tasks.all[number].row].kind == "copy"]
        found.append([*before, *lane, *(number for number in whole if number not in before)])
    return found
