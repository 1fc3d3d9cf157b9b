"""What freezing an optimizer reads, and which optimizers it refuses."""

import math

import pytest
import torch

import popengine.errors
from poptorch.optim import LAMB, SGD, Adam, AdamW, RMSprop
from poptorch.optim.freeze_optimizer import take_snapshot

MODEL = torch.nn.Linear(3, 2)
NAMES = {id(parameter): name for name, parameter in MODEL.named_parameters()}


def freeze(optimizer):
    snapshot = take_snapshot(optimizer, NAMES)
    return snapshot.frozen, snapshot.hyper


def test_an_object_of_a_group_is_no_rate():
    optimizer = torch.optim.SGD([{"params": MODEL.parameters(), "name": "all", "of": MODEL}], lr=0.1)
    (rates,) = freeze(optimizer)[1].groups
    assert rates["name"] == "all"
    assert "of" not in rates


@pytest.mark.parametrize(
    ("build", "label"),
    [
        (lambda p: torch.optim.SGD(p, 0.1), "SGD2"),
        (lambda p: SGD(p, 0.1, use_combined_accum=True), "SGD1"),
        (torch.optim.Adam, "ADAM"),
        (torch.optim.AdamW, "ADAMW"),
        (lambda p: AdamW(p, bias_correction=False), "ADAMW_NO_BIAS"),
        (torch.optim.RMSprop, "RMSPROP"),
        (lambda p: RMSprop(p, centered=True), "RMSPROP_CENTERED"),
        (LAMB, "LAMB"),
        (lambda p: LAMB(p, bias_correction=False), "LAMB_NO_BIAS"),
        (torch.optim.NAdam, "NAdam"),
    ],
)
def test_each_optimizer_has_a_name_in_messages(build, label):
    assert freeze(build(MODEL.parameters()))[0].kind == label


def test_a_tensor_learning_rate_is_read():
    assert freeze(torch.optim.Adam(MODEL.parameters(), lr=torch.tensor(0.5)))[1].groups[0]["lr"] == 0.5


def test_max_weight_norm_may_be_none():
    freeze(LAMB([{"params": MODEL.parameters(), "max_weight_norm": None}]))


@pytest.mark.parametrize("build", [Adam, AdamW, torch.optim.Adam, torch.optim.AdamW])
def test_amsgrad_is_refused(build):
    with pytest.raises(ValueError, match=r"Only non-amsgrad Adam/AdamW optimizers are supported\."):
        freeze(build(MODEL.parameters(), amsgrad=True))


def test_a_missing_attribute_is_named():
    optimizer = SGD(MODEL.parameters(), lr=0.1)
    del optimizer.param_groups[0]["momentum"]
    with pytest.raises(AssertionError, match="Mandatory attribute momentum not found"):
        freeze(optimizer)


@pytest.mark.parametrize("value", ["0.1", None, math.nan, (0.1,)])
def test_a_rate_has_to_be_a_number(value):
    optimizer = SGD(MODEL.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = value
    with pytest.raises(AssertionError, match="Expected a number for lr"):
        freeze(optimizer)


@pytest.mark.parametrize("betas", [0.9, (0.9,), (0.9, 0.99, 0.999), (0.9, "0.99"), [0.9, 0.99]])
def test_betas_have_to_be_a_pair(betas):
    optimizer = Adam(MODEL.parameters())
    optimizer.param_groups[0]["betas"] = betas
    with pytest.raises(AssertionError, match="betas"):
        freeze(optimizer)


def test_centered_has_to_be_equal_in_all_groups():
    optimizer = RMSprop([{"params": [MODEL.weight], "centered": True}, {"params": [MODEL.bias]}])
    with pytest.raises(AssertionError, match="centered must be equal"):
        freeze(optimizer)


def test_parameters_of_another_model_are_listed():
    optimizer = SGD([MODEL.weight, torch.nn.Parameter(torch.zeros(7, 5))], lr=0.1)
    with pytest.raises(popengine.errors.Error, match=r"group 0, parameter 1, shape \[7, 5\]") as caught:
        freeze(optimizer)
    assert isinstance(caught.value, KeyError)
