"""The state of torch's optimizers goes to the devices and comes back, in torch's own format."""

import copy

import pytest
import torch
from executor_models import Outer
from torch import nn

import poptorch
from poptorch.executor.executable_file import set_training_state, training_state
from small_models import module

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
}


OURS = {
    "momentum": lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: poptorch.optim.Adam(p, lr=0.1),
    "adamw": lambda p: poptorch.optim.AdamW(p, lr=0.1),
    "rmsprop": lambda p: poptorch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return poptorch.identity_loss(self.layer(x) ** 2, "mean")


def made(kind):
    torch.manual_seed(1)
    model = Net()
    return model, OPTIMIZERS[kind](model.parameters())


def data(steps):
    torch.manual_seed(2)
    return [torch.randn(4, 3) for _ in range(steps)]


def plain(model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()


def on_ipus(model, optimizer, batches):
    executor = poptorch.trainingModel(model, poptorch.Options().showCompilationProgressBar(False), optimizer)
    for batch in batches:
        executor(batch)
    return executor


def assert_trained(model, batches):
    """Assert that a model has the weights of plain Adam."""
    twin, optimizer = made("adam")
    plain(twin, optimizer, batches)
    assert torch.equal(model.layer.weight, twin.layer.weight)


def same(one, other):
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for index, state in one["state"].items():
        assert state.keys() == other["state"][index].keys()
        assert all(torch.equal(value, other["state"][index][name]) for name, value in state.items())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_dict_is_the_one_that_plain_torch_has(kind):
    model, optimizer = made(kind)
    executor = on_ipus(model, optimizer, data(3))
    twin, expected = made(kind)
    plain(twin, expected, data(3))
    expected.zero_grad()
    state = expected.state_dict()
    if kind == "sgd":
        state["state"] = {}  # torch has None as each momentum
    same(optimizer.state_dict(), state)
    executor.destroy()
    same(optimizer.state_dict(), state)


@pytest.mark.parametrize("kind", [*OPTIMIZERS, *(f"poptorch's {kind}" for kind in OURS)])
@pytest.mark.parametrize("when", ["before wrapping", "after wrapping", "after a call"])
def test_a_checkpoint_of_plain_torch_is_gone_on_from(kind, when):
    is_ours, kind = kind.startswith("poptorch"), kind.split()[-1]
    model, optimizer = made(kind)
    plain(model, optimizer, data(2))
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    plain(model, optimizer, data(4)[2:])
    resumed, other = made(kind)
    if is_ours:
        other, state = OURS[kind](resumed.parameters()), {"ipu_state": None, "ipu_param": None, **state}
    resumed.load_state_dict(weights)
    if when == "before wrapping":
        other.load_state_dict(state)
    executor = on_ipus(resumed, other, data(1) if when == "after a call" else [])
    if when != "before wrapping":
        executor.load_state_dict(weights)
        other.load_state_dict(state)
    assert other.state_dict()["state"].keys() == state["state"].keys()  # a save before the next call
    for batch in data(4)[2:]:
        executor(batch)
    assert torch.equal(resumed.layer.weight, model.layer.weight)


@pytest.mark.parametrize("kind", [*OPTIMIZERS])
def test_updates_change_the_tensors_of_the_optimizers_state(kind):
    """So calls and plain updates may take turns, and what is written into a state counts."""
    model, optimizer = made(kind)
    twin, expected = made(kind)
    executor = on_ipus(model, optimizer, data(1))
    plain(twin, expected, data(1))
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    for number, batch in enumerate(data(5)[1:]):
        if number == 2:
            plain(model, optimizer, [batch])
            optimizer.zero_grad()
        else:
            executor(batch)
        plain(twin, expected, [batch])
        for state in (*optimizer.state.values(), *expected.state.values()):
            for name in state.keys() - {"step"}:
                if state[name] is not None:
                    state[name].mul_(0.5)
        assert torch.equal(model.layer.weight, twin.layer.weight)
    now = [value for state in optimizer.state.values() for value in state.values()]
    assert all(one is other for one, other in zip(tensors, now, strict=True) if one is not None)


@pytest.mark.parametrize("make", [OPTIMIZERS["adam"], OURS["adam"]], ids=["torch", "ours"])
def test_a_new_optimizer_without_state_continues_and_the_one_before_keeps_a_copy(make):
    model, _ = made("adam")
    optimizer = make(model.parameters())
    executor = on_ipus(model, optimizer, data(2))
    before = copy.deepcopy(optimizer.state_dict())
    executor.setOptimizer(make(model.parameters()))
    for batch in data(4)[2:]:
        executor(batch)
    same(optimizer.state_dict(), before)
    assert_trained(model, data(4))


@pytest.mark.parametrize("end", [lambda executor: None, lambda executor: executor.destroy()])
def test_a_loaded_state_that_no_call_has_used_yet_is_the_state(end):
    model, optimizer = made("adam")
    executor = on_ipus(model, optimizer, data(1))
    first = copy.deepcopy(optimizer.state_dict())
    executor(data(1)[0])
    optimizer.load_state_dict(copy.deepcopy(first))
    end(executor)
    same(optimizer.state_dict(), first)


@pytest.mark.parametrize("kind", [*OURS, "torch"])
@pytest.mark.parametrize("outer", [False, True], ids=["the same model", "inside another model"])
def test_an_optimizer_goes_on_in_a_new_executor_after_destroy(kind, outer):
    # poptorch's optimizers began anew, without a word.
    def trained(interrupted):
        torch.manual_seed(1)
        model = Net()
        make = OPTIMIZERS["adam"] if kind == "torch" else OURS[kind]
        optimizer = make(model.parameters())
        executor = on_ipus(model, optimizer, data(2))
        if interrupted:
            executor.destroy()
            executor = on_ipus(Outer(model) if outer else model, optimizer, [])
            state = optimizer.state_dict()
            assert state["state"] or state["ipu_state"]
        for batch in data(4)[2:]:
            executor(batch)
        return model.layer.weight.detach().clone()

    assert torch.equal(trained(True), trained(False))


@pytest.mark.parametrize("kind", OURS)
def test_an_ipu_state_keeps_its_values_in_later_calls(kind):
    model, _ = made(kind)
    optimizer = OURS[kind](model.parameters())
    executor = on_ipus(model, optimizer, data(1))
    state = optimizer.state_dict()["ipu_state"]
    before = copy.deepcopy(state)
    executor(data(1)[0])
    assert all(torch.equal(state[name], value) for name, value in before.items())


def test_a_restored_training_state_is_newer_than_the_state_that_destroy_left():
    for make in (OURS["adam"], OPTIMIZERS["adam"]):
        model, _ = made("adam")
        optimizer = make(model.parameters())
        executor = on_ipus(model, optimizer, data(1))
        saved = copy.deepcopy(training_state(executor))
        executor(data(1)[0])
        executor.destroy()
        set_training_state(executor, saved)
        executor(data(1)[0])
        state = optimizer.state_dict()
        step = state["state"][0]["step"] if state["state"] else state["ipu_state"]["Step___layer.weight"]
        assert step == 2


def test_another_kind_of_optimizer_after_destroy_begins_anew():
    model, _ = made("momentum")
    executor = on_ipus(model, OURS["momentum"](model.parameters()), data(1))
    executor.destroy()
    adam = OURS["adam"](model.parameters())
    executor.setOptimizer(adam)
    executor(data(1)[0])
    names = {name.partition("___")[0] for name in adam.state_dict()["ipu_state"]}
    assert names == {"Accl1", "Accl2", "Step"}
    assert adam.state_dict()["ipu_state"]["Step___layer.weight"] == 1


def test_the_state_of_another_rule_is_refused_and_changes_nothing():
    model, adam = made("adam")
    plain(model, adam, data(1))
    other, momentum = made("momentum")
    executor = on_ipus(other, momentum, data(2))
    before = copy.deepcopy(momentum.state_dict())
    with pytest.raises(
        RuntimeError, match="of parameter 0 it has exp_avg, exp_avg_sq, step, and SGD keeps momentum_buffer"
    ):
        momentum.load_state_dict(adam.state_dict())
    same(momentum.state_dict(), before)
    executor(data(1)[0])

    ours = poptorch.optim.AdamW(nn.Linear(5, 2).parameters(), lr=0.1)
    with pytest.raises(
        RuntimeError,
        match=r"parameter 0 is a tensor of the shape \[2, 3\]\n.*the parameter has the shape \[2, 5\]",
    ):
        ours.load_state_dict({"ipu_state": None, "ipu_param": None, **adam.state_dict()})


RATED = {
    **OURS,
    "sgd": lambda p: poptorch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "combined": lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.9, use_combined_accum=True),
    "lamb": lambda p: poptorch.optim.LAMB(p, lr=0.1),
}
HOW = ["at the next call", "before wrapping", "after destroy", "by setOptimizer"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", RATED)
def test_loaded_rates_are_used(kind, how, caplog):
    # They were only where nothing was wrapped or set after the load.
    model, _ = made("adam")
    optimizer = RATED[kind](model.parameters())
    executor = on_ipus(model, optimizer, data(1))
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["lr"] = 0.0
    state["ipu_param"]["lossScaling_FLOAT"] = torch.tensor(4.0)
    if how in ("before wrapping", "after destroy"):
        executor.destroy()
    if how in ("before wrapping", "by setOptimizer"):
        optimizer = RATED[kind](model.parameters())
    optimizer.load_state_dict(state)
    if how == "by setOptimizer":
        executor.setOptimizer(optimizer)
    if how in ("before wrapping", "after destroy"):
        executor = on_ipus(model, optimizer, [])
    before = model.layer.weight.detach().clone()
    for batch in data(2):
        executor(batch)
    assert torch.equal(model.layer.weight, before)
    assert optimizer.state_dict()["ipu_param"]["lossScaling_FLOAT"] == 4
    optimizer.param_groups[0]["lr"] = 0.5  # what is set later is newer than what was loaded
    executor.setOptimizer(optimizer)
    executor(data(1)[0])
    assert not torch.equal(model.layer.weight, before)
    assert caplog.messages == []


def test_loaded_rates_are_in_the_parameter_groups_and_replace_constant_attributes():
    model, _ = made("adam")
    optimizer = OURS["adam"](model.parameters())
    executor = on_ipus(model, optimizer, data(1))
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0].update(lr=0.5, betas=(0.9, 0.25))
    optimizer.load_state_dict(state)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.9, 0.25), 1e-8)
    executor(data(1)[0])
    executor.setOptimizer(optimizer)  # betas were not given to the constructor, and are constant otherwise
    with pytest.raises(poptorch.Error, match="modified constant attribute 'betas'"):
        executor.setOptimizer(OURS["adam"](model.parameters()))


