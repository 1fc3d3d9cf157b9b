"""The user's classes: constructors, what they hold, and what survives saving and copying."""

import copy
import inspect
import logging
import math
import pickle

import pytest
import torch

import poptorch
from popengine.settings import Hyper
from poptorch import optim
from poptorch.optim.optimizer_base import to_ipu_param
from small_models import module

EACH = [getattr(optim, name) for name in optim.__all__ if name not in ("Optimizer", "VariableAttributes")]
ARGUMENTS = {
    optim.SGD: "params lr momentum dampening weight_decay nesterov maximize foreach differentiable "
    "loss_scaling velocity_scaling use_combined_accum accum_type velocity_accum_type max_grad_norm",
    optim.Adam: "params lr betas eps weight_decay amsgrad foreach maximize capturable differentiable fused "
    "loss_scaling accum_type first_order_momentum_accum_type second_order_momentum_accum_type max_grad_norm",
    optim.AdamW: "params lr betas eps weight_decay amsgrad maximize foreach capturable differentiable fused "
    "loss_scaling bias_correction accum_type first_order_momentum_accum_type "
    "second_order_momentum_accum_type max_grad_norm",
    optim.RMSprop: "params lr alpha eps weight_decay momentum centered foreach maximize differentiable "
    "loss_scaling accum_type first_order_momentum_accum_type second_order_momentum_accum_type use_tf_variant",
    optim.LAMB: "params lr betas eps weight_decay bias_correction loss_scaling max_weight_norm accum_type "
    "first_order_momentum_accum_type second_order_momentum_accum_type",
    optim.LARS: "params lr momentum weight_decay eta eps loss_scaling accum_type velocity_accum_type max_grad_norm",
}


def weights():
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(3, 2)), torch.nn.Parameter(torch.randn(2))]


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_every_argument_may_be_positional_in_poptorchs_order(kind):
    positional = [
        name
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.kind is not parameter.KEYWORD_ONLY
    ]
    assert positional == ARGUMENTS[kind].split()


@pytest.mark.parametrize("kind", EACH)
def test_the_classes_are_torchs(kind):
    twin = getattr(torch.optim, kind.__name__, torch.optim.Optimizer)
    assert issubclass(kind, twin)
    assert issubclass(kind, optim.Optimizer)


@pytest.mark.parametrize("kind", EACH)
def test_none_says_that_an_argument_was_not_given(kind):
    parameters = [p for p in inspect.signature(kind).parameters if p not in ("params", "lr")]
    optimizer = kind(weights(), lr=0.5, **dict.fromkeys(parameters))
    twin = getattr(torch.optim, kind.__name__, None)
    if twin is not None:
        assert optimizer.defaults == twin(weights(), lr=0.5).defaults
    assert optimizer.loss_scaling == 1.0
    assert optimizer.max_grad_norm == math.inf
    assert optimizer.accum_type == torch.float32
    assert not optimizer.variable_attrs.isConstant("lr")
    assert optimizer.variable_attrs.isConstant("weight_decay")


def test_adam_takes_torchs_learning_rate_for_none():
    assert optim.Adam(weights(), lr=None, eps=None, betas=None).param_groups[0]["lr"] == 1e-3


def test_sgd_needs_a_learning_rate_somewhere():
    first, second = weights()
    with pytest.raises(
        ValueError, match="group 1 didn't specify a value of required optimization parameter lr"
    ):
        optim.SGD([{"params": [first], "lr": 0.1}, {"params": [second]}])
    with pytest.raises(ValueError, match="required optimization parameter lr"):
        optim.SGD(iter(weights()))
    optim.SGD([{"params": [first], "lr": 0.1}])


@pytest.mark.parametrize("kind", EACH)
def test_accumulation_types_are_float16_or_float32(kind):
    kind(weights(), lr=0.1, accum_type=torch.float16)
    with pytest.raises(AssertionError, match="Accumulation types must be either"):
        kind(weights(), lr=0.1, accum_type=torch.float64)


def test_velocity_scaling_is_a_rate_of_combined_accumulators(caplog):
    combined = optim.SGD(weights(), 0.1, velocity_scaling=8.0, use_combined_accum=True)
    combined.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    assert [group["velocity_scaling"] for group in combined.param_groups] == [8.0, 8.0]
    assert not combined.variable_attrs.isConstant("velocity_scaling")
    with caplog.at_level(logging.WARNING, "poptorch::python"):
        separate = optim.SGD(weights(), 0.1, velocity_scaling=8.0)
    assert "velocity_scaling" in caplog.text
    assert "velocity_scaling" not in separate.param_groups[0]


def test_an_unknown_attribute_cannot_be_marked():
    marks = optim.AdamW(weights()).variable_attrs
    for call in (marks.isConstant, marks.markAsConstant, marks.markAsVariable):
        with pytest.raises(AssertionError, match="variable_attrs takes one of 'amsgrad', 'betas', 'eps', "):
            call("nope")


