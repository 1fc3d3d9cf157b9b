"""Buckets of gradients: in the order of the backward, one after another in memory, and handed over within it."""

from dataclasses import replace

import pytest
import torch
from engine_models import graph_of, net, stages

from popengine.compile import compile_graph
from popengine.run.instances import buckets
from popengine.settings import Counts, Settings

BACKWARD = ["d", "c", "b", "norm", "a"]  # the layers, as their gradients come


def made(monkeypatch, size, owner=lambda key: None):
    """The plan of a model whose blocks are all in one piece, its sums, and their buckets of about `size` bytes."""
    monkeypatch.setattr(buckets, "SIZE", size)
    settings = Settings(True, Counts(1, 1, 1, 1), stages(0, 0, 0, 0, mode="sharded"))
    plan = compile_graph(graph_of(), settings)
    sums = {name: torch.full(value.shape, -1.0) for name, value in net().named_parameters()}
    return plan, sums, buckets.buckets_of(plan, 0, sums, lambda key: (0,), owner, instances=2)


def keys(bucket):
    return [gradient.key for gradient in bucket.gradients]


def test_gradients_are_in_the_order_in_which_the_backward_makes_them(monkeypatch):
    _, sums, found = made(monkeypatch, size=1)
    layers = [key.split(".")[0] for bucket in found for key in keys(bucket)]
    assert sorted(set(layers), key=layers.index) == BACKWARD
    assert sorted(key for bucket in found for key in keys(bucket)) == sorted(sums)


def test_a_bucket_is_closed_when_it_is_large_enough(monkeypatch):
    _, _, found = made(monkeypatch, size=100)
    sizes = [sum(net().get_parameter(key).nbytes for key in keys(bucket)) for bucket in found]
    assert len(found) > 2 and all(size >= 100 for size in sizes[:-1])


def test_the_sums_are_the_memory_of_their_bucket_and_begin_well(monkeypatch):
    _, sums, (bucket,) = made(monkeypatch, size=1 << 20)
    bucket.flat.fill_(2)
    assert all(value.eq(2).all() for value in sums.values())
    assert [value.data_ptr() % 64 for value in sums.values()] == [bucket.flat.data_ptr() % 64] * len(sums)
    assert bucket.cuts is None


def test_gradients_that_one_instance_needs_lie_in_its_share(monkeypatch):
    owner = {name: number % 2 for number, (name, _) in enumerate(net().named_parameters())}
    _, sums, (bucket,) = made(monkeypatch, 1 << 20, owner.__getitem__)
    start, middle, stop = bucket.cuts
    assert (start, stop) == (0, bucket.flat.numel())
    assert all((sums[key].storage_offset() >= middle) == bool(owner[key]) for key in sums)


@pytest.mark.parametrize("is_asked_for", [True, False])
def test_a_bucket_is_handed_over_at_the_line_that_completes_it_and_forgotten(monkeypatch, is_asked_for):
    plan, _, found = made(monkeypatch, size=1)
    freed = frozenset(gradient.name for bucket in found for gradient in bucket.gradients if not is_asked_for)
    given = []
    pieces = buckets.handing(plan, found, freed, lambda number, gradients: given.append((number, gradients)))
    (number,) = pieces
    piece = plan.partition.pieces[number]
    torch.manual_seed(0)
    model, inputs = net(), {"x": torch.randn(2, 4), "y": torch.tensor([0, 2])}
    values = first_values(plan, model, list(inputs.values()))
    results = pieces[number]([values[name] for name in piece.reads])
    model(*inputs.values())[1].backward()
    assert [number for number, _ in given] == list(range(len(found)))
    for (_, gradients), bucket in zip(given, found, strict=True):
        for gradient, key in zip(gradients, keys(bucket), strict=True):
            assert torch.equal(gradient, model.get_parameter(key).grad)
    names = {gradient.name for bucket in found for gradient in bucket.gradients}
    forgotten = [name for name, value in zip(piece.writes, results, strict=True) if value is None]
    assert set(forgotten) == (set() if is_asked_for else names)


def test_a_gradient_of_two_parameters_is_kept_for_the_second(monkeypatch):
    """As of a sum of two: both have one tensor as gradient, and may be in different buckets."""
    plan, _, found = made(monkeypatch, size=1)
    first, second, *_ = found
    (old,) = second.gradients
    twin = replace(second, gradients=(old._replace(name=first.gradients[0].name),))
    source = {}
    monkeypatch.setattr(buckets, "build", lambda piece, after, hand_over: source.update(after))
    buckets.handing(plan, [first, twin], frozenset({first.gradients[0].name}), lambda number, gradients: None)
    assert "None" not in source[first.complete] and source[second.complete].endswith("= None")


def first_values(plan, model, inputs):
    """All that the backward reads: state, inputs and what the forward makes of them."""
    from popengine.run.backends.eager import build

    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {}
    for slot in plan.partition.signature.slots:
        if slot.role == "input":
            values[slot.name] = inputs[int(slot.key)]
        elif slot.role == "loss_scale":
            values[slot.name] = torch.ones(())
        elif slot.role == "constant":
            values[slot.name] = plan.partition.signature.constants[slot.key]
        else:
            values[slot.name] = state[slot.key].detach().clone()
    with torch.inference_mode():
        for piece in plan.partition.pieces:
            if piece.phase == "F":
                made = build(piece)([values[name] for name in piece.reads])
                values |= zip(piece.writes, made, strict=True)
    return values