def test_a_rate_that_is_set_between_load_and_set_optimizer_is_the_newer_one():
    model, _ = made("adam")
    optimizer = OURS["adam"](model.parameters())
    executor = on_ipus(model, optimizer, data(1))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.param_groups[0]["lr"] = 0.5
    executor.setOptimizer(optimizer)
    executor(data(1)[0])
    assert optimizer.state_dict()["ipu_param"]["learningRate___specific___layer.weight"] == 0.5


WRONG = {
    "negative step": ("step", torch.tensor(-1.0), "a count of updates is a whole number"),
    "random step": ("step", torch.tensor(0.37), "a count of updates is a whole number"),
    "infinite step": ("step", torch.tensor(float("inf")), "a count of updates is a whole number"),
    "negative square": ("exp_avg_sq", torch.full((2, 3), -1.0), "a mean of squares is nowhere negative"),
    "other shape": ("exp_avg", torch.zeros(5, 3), "shape"),
}
FILE = {"step": "Step", "exp_avg": "Accl1", "exp_avg_sq": "Accl2"}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("kind", ["torch", "ours", "ours from torch's"])
def test_a_state_that_can_not_be_right_is_refused_where_it_is_loaded(kind, wrong):
    # The next call ended in "the weights are lost ... most likely for want of memory".
    name, value, why = WRONG[wrong]
    model, torchs = made("adam")
    optimizer = torchs if kind == "torch" else OURS["adam"](model.parameters())
    executor = on_ipus(model, optimizer, data(1))
    state = copy.deepcopy(optimizer.state_dict())
    if kind == "ours":
        state["ipu_state"][f"{FILE[name]}___layer.weight"] = value
    else:
        plain(*(other := made("adam")), data(1))
        state = copy.deepcopy(other[1].state_dict())
        state["state"][0][name] = value
        if kind != "torch":
            state = {"ipu_state": None, "ipu_param": None, **state}
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(RuntimeError, match=why):
        optimizer.load_state_dict(state)
    executor(data(1)[0])
    assert_trained(model, data(1) * 2)
    assert before


