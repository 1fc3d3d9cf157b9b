"""Gradients go to other instances while the backward runs, and parameters are updated while the last ones are on their
way: the same bits, and a failure meanwhile leaves no trace."""

import threading

import processes
import training

import popdist
import poptorch
from popengine.run.drivers.worker import Worker
from popengine.run.instances import buckets


def small_buckets():
    """Let each gradient be a bucket; what is handed over is noted."""
    noted = []
    inner = Worker._hand_over

    def hand_over(worker, number, gradients):
        noted.append((worker.ipu, number))
        inner(worker, number, gradients)

    buckets.SIZE, Worker._hand_over = 1, hand_over
    return noted


def trained(is_small):
    popdist.init()
    noted = small_buckets() if is_small else []
    executor, model, _ = training.executor(momentum=0.9)
    executor(*training.batch(0))
    return training.weights(model), noted


def test_buckets_of_any_size_give_the_same_bits():
    large, small = processes.run(trained, 2, False), processes.run(trained, 2, True)
    assert [ended.error for ended in (*large, *small)] == [""] * 4
    assert len({tuple(ended.value[0]) for ended in (*large, *small)}) == 1
    # Two updates: a weight and a bias of each of two ipus, in their order, in the last micro-batch.
    for ended in small:
        assert sorted(ended.value[1]) == sorted(2 * [(0, 0), (0, 1), (1, 0), (1, 1)])
        for ipu in (0, 1):
            assert [number for where, number in ended.value[1] if where == ipu] == [0, 1, 0, 1]


def fail_in_the_middle():
    """Instance 1 fails when some gradients have gone, and others not."""
    popdist.init()
    noted, me = small_buckets(), popdist.getInstanceIndex()
    executor, model, _ = training.executor(momentum=0.9)
    executor(*training.batch(0))
    before = training.weights(model)

    def fails(worker, number, gradients):
        if me and (worker.ipu, number) == (0, 1):
            raise RuntimeError("on purpose")
        worker._hand_over(number, gradients)

    for worker in executor._lease.engine._workers:
        worker._handing = buckets.handing(
            worker.plan, worker.store.buckets, frozenset(), lambda n, g, worker=worker: fails(worker, n, g)
        )
    noted.clear()
    try:
        executor(*training.batch(1))
        message = ""
    except poptorch.Error as error:
        message = error.message
    same, me = training.weights(model) == before, 0
    executor(*training.batch(1))
    return message, same, training.weights(model), noted


def test_a_failure_when_some_gradients_have_gone_undoes_the_call_in_all_instances():
    first, second = processes.run(fail_in_the_middle, 2)
    assert (first.error, second.error) == ("", "")
    assert "another instance failed: instance 1 failed" in first.value[0]
    assert "backward of stage 0" in second.value[0] and "on purpose" in second.value[0]
    assert second.value[3][0] == (1, 0)  # gone before
    assert first.value[1] and second.value[1]
    assert first.value[2] == second.value[2]


def slow_last_bucket(fails):
    """The last sum of an ipu begins only when what came before it has been used. Instance 1 may fail in it."""
    popdist.init()
    small_buckets()
    me = popdist.getInstanceIndex()
    executor, model, _ = training.executor(momentum=0.9)
    executor(*training.batch(0))
    before = training.weights(model)
    for worker in executor._lease.engine._workers:
        hold_back(worker._updater, fails and me)
    try:
        executor(*training.batch(1))
        message = ""
    except poptorch.Error as error:
        message = error.message
    return message, training.weights(model) == before, training.weights(model)


def hold_back(updater, fails):
    do, sum_up, is_updated = updater._do, updater._sum_up, threading.Event()

    def done(some, share):
        yield from do(some, share)
        is_updated.set()

    def held_back(number):
        if number == 0:
            is_updated.clear()
        else:
            assert is_updated.wait(30), "the first bucket is not used before the second one is there"
            if fails:
                raise poptorch.Error("on purpose")
        sum_up(number)

    updater._do, updater.exchange._work = done, held_back


def both_calls():
    popdist.init()
    executor, model, _ = training.executor(momentum=0.9)
    executor(*training.batch(0))
    executor(*training.batch(1))
    return training.weights(model)


def test_parameters_are_updated_while_the_last_gradients_are_on_their_way():
    early, usual = processes.run(slow_last_bucket, 2, False), processes.run(both_calls, 2)
    assert [ended.error for ended in (*early, *usual)] == [""] * 4
    assert [ended.value[0] for ended in early] == ["", ""]
    assert (
        len({tuple(value) for value in (*(one.value[2] for one in early), *(one.value for one in usual))})
        == 1
    )


def test_a_failure_when_some_parameters_are_updated_undoes_the_call_in_all_instances():
    first, second = processes.run(slow_last_bucket, 2, True)
    assert (first.error, second.error) == ("", "")
    assert "on purpose" in second.value[0] and "another instance failed" in first.value[0]
    assert first.value[1] and second.value[1]
