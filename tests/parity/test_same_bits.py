"""Same bits: how a model is cut and ordered changes nothing of what it computes."""

import functools

import pytest
import torch
from parity_models import Digits, Normed, Transformer
from parity_runs import LAYOUTS, plain, trained

import poptorch
from popengine.order import ORDERS

SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAM = functools.partial(torch.optim.Adam, lr=0.01)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
MODELS = {"digits": Digits, "normed": Normed, "transformer": Transformer}
DROPOUT = functools.partial(Transformer, 0.1)


@functools.cache
def expected(model, optimizer):
    return plain(model, optimizer)


@functools.cache
def unsplit_with_dropout():
    return trained(DROPOUT, ADAM)


@pytest.mark.parametrize("name", MODELS)
def test_twenty_updates_of_a_model_without_blocks_equal_plain_pytorch(name):
    assert trained(MODELS[name], ADAM).differs_from(expected(MODELS[name], ADAM)) == []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_twenty_updates_in_every_layout_equal_plain_pytorch(layout, name):
    assert trained(MODELS[name], ADAM, LAYOUTS[layout]()).differs_from(expected(MODELS[name], ADAM)) == []


@pytest.mark.parametrize("schedule", [name for name, order in ORDERS.items() if order.overlaps])
@pytest.mark.parametrize("name", MODELS)
def test_twenty_updates_in_every_schedule_equal_plain_pytorch(schedule, name):
    """Two stages on each of two ipus; in the transformer the first and the last share a weight."""
    ipus = (0, 1, 1, 0) if schedule.endswith("-v") else (0, 1, 0, 1)
    stages = [poptorch.Stage(block).ipu(ipu) for block, ipu in zip("abcd", ipus, strict=True)]
    strategy = poptorch.PipelinedExecution(*stages, schedule=schedule)
    assert trained(MODELS[name], ADAM, strategy).differs_from(expected(MODELS[name], ADAM)) == []


@pytest.mark.parametrize("rule", ["sgd with momentum", "adamw"])
@pytest.mark.parametrize("name", MODELS)
def test_each_optimizer_of_torch_updates_as_torch_does(rule, name):
    optimizer = SGD if rule == "sgd with momentum" else ADAMW
    layout = LAYOUTS["two stages"]()
    assert trained(MODELS[name], optimizer, layout).differs_from(expected(MODELS[name], optimizer)) == []


@pytest.mark.parametrize(
    ("ours", "twin"),
    [
        (functools.partial(poptorch.optim.SGD, lr=0.05, momentum=0.9), SGD),
        (functools.partial(poptorch.optim.Adam, lr=0.01), ADAM),
        (functools.partial(poptorch.optim.AdamW, lr=0.01, weight_decay=0.1), ADAMW),
    ],
    ids=["sgd with momentum", "adam", "adamw"],
)
def test_each_optimizer_of_poptorch_updates_as_torch_does(ours, twin):
    assert trained(Digits, ours, LAYOUTS["two stages"]()).differs_from(expected(Digits, twin)) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropout_draws_the_same_numbers_in_every_layout(layout):
    assert trained(DROPOUT, ADAM, LAYOUTS[layout]()).differs_from(unsplit_with_dropout()) == []


def test_dropout_does_drop():
    assert "losses" in unsplit_with_dropout().differs_from(expected(Transformer, ADAM))


def test_device_iterations_in_one_call_equal_calls_of_one_iteration():
    layout = LAYOUTS["four stages"]
    one, four = (trained(DROPOUT, ADAM, layout(), updates=8, iterations=i) for i in (1, 4))
    assert four.differs_from(one) == []
