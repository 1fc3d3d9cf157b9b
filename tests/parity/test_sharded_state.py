"""Optimizer state shared out over replicas: each keeps a part of it, and the results are the same."""

import pytest
import torch
from parity_models import Digits, annotated
from parity_runs import batches, made, options

import poptorch
from poptorch.logs import log_no_effect

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


@pytest.mark.parametrize("shared", [True, False])
def test_replicas_of_one_process_hold_weights_and_state_once(shared):
    """Shared out over processes the state is a part in each; in one process there is nothing to share out."""
    executors = [run(shared, replicas=count)[2] for count in (REPLICAS, 1)]
    engine = executors[0]._plans.engine.state
    for each in engine.values[1:]:
        assert all(each[name] is value for name, value in engine.values[0].items() if "parameter" in name)
    states = [len(executor._optimizer.state) for executor in executors]
    assert states == [len(list(Digits().parameters()))] * 2


def test_the_shared_state_is_saved_and_loaded_as_a_whole():
    _, _, _, shared = run(True)
    _, _, _, whole = run(False)
    state, expected = shared.state_dict()["ipu_state"], whole.state_dict()["ipu_state"]
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    again = run(True, replicas=2)[2]
    again._optimizer.load_state_dict(shared.state_dict())
    read = again._optimizer.state_dict()["ipu_state"]
    assert all(torch.equal(read[name], value) for name, value in expected.items())


def test_state_off_the_device_is_noted_once_and_changes_no_result(caplog):
    def losses(on_chip):
        opts = options(accumulation=1)
        opts.TensorLocations.setOptimizerLocation(poptorch.TensorLocationSettings().useOnChipStorage(on_chip))
        model = made(Digits)
        executor = poptorch.trainingModel(model, opts, torch.optim.Adam(model.parameters()))
        return torch.stack([executor(*rows)[1] for rows in batches(Digits, 2, 2)])

    log_no_effect.cache_clear()  # another test may have used the option
    with caplog.at_level("INFO", "poptorch::python"):
        assert torch.equal(losses(False), losses(True))
    assert len([text for text in caplog.messages if "useOnChipStorage" in text]) == 1
