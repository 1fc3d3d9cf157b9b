"""Cores do whatever can be done, in any order that the tasks leave open: the same bits, errors that leave no trace."""

import random
import threading
import time

import pytest
import torch
from engine_models import Net, graph_of, net, stages
from stand_ins import LAYOUTS, Remote, assert_same, batch_for, engine_on, rates, trained

from popengine.compile import compile_graph
from popengine.ir import Compute, Update
from popengine.run import cores
from popengine.run.devices.base import Device
from popengine.run.tasks import tasks
from popengine.settings import Counts, Settings


@pytest.fixture(params=[1, 3])
def any_order(request, monkeypatch):
    """Each core takes any of the tasks that are ready, and not the first."""
    numbers = random.Random(request.param)
    monkeypatch.setattr(
        cores, "heappop", lambda ready: ready.pop(numbers.randrange(len(ready))) if ready else None
    )
    monkeypatch.setattr(cores, "heappush", list.append)
    monkeypatch.setattr(cores, "WORTH_SHARING", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_order_that_tasks_allow_gives_the_bits_of_a_thread_an_ipu(layout, any_order):
    options = LAYOUTS[layout]
    assert_same(
        trained(engine_on(lambda ipu: Device(), **options)),
        trained(engine_on(lambda ipu: Remote(), **options)),
    )


def planned(*ipus, accumulation=8, training=True):
    counts = Counts(1, accumulation) if training else Counts(accumulation)
    settings = Settings(training, counts, stages(*ipus))
    return compile_graph(graph_of(net() if training else Net().eval(), training=training), settings)


@pytest.mark.parametrize("ipus", [(0, 0, 0, 0), (0, 1, 2, 3), (0, 1, 0, 1)])
@pytest.mark.parametrize("training", [True, False])
def test_tasks_hold_each_instruction_once(ipus, training):
    plan = planned(*ipus, training=training)
    found = tasks(plan, 8, adds_outputs=False, in_order=False)
    for ipu, program in plan.programs.items():
        cuts = sorted((task.start, task.stop) for task in found if task.ipu == ipu)
        assert [index for start, stop in cuts for index in range(start, stop)] == list(range(len(program)))
        for start, stop in cuts:
            assert sum(isinstance(x, (Compute, Update)) for x in program[start:stop]) <= 1


def test_micro_batches_wait_for_each_other_only_at_sums_and_buffers():
    found = tasks(planned(0, 1, 2, 3), 8, adds_outputs=False, in_order=False)
    computed = [task for task in found if task.piece >= 0]
    assert {task.micro_batch for task in computed} == set(range(8))
    for task in computed:
        assert {other.micro_batch for other in task.after} <= {task.micro_batch, -1}  # -1: sums and buffers


def test_few_micro_batches_are_under_way_where_few_may_be():
    found = tasks(planned(0, 1, 2, 3), 2, adds_outputs=False, in_order=False)
    firsts = [task for task in found if task.piece == 0]
    for task in firsts[2:]:
        assert any((other.piece, other.micro_batch) == (7, task.micro_batch - 2) for other in task.after)


def test_in_order_pieces_see_one_micro_batch_after_another():
    found = tasks(planned(0, 1, 2, 3), 8, adds_outputs=False, in_order=True)
    for task in found:
        if task.piece >= 0 and task.micro_batch > 0:
            assert any(reaches(other, task.piece, task.micro_batch - 1) for other in task.after)


def reaches(task, piece, micro_batch):
    return (task.piece, task.micro_batch) == (piece, micro_batch) or any(
        (other.piece, other.micro_batch) == (piece, micro_batch) for other in task.after
    )


def test_as_many_cores_as_torch_has_threads_work_for_all_ipus():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        names = {thread.name for thread in threading.enumerate()}
        engine = engine_on(lambda ipu: Device(), counts=(2, 8, 2))
        assert {"core 0", "core 1", "core 2"} <= {thread.name for thread in threading.enumerate()}
        assert not any(name.startswith("ipu ") for name in names)
        engine.run(batch_for(engine), rates("sgd"))
    finally:
        torch.set_num_threads(before)
    engine.close()


@pytest.mark.parametrize(("worth", "threads"), [(0, {"core 0", "core 1"}), (60, {"core 0"})])
def test_short_tasks_are_left_to_one_core(worth, threads, monkeypatch):
    monkeypatch.setattr(cores, "WORTH_SHARING", worth)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        engine = engine_on(lambda ipu: Device(), counts=(4, 8, 2))
    finally:
        torch.set_num_threads(before)
    engine.run(batch_for(engine), rates("sgd"))  # judged here
    seen = set()
    for worker in engine._workers:
        worker._code = {i: noted(code, seen) for i, code in worker._code.items()}
    engine.run(batch_for(engine), rates("sgd"))
    assert seen == threads


def noted(code, seen):
    def call(values):
        seen.add(threading.current_thread().name)
        time.sleep(0.001)
        return code(values)

    return call