def test_a_wrong_state_that_a_torch_optimizer_has_already_is_refused_when_it_is_wrapped():
    model, optimizer = made("adam")
    plain(model, optimizer, data(1))
    optimizer.state[model.layer.weight]["step"].fill_(-3)
    with pytest.raises(RuntimeError, match="step of parameter 0 is -3"):
        on_ipus(model, optimizer, [])


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_float32_states_of_a_half_model_are_loaded_with_their_bits(is_wrapped):
    # torch casts states to the dtype of their parameter.
    def started():
        model, _ = made("adam")
        optimizer = OURS["adam"](model.half().parameters())
        return model, optimizer

    batches = [batch.half() for batch in data(4)]
    model, first = started()
    executor = on_ipus(model, first, batches[:3])
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(first.state_dict())
    executor(batches[3])
    resumed, second = started()
    resumed.load_state_dict(weights)
    if not is_wrapped:
        second.load_state_dict(state)
    executor = on_ipus(resumed, second, [])
    if is_wrapped:
        second.load_state_dict(state)
    executor(batches[3])
    assert torch.equal(resumed.layer.weight, model.layer.weight)
    assert second.state[resumed.layer.weight]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("has_names", [True, False])
def test_a_state_of_another_model_is_refused_where_it_is_loaded(has_names):
    model, _ = made("adam")
    optimizer = OURS["adam"](model.parameters())
    on_ipus(model, optimizer, data(1)).destroy()
    state = copy.deepcopy(optimizer.state_dict())
    state["ipu_state"]["Accl1___layer.weight"] = torch.zeros(7)
    other = optimizer if has_names else OURS["adam"](model.parameters())
    with pytest.raises(RuntimeError, match=r"(?s)exp_avg of parameter 0 .* shape \[2, 3\]"):
        other.load_state_dict(state)


