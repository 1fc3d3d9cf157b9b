"""Optimizer state shared out over replicas: each keeps a part of it, and the results are the same."""

import logging

import pytest
import torch
from parity_models import Digits, annotated
from parity_runs import batches, made, options

import poptorch

REPLICAS, UPDATES = 3, 6


def run(shared, replicas=REPLICAS, optimizer=poptorch.optim.AdamW, least=None, **more):
    """Losses and weights after some updates, the executor and its optimizer."""
    model = annotated(made(Digits))
    opts = options(poptorch.PipelinedExecution(["a", "b"], ["c", "d"]), 3, replicas=replicas)
    location = poptorch.TensorLocationSettings().useReplicatedTensorSharding(shared)
    if least is not None:
        location.minElementsForReplicatedTensorSharding(least)
    opts.TensorLocations.setOptimizerLocation(location)
    rule = optimizer(model.parameters(), lr=0.01, **more)
    executor = poptorch.trainingModel(model, opts, rule)
    losses = [executor(*rows)[1] for rows in batches(Digits, UPDATES, 3 * replicas * 2)]
    return torch.cat(losses), {n: v.clone() for n, v in model.state_dict().items()}, executor, rule


def same(one, other):
    return torch.equal(one[0], other[0]) and all(torch.equal(v, other[1][n]) for n, v in one[1].items())


def elements(executor, replica):
    """How many elements of state a replica keeps on all its ipus."""
    return sum(
        value.numel()
        for (owner, _), store in executor._lease.engine.stores.items()
        if owner == replica
        for state in store.states.values()
        for value in state.values()
    )


@pytest.mark.parametrize(
    "optimizer, more",
    [
        (poptorch.optim.AdamW, {"max_grad_norm": 0.1}),
        (poptorch.optim.SGD, {"momentum": 0.9}),
        (poptorch.optim.LAMB, {"weight_decay": 0.1}),
        (poptorch.optim.LARS, {"weight_decay": 0.1}),
    ],
    ids=["adamw with clipping", "sgd with momentum", "lamb", "lars"],
)
def test_replicas_that_share_the_state_train_to_the_same_bits(optimizer, more):
    assert same(run(True, optimizer=optimizer, **more), run(False, optimizer=optimizer, **more))


def test_each_replica_keeps_its_share_of_the_state_and_not_more():
    whole = elements(run(False)[2], 0)
    shares = [elements(run(True)[2], replica) for replica in range(REPLICAS)]
    assert sum(shares) == whole
    # Whole parameters on two stages: a share is at most the fair one and one parameter's two moments a stage.
    largest = max(parameter.numel() for parameter in Digits().parameters())
    assert max(shares) <= whole / REPLICAS + 2 * 2 * largest
    assert max(shares) < 0.7 * whole


def test_all_replicas_have_all_new_weights():
    executor = run(True)[2]
    for ipu in (0, 1):
        stores = [executor._lease.engine.stores[replica, ipu] for replica in range(REPLICAS)]
        for name, value in stores[0].state.items():
            assert all(torch.equal(value, store.state[name]) for store in stores), name


def test_small_parameters_are_kept_whole_on_every_replica():
    executor = run(True, least=100)[2]
    biases = [
        store.states["a.0.bias"] for (_, ipu), store in executor._lease.engine.stores.items() if ipu == 0
    ]
    assert len(biases) == REPLICAS
    assert same(run(True, least=100), run(True))


def test_the_shared_state_is_saved_and_loaded_as_a_whole():
    _, _, _, shared = run(True)
    _, _, _, whole = run(False)
    state, expected = shared.state_dict()["ipu_state"], whole.state_dict()["ipu_state"]
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    again = run(True, replicas=2)[2]
    again._optimizer.load_state_dict(shared.state_dict())
    again._optimizer_link.upload()
    read = again._optimizer.state_dict()["ipu_state"]
    assert all(torch.equal(read[name], value) for name, value in expected.items())


def test_state_off_the_device_is_noted_once_and_changes_no_result(caplog):
    def losses(on_chip):
        opts = options(accumulation=1)
        opts.TensorLocations.setOptimizerLocation(poptorch.TensorLocationSettings().useOnChipStorage(on_chip))
        model = made(Digits)
        executor = poptorch.trainingModel(model, opts, torch.optim.Adam(model.parameters()))
        return torch.stack([executor(*rows)[1] for rows in batches(Digits, 2, 2)])

    expected = losses(True)
    with caplog.at_level(logging.INFO, "poptorch::python"):
        assert torch.equal(losses(False), expected)
    assert len([text for text in caplog.messages if "useOnChipStorage(False) for optimizer" in text]) == 1
