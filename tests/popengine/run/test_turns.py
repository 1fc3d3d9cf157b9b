"""One thread for all ipus: the same bits as many, the same errors, nobody ever waits."""

import threading
import time

import pytest
import torch
from engine_models import graph_of, net, stages
from stand_ins import (
    LAYOUTS,
    Remote,
    Serial,
    SerialRemote,
    assert_same,
    batch_for,
    engine_on,
    rates,
    trained,
)

from popengine.compile import compile_graph
from popengine.errors import RunError
from popengine.ir import Compute
from popengine.run.devices.base import Device
from popengine.run.recorder import Recorder
from popengine.run.turns import order
from popengine.run.worker import Run
from popengine.settings import Counts, Settings


@pytest.mark.parametrize("device", [Serial, Remote, SerialRemote])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_driver_gives_the_bits_of_the_cores(layout, device):
    options = LAYOUTS[layout]
    assert_same(
        trained(engine_on(lambda ipu: Device(), **options)),
        trained(engine_on(lambda ipu: device(), **options)),
    )


def test_one_thread_drives_all_ipus_of_all_replicas():
    engine = engine_on(lambda ipu: Serial(), counts=(2, 8, 2))
    assert [crew.thread.name for crew in engine._crews] == ["ipus"]
    engine.close()
    engine._crews[0].thread.join(5)
    assert not engine._crews[0].thread.is_alive()


def test_ipus_take_turns_as_they_would_run_beside_each_other():
    settings = Settings(True, Counts(1, 3), stages(0, 0, 1, 1))
    plan = compile_graph(graph_of(net()), settings)
    turns = []
    for ipu, start, stop in order(plan.programs, plan.credits):
        computed = [i for i in plan.programs[ipu][start:stop] if isinstance(i, Compute)]
        turns += [f"{plan.partition.pieces[i.piece]}.{i.micro_batch}" for i in computed]
    assert " ".join(turns) == (
        "F0.0 F1.0 F2.0 F0.1 F3.0 F1.1 B3.0 F0.2 B2.0 F1.2 F2.1 B1.0 "
        "F3.1 B0.0 B3.1 B2.1 B1.1 F2.2 B0.1 F3.2 B3.2 B2.2 B1.2 B0.2"
    )


@pytest.mark.parametrize("device", [Device, Serial, SerialRemote])
def test_a_failed_call_leaves_no_trace_and_names_its_place(device):
    options = {"counts": (2, 8, 2), "kind": "adamw"}
    engine, twin = (engine_on(lambda ipu: device(), **options) for _ in range(2))
    for each in (engine, twin):
        each.run(batch_for(each), rates("adamw"))
    x, y = batch_for(engine)
    y[-1] = 77  # no such class; the last micro-batch of the second update
    with pytest.raises(RunError, match=r"forward of stage 3 .* micro-batch 7, replica 1"):
        engine.run([x, y], rates("adamw"))
    assert engine.random_state == twin.random_state
    assert_same(trained(engine), trained(twin))


@pytest.mark.parametrize("device", [Device, Serial])
def test_an_interrupt_ends_the_call_and_leaves_no_trace(device, monkeypatch):
    """Ctrl-C arrives in the thread that waits, in the middle of the first of many steps."""
    engine, twin = (engine_on(lambda ipu: device(), counts=(50, 8, 1)) for _ in range(2))
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


def test_a_recorder_sees_each_ipu_in_a_thread_of_its_own():
    engine, twin = (engine_on(lambda ipu: SerialRemote()) for _ in range(2))
    recorder = Recorder()
    found = engine.run(batch_for(engine), rates("sgd"), recorder)
    assert torch.equal(found.outputs()[1], twin.run(batch_for(twin), rates("sgd")).outputs()[1])
    assert set(recorder.kept) == {(0, ipu) for ipu in range(4)}
    assert_same(trained(engine), trained(twin))