def test_a_restored_state_that_no_call_has_used_yet_has_the_buffers_of_each_replica():
    def replicated():
        options = poptorch.Options().replicationFactor(2).broadcastBuffers(False)
        model = module(
            lambda self, rows: poptorch.identity_loss(self.norm(rows).square(), "sum"), norm=nn.BatchNorm1d(3)
        )
        return poptorch.trainingModel(model, options, poptorch.optim.SGD(model.parameters(), lr=0.1))

    first = replicated()
    first(torch.arange(24.0).reshape(8, 3))
    saved = training_state(first)
    means = [buffers["norm.running_mean"] for buffers in saved["buffers"]]
    assert not torch.equal(*means)
    second = replicated()
    set_training_state(second, copy.deepcopy(saved))
    again = [buffers["norm.running_mean"] for buffers in training_state(second)["buffers"]]
    assert all(map(torch.equal, means, again))


def test_a_group_that_is_added_after_a_call_is_refused_and_its_state_is_written_as_torch_writes_it():
    model, _ = made("sgd")
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.1)
    executor = on_ipus(model, optimizer, data(1))
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    state = optimizer.state_dict()
    assert [len(group["params"]) for group in state["param_groups"]] == [2, 1]
    assert {name.split("___")[-1] for name in state["ipu_param"]} == {
        "lossScaling_FLOAT", "layer.weight", "layer.bias"
    }  # fmt: skip
    with pytest.raises(poptorch.Error, match=r"aren't parameters of the model.*(?s:.*)fix:"):
        executor.setOptimizer(optimizer)
