"""Buckets of gradients: cut in the order of the backward, and one after another in memory."""

import importlib

import pytest
from engine_models import graph_of, net, stages, train_state_of

from popengine.compile import compile_graph
from popengine.run.state import DeviceTensors, all_devices
from popengine.run.updating import buckets_of
from popengine.settings import Counts, Optimizer, Settings

BACKWARD = ["d", "c", "b", "norm", "a"]  # the layers, as their gradients come


def made(monkeypatch, size, least=None, replicas=1):
    """The state of a model whose blocks are all in one piece, and its buckets of about `size` bytes."""
    monkeypatch.setattr(importlib.import_module("popengine.compile.partition"), "BUCKET", size)
    settings = Settings(
        True,
        Counts(1, 1, replicas, replicas, instances=2),
        stages(0, 0, 0, 0, order="sharded"),
        optimizer=Optimizer("sgd"),
        shard_optimizer=least,
    )
    plan = compile_graph(graph_of(), settings)
    train_state = train_state_of(net().state_dict(), dict(net().named_parameters()), replicas=replicas)
    state = DeviceTensors(plan, settings, train_state, *all_devices(plan, settings))
    return state, [b for t in plan.tasks if t.kind == "exchange" for b in buckets_of(plan, t.piece, [state])]


def test_gradients_are_exchanged_in_the_order_in_which_the_backward_makes_them(monkeypatch):
    state, found = made(monkeypatch, size=1)
    layers = [key.split(".")[0] for bucket in found for key in bucket.keys]
    assert sorted(set(layers), key=layers.index) == BACKWARD
    assert sorted(key for bucket in found for key in bucket.keys) == sorted(state.trained)


def test_a_bucket_is_closed_when_it_is_large_enough(monkeypatch):
    _, found = made(monkeypatch, size=100)
    sizes = [sum(net().get_parameter(key).nbytes for key in bucket.keys) for bucket in found]
    assert len(found) > 2 and all(size >= 100 for size in sizes[:-1])


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_sums_are_the_memory_of_their_bucket_and_begin_well(monkeypatch, replicas):
    state, (bucket,) = made(monkeypatch, size=1 << 20, replicas=replicas)
    assert bucket.cuts is None and len(bucket.flats) == replicas
    for flat, sums in zip(bucket.flats, state.sums, strict=True):
        flat.fill_(2)
        assert all(value.eq(2).all() for value in sums.values())
        assert [value.data_ptr() % 64 for value in sums.values()] == [flat.data_ptr() % 64] * len(sums)


def test_gradients_that_one_process_needs_lie_in_its_share(monkeypatch):
    state, (bucket,) = made(monkeypatch, 1 << 20, least=0)
    assert set(state.train_state.owner.values()) == {0, 1}
    start, middle, stop = bucket.cuts
    assert (start, stop) == (0, bucket.flats[0].numel())
    sums = state.sums[0]
    assert all((sums[key].storage_offset() >= middle) == bool(state.train_state.owner[key]) for key in sums)


def test_the_state_is_shared_out_evenly(monkeypatch):
    state, _ = made(monkeypatch, 1 << 20, least=0)
    loads = [0, 0]
    for unit in state.units:
        loads[state.train_state.owner[unit.key]] += state.weight(unit).numel()
    assert abs(loads[0] - loads[1]) <= max(state.weight(unit).numel() for unit in state.units)


@pytest.mark.parametrize(
    "accumulation, many, parts", [(2, 1, True), (1, 1, False), (2, 1 << 30, False)],
    ids=["many bytes", "one micro-batch: nothing is added up", "few bytes"],
)  # fmt: skip
def test_many_bytes_of_gradients_are_added_to_their_sums_a_bucket_at_a_time(
    monkeypatch, accumulation, many, parts
):
    module = importlib.import_module("popengine.compile.partition")
    monkeypatch.setattr(module, "BUCKET", 1)
    monkeypatch.setattr(module, "MANY", many)
    optimizer = Optimizer("sgd")
    settings = Settings(
        True, Counts(1, accumulation, 1, 1), stages(0, 0, 0, 0, order="sharded"), optimizer=optimizer
    )
    partition = compile_graph(graph_of(), settings).partition
    names = {result.name for result in partition.signature.results if result.kind == "gradient"}
    made = [names.intersection(piece.writes) for piece in partition.pieces if piece.phase == "B"]
    assert set().union(*made) == names
    assert (max(map(len, made)) < len(names)) == parts