@pytest.mark.parametrize("kind", [kind for kind in EACH if hasattr(torch.optim, kind.__name__)])
def test_step_is_torchs_on_the_host(kind):
    mine, theirs = weights(), weights()
    for parameters, build in ((mine, kind), (theirs, getattr(torch.optim, kind.__name__))):
        optimizer = build(parameters, lr=0.1)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_rmsprop_of_tensorflow_begins_with_means_of_one():
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.full((1,), 3.0)
    optim.RMSprop([weight], lr=0.5, alpha=0.9, eps=0.2, use_tf_variant=True).step()
    torch.testing.assert_close(weight.detach(), torch.tensor([1 - 0.5 * 3 / math.sqrt(0.9 + 0.1 * 9 + 0.2)]))


def test_lamb_steps_on_the_host():
    weight = torch.nn.Parameter(torch.full((4,), 2.0))
    optimizer = optim.LAMB([{"params": [weight], "max_weight_norm": None}], lr=0.1, eps=0.0)

    def closure():
        optimizer.zero_grad()
        loss = (weight * torch.arange(1.0, 5.0)).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 20.0
    # Adam's first step is the gradient's sign: norm 2 against the weight's 4, so the trust is 2.
    torch.testing.assert_close(weight.detach(), torch.full((4,), 2.0 - 0.1 * 2))
    assert optimizer.state[weight]["step"].item() == 1


# State ---------------------------------------------------------------------------------------------


def test_before_compilation_there_is_no_device_state():
    optimizer = optim.AdamW(weights())
    state = optimizer.state_dict()
    assert list(state) == ["ipu_state", "ipu_param", "state", "param_groups"]
    assert (state["ipu_state"], state["ipu_param"]) == (None, None)
    optimizer.load_state_dict(state)


def test_an_entry_that_a_loaded_state_lacks_stays_as_it_is_with_a_warning(caplog):
    # Only parameters without any entry were told of.
    def trained():
        torch.manual_seed(0)
        model = module(
            lambda self, x: poptorch.identity_loss(self.model(x), "sum"),
            model=torch.nn.Linear(2, 1, bias=False),
        )
        optimizer = optim.Adam(model.parameters(), lr=0.1)
        executor = poptorch.trainingModel(model, poptorch.Options(), optimizer)
        executor(torch.ones(1, 2))
        return executor, optimizer

    _, first = trained()
    state = copy.deepcopy(first.state_dict())
    del state["ipu_state"]["Accl1___model.weight"]
    state["ipu_state"]["Step___model.weight"].fill_(7)
    executor, second = trained()
    second.load_state_dict(state)
    executor(torch.zeros(1, 2))
    assert caplog.messages == [
        "the loaded optimizer state has nothing for Accl1___model.weight: kept as it is"
    ]
    found = second.state_dict()["ipu_state"]
    assert found["Step___model.weight"] == 8
    torch.testing.assert_close(found["Accl1___model.weight"], torch.full((1, 2), 0.1 * 0.9))


def test_empty_and_foreign_states_are_refused():
    optimizer = optim.SGD(weights(), lr=0.1)
    with pytest.raises(RuntimeError, match="optimizer state dictionary because it is empty"):
        optimizer.load_state_dict({})
    with pytest.raises(RuntimeError, match="Only IPU optimizer states"):
        optimizer.load_state_dict(torch.optim.SGD(weights(), lr=0.1).state_dict())


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
@pytest.mark.parametrize("kind", EACH)
def test_copies_keep_attributes_and_drop_the_executor(kind, duplicate):
    optimizer = kind(weights(), lr=0.1, loss_scaling=4.0, accum_type=torch.float16)
    optimizer.mine = "kept"
    optimizer.variable_attrs.markAsConstant("lr")
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    twin = duplicate(optimizer)
    assert type(twin) is kind
    assert (twin.loss_scaling, twin.accum_type, twin.mine) == (4.0, torch.float16, "kept")
    assert twin.variable_attrs.isConstant("lr")
    twin.step()


def test_device_states_are_named_and_named_back():
    optimizer, twin = (optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=0.1) for _ in range(2))
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    optimizer.step()
    name = {"learningRate___specific___fc.weight": torch.tensor(0.1)}
    optimizer.load_state_dict({**optimizer.state_dict(), "ipu_state": {}, "ipu_param": name})
    saved = optimizer.state_dict()
    assert list(saved["ipu_state"]) == ["Accl1___fc.weight", "Accl2___fc.weight", "Step___fc.weight"]
    twin.load_state_dict({**saved, "state": {}})
    assert poptorch.testing.allclose(twin.state_dict()["state"], saved["state"])


def test_plain_sgd_names_the_rates_as_its_update_uses_them():
    rates = {
        "lr": 0.5,
        "momentum": 0.0,
        "dampening": 0.5,
        "weight_decay": 0.4,
        "nesterov": 0.0,
        "maximize": 0.0,
    }
    entries = to_ipu_param(optim.SGD, {"w": 0}, Hyper((rates,), loss_scaling=2.0))
    assert {name: round(value.item(), 6) for name, value in entries.items()} == {
        "lossScaling_FLOAT": 2.0,
        "scaledLearningRate0___specific___w": 0.125,
        "weightDecayScaleFactor0___specific___w": 0.9,
    }
