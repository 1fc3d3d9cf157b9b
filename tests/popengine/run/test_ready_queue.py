"""Cores do whatever is ready, in any order that the table leaves open: the same bits; errors name their place."""

import random
import threading
import time

import pytest
import torch
from engine_models import graph_of, net, stages
from small_engines import LAYOUTS, assert_same, batch_for, engine_of, rates, trained, trained_on_cpu

from popengine.compile import compile_graph
from popengine.order import ORDERS, timeline
from popengine.run import ready_queue
from popengine.run.recorder import Recorder
from popengine.settings import Counts, Settings, StagePlan, Strategy
from popengine.table import actions


@pytest.fixture(params=[1, 3])
def any_order(request, monkeypatch):
    """Engines that are made after a call of the result have so many cores, and each core takes any of the tasks that
    are ready, and not the first."""
    numbers, before = random.Random(request.param), torch.get_num_threads()

    def begin():
        monkeypatch.setattr(ready_queue, "heappop", lambda ready: ready.pop(numbers.randrange(len(ready))))
        monkeypatch.setattr(ready_queue, "heappush", list.append)
        monkeypatch.setattr(ready_queue, "WORTH_SHARING", 0)
        torch.set_num_threads(request.param)

    yield begin
    torch.set_num_threads(before)


@pytest.mark.parametrize("recorder", [None, Recorder], ids=["plain", "recorded"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_order_that_the_table_allows_gives_the_same_bits(layout, recorder, any_order):
    options = LAYOUTS[layout]
    in_order = trained_on_cpu(**options)
    any_order()
    assert_same(trained(engine_of(**options), calls=2, recorder=recorder and recorder()), in_order)


@pytest.mark.parametrize(("worth", "threads"), [(0, {"core 0", "core 1"}), (60, {"core 0"})])
def test_short_tasks_are_left_to_one_core(worth, threads, monkeypatch):
    monkeypatch.setattr(ready_queue, "WORTH_SHARING", worth)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        engine = engine_of(counts=(4, 8, 2))
    finally:
        torch.set_num_threads(before)
    engine.run(batch_for(engine), rates("sgd"))  # judged here
    seen = set()
    for codes in engine.workers[0].codes:
        codes[:] = [noted(code, seen) for code in codes]
    engine.run(batch_for(engine), rates("sgd"))
    assert seen == threads
    engine.close()


def noted(code, seen):
    def call(values):
        seen.add(threading.current_thread().name)
        time.sleep(0.001)
        return code(values)

    return call


# ---- what is drawn is what runs --------------------------------------------------------------------------


def drawn(plan, cores=0):
    """For each device the actions of a step, as the drawing shows them."""
    found, _ = actions(plan.tasks)
    tasks, times = timeline(found, plan.micro_batches, ORDERS[plan.order], cores)
    rows = {}
    for number in times.order:
        (row, m), device = tasks[number], times.devices[number]
        rows.setdefault(device, []).append(f"{found[row].phase}{found[row].stage}.{m}")
    return rows


@pytest.mark.parametrize("order", ORDERS)
def test_one_core_runs_the_order_that_is_drawn(order):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        engine = engine_of(order=order, counts=(1, 8, 1))
    finally:
        torch.set_num_threads(before)
    engine.run(batch_for(engine), rates("sgd"))
    ran = []
    nodes = ready_queue.StepTasks(engine.workers, 1)
    rows = [nodes.all[number] for number in range(len(nodes.all))]
    missing, ready = nodes.waits_for.copy(), sorted(nodes.first)
    while ready:
        number = ready.pop(0)
        task = engine.plan.tasks[rows[number].row]
        name = f"{task.phase}{task.stage}.{rows[number].index}"
        if task.kind in ("forward", "backward") and name not in ran:
            ran.append(name)
        for follower in nodes.followers[number]:
            missing[follower] -= 1
            if not missing[follower]:
                ready = sorted([*ready, follower])
    assert ran == drawn(engine.plan, cores=1)[0]
    engine.close()


ONE_STAGE = Strategy("1f1b", None, (StagePlan(tuple("ABCD"), 0),))


@pytest.mark.parametrize("strategy", [ONE_STAGE, stages(0, 1, 2, 3)], ids=["one stage", "four ipus"])
def test_cores_share_a_model_however_many_stages_it_has(strategy):
    # With batch norm too, whose running statistics pass from one micro-batch to the next: they ran one after another.
    settings = Settings(True, Counts(1, 8), strategy, optimizer=engine_of().settings.optimizer)
    plan = compile_graph(graph_of(net()), settings)
    found, _ = actions(plan.tasks)
    alone, both = (timeline(found, 8, ORDERS[plan.order], cores)[1].length for cores in (1, 2))
    assert both <= alone / 2 + len(found)  # the second core is a part behind the first
