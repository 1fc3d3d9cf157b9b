"""Cores do whatever can be done, in any order that the tasks leave open: the same bits, errors that leave no trace."""

import random
import threading
import time

import pytest
import torch
from engine_models import Net, graph_of, net, stages
from small_engines import (
    LAYOUTS,
    assert_same,
    batch_for,
    engine_of,
    rates,
    trained,
)

from popengine.compile import compile_graph
from popengine.compile.schedule import as_run, depth_first
from popengine.compile.schedule.check import ticks
from popengine.errors import RunError
from popengine.ir import Compute, Update
from popengine.run.drivers import driver
from popengine.run.drivers.driver import Driver
from popengine.run.drivers.leading_thread import Crew
from popengine.run.drivers.one_call import Run
from popengine.run.drivers.tasks import tasks, tasks_of, timeline
from popengine.run.measure.recorder import Recorder
from popengine.settings import Counts, Settings, StagePlan, Strategy


@pytest.fixture(params=[1, 3])
def any_order(request, monkeypatch):
    """Each core takes any of the tasks that are ready, and not the first."""
    numbers = random.Random(request.param)
    monkeypatch.setattr(
        driver, "heappop", lambda ready: ready.pop(numbers.randrange(len(ready))) if ready else None
    )
    monkeypatch.setattr(driver, "heappush", list.append)
    monkeypatch.setattr(driver, "WORTH_SHARING", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_order_that_tasks_allow_gives_the_bits_of_lanes(layout, any_order):
    options = LAYOUTS[layout]
    assert_same(
        trained(engine_of(**options)),
        trained(engine_of(**options), recorder=Recorder()),
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
        before_it = {thread.ident for thread in threading.enumerate()}
        engine = engine_of(counts=(2, 8, 2))
        made = {thread.name for thread in threading.enumerate() if thread.ident not in before_it}
        assert made == {"core 0", "core 1", "core 2"}, "others share an update once one is large"
        engine.run(batch_for(engine), rates("sgd"))
    finally:
        torch.set_num_threads(before)
    engine.close()


@pytest.mark.parametrize(("worth", "threads"), [(0, {"core 0", "core 1"}), (60, {"core 0"})])
def test_short_tasks_are_left_to_one_core(worth, threads, monkeypatch):
    monkeypatch.setattr(driver, "WORTH_SHARING", worth)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        engine = engine_of(counts=(4, 8, 2))
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_profiled_run_gives_the_bits_of_the_cores(layout):
    options = LAYOUTS[layout]
    assert_same(trained(engine_of(**options)), trained(engine_of(**options), recorder=Recorder()))


@pytest.mark.parametrize("recorder", [None, Recorder()], ids=["cores", "lanes"])
def test_a_failed_call_leaves_no_trace_and_names_its_place(recorder):
    options = {"counts": (2, 8, 2), "kind": "adamw"}
    engine, twin = (engine_of(**options) for _ in range(2))
    for each in (engine, twin):
        each.run(batch_for(each), rates("adamw"))
    x, y = batch_for(engine)
    y[-1] = 77  # no such class; the last micro-batch of the second update
    with pytest.raises(RunError, match=r"forward of stage 3 .* micro-batch 7, replica 1"):
        engine.run([x, y], rates("adamw"), recorder)
    assert engine.random_state == twin.random_state
    assert_same(trained(engine), trained(twin))


def test_an_interrupt_ends_the_call_and_leaves_no_trace(monkeypatch):
    """Ctrl-C arrives in the thread that waits, in the middle of the first of many steps."""
    engine, twin = (engine_of(counts=(50, 8, 1)) for _ in range(2))
    running = threading.Event()
    worker = engine._workers[0]
    code = dict(worker._code)

    def slow(index):
        def call(values):
            running.set()
            time.sleep(0.01)
            return code[index](values)

        return call

    worker._code = {index: slow(index) for index in code}

    def interrupted(run):
        running.wait(5)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Run, "wait", interrupted)
        engine.run(batch_for(engine), rates("sgd"))
    worker._code = code
    assert_same(trained(engine), trained(twin))


def test_a_recorder_sees_each_ipu():
    engine, twin = (engine_of() for _ in range(2))
    recorder = Recorder()
    found = engine.run(batch_for(engine), rates("sgd"), recorder)
    assert torch.equal(found.outputs()[1], twin.run(batch_for(twin), rates("sgd")).outputs()[1])
    assert set(recorder.kept) == {(0, ipu) for ipu in range(4)}
    assert_same(trained(engine), trained(twin))


# ---- what is drawn is what runs --------------------------------------------------------------------------


class Noting(Recorder):
    """A recorder that also keeps the order in which pieces began, and their cores."""

    def __init__(self):
        super().__init__()
        self.actions = []

    def performing(self, worker, start, body, core):
        for _, instruction in body:
            if isinstance(instruction, Compute):
                piece = worker.plan.partition.pieces[instruction.piece]
                self.actions.append((worker.ipu, f"{piece}.{instruction.micro_batch}"))
        yield from super().performing(worker, start, body, core)


def recorded(engine, lanes, threads):
    """The actions of one step, with their ipus, as a driver begins them."""
    crew = engine._crews[True] = Crew(engine._workers, Driver(engine._workers, threads, lanes))
    recorder = Noting()
    engine.run(batch_for(engine), rates("sgd") if engine.settings.training else None, recorder)
    crew.close()
    return recorder.actions[: sum(map(len, engine.plan.schedule.rows.values()))]


def rows(schedule):
    return {lane: [str(action) for action in row] for lane, row in schedule.rows.items()}


LANES = [
    {},
    {"ipus": (0, 1, 2, 0)},
    {"ipus": (0, 1, 0, 1), "mode": "sharded"},
    {"training": False, "counts": (8, 1, 1)},
    {"training": False, "counts": (8, 1, 1), "mode": "sharded"},
]


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("options", LANES, ids=str)
def test_lanes_run_their_schedule_as_it_is_drawn(options, threads):
    engine = engine_of(**options)
    found = recorded(engine, lanes=True, threads=threads)
    drawn = rows(engine.plan.schedule)
    assert {ipu: [text for at, text in found if at == ipu] for ipu in drawn} == drawn
    engine.close()


def test_one_thread_begins_actions_tick_by_tick():
    """The rows of the drawing one below the other: its columns."""
    engine = engine_of(ipus=(0, 0, 1, 1))
    found = recorded(engine, lanes=True, threads=1)
    when = {str(action): tick for action, tick in ticks(engine.plan.schedule).items()}
    assert [when[text] for _, text in found] == sorted(when.values())
    engine.close()


@pytest.mark.parametrize("mode", ["pipelined", "sharded"])
def test_one_core_goes_depth_first_as_it_is_drawn(mode):
    engine = engine_of(mode=mode)
    found = recorded(engine, lanes=False, threads=1)
    assert [text for _, text in found] == rows(depth_first(4, 8, True, cores=1))[0]
    engine.close()


@pytest.mark.parametrize("cores", [1, 2, 3])
@pytest.mark.parametrize("mode", ["pipelined", "sharded"])
def test_cores_in_virtual_time_run_as_it_is_drawn(mode, cores):
    """The same tasks with the same cost each: a pipeline's cores take a micro-batch each, and sharded stages turns."""
    settings = Settings(True, Counts(1, 8), stages(0, 1, 2, 3, mode=mode))
    plan = compile_graph(graph_of(net()), settings)
    found = tasks_of(plan, settings, cores, lanes=False)
    line = timeline(found, [float(task.piece >= 0) for task in found], cores)
    computed = [number for number in line.order if found[number].piece >= 0]
    drawn = as_run(plan.schedule, cores)
    when = {str(action): tick for action, tick in ticks(drawn).items()}
    pieces = plan.partition.pieces
    assert {
        f"{pieces[found[number].piece]}.{found[number].micro_batch}": line.starts[number]
        for number in computed
    } == when
    assert line.length == (64 if mode == "sharded" else 64 if cores == 1 else {2: 32, 3: 24}[cores])


ONE_STAGE = Strategy("pipelined", None, (StagePlan(tuple("ABCD"), 0),))


@pytest.mark.parametrize("strategy", [ONE_STAGE, stages(0, 1, 2, 3)], ids=["one stage", "four ipus"])
def test_cores_share_a_model_however_many_stages_it_has(strategy):
    # With batch norm too, whose running statistics are handed on within pieces: they ran one after another.
    # A model of one stage ran on one core: its schedule has one micro-batch in flight, and was taken for sharded.
    settings = Settings(True, Counts(1, 8), strategy)
    plan = compile_graph(graph_of(net()), settings)
    alone, shared = (
        timeline(found, [float(task.piece >= 0) for task in found], cores).length
        for cores in (1, 2)
        for found in [tasks_of(plan, settings, cores, lanes=False)]
    )
    assert shared == alone / 2
