"""Processes exchange gradients while the backward runs, and update when all exchanges are complete.

The bits are the same, and a failure between two exchanges leaves the same weights in all."""

import importlib

import processes
import pytest
import training

import popdist
import poptorch
from popengine.run.updating import Updates


def noted_exchanges(fails=lambda row, made: False):
    """Let each gradient be a bucket. Returns the rows whose exchange has begun, and updates."""
    made = []
    exchange, update = Updates._exchange_buckets, Updates._run_step

    def exchanged(updates, row, call, index):
        if fails(row, made):
            raise RuntimeError("on purpose")
        made.append(("exchange", row))
        exchange(updates, row, call, index)

    def updated(updates, call, parts):
        made.append(("update", 0))
        update(updates, call, parts)

    # `popengine.compile.partition` as an attribute is the function.
    module = importlib.import_module("popengine.compile.partition")
    module.BUCKET, Updates._exchange_buckets, Updates._run_step = 1, exchanged, updated
    return made


def trained():
    """The weights with large and with small buckets, and what was made of the latter."""
    popdist.init()
    found, made = [], []
    for is_small in (False, True):
        made = noted_exchanges() if is_small else []
        executor, model, _ = training.executor(momentum=0.9)
        executor(*training.batch(0))
        found.append(training.weights(model))
    return found, made


def test_buckets_of_any_size_give_the_same_bits_and_updates_begin_after_all_exchanges():
    ended = processes.run(trained, 2)
    assert [each.error for each in ended] == [""] * 2
    (weights, made), (others, same) = (each.value for each in ended)
    assert weights == others == [weights[0]] * 2
    # Two updates: a weight and a bias of each of two ipus.
    rows = [row for kind, row in made if kind == "exchange"]
    assert rows == [row for kind, row in same if kind == "exchange"] == 2 * sorted({*rows}) and len(rows) == 8
    for kinds in ([kind for kind, _ in each] for each in (made, same)):
        step = kinds[: len(kinds) // 2]
        assert step == sorted(step) and step.count("exchange") == 4 and "update" in step


def fail_in_the_middle():
    """Instance 1 fails in the second call when some gradients have gone, and others not."""
    popdist.init()
    me, left = popdist.getInstanceIndex(), []

    def fails(row, made):
        return bool(left and me and len(made) == left[0] + 2 and left.pop())

    made = noted_exchanges(fails)
    executor, model, _ = training.executor(momentum=0.9)
    executor(*training.batch(0))
    before = training.weights(model)
    left.append(len(made))
    begun = len(made)
    with pytest.raises((poptorch.Error, RuntimeError)) as caught:
        executor(*training.batch(1))
    kinds = {kind for kind, _ in made[begun:]}
    same, done = training.weights(model) == before, executor.finished_updates
    left.clear()
    executor(*training.batch(1))
    return str(caught.value), same, done, training.weights(model), kinds


def test_a_failure_between_two_exchanges_leaves_the_same_weights_in_all_processes():
    first, second = processes.run(fail_in_the_middle, 2)
    assert (first.error, second.error) == ("", "")
    assert "another instance failed: instance 1 failed" in first.value[0]
    assert "on purpose" in second.value[0]
    assert first.value[1:3] == second.value[1:3] == (True, 0)
    assert first.value[4] == second.value[4] == {"exchange"}
    assert first.value[3] == second.value[3]
