"""A new kind of optimizer: a formula, a rule in the table and a class; all else follows from the table."""

import copy

import pytest
import torch

import poptorch
from popengine.update.formulas import Step
from popengine.update.optimizer_rules import RULES, Flag, Rule, RuleState
from poptorch.optim.optimizers import OwnRule


def signed_mean(step: Step):
    """m ← μ·m + (1 − μ)·g;  w ← w − lr·sign(m)."""
    means = [state["mean"] for state in step.states]
    torch._foreach_lerp_(means, step.gradients, 1 - step.group["momentum"])
    rate = -step.group["lr"] * (2 if step.optimizer.flags.get("doubled") else 1)
    torch._foreach_add_(step.parameters, [mean.sign() for mean in means], alpha=rate)


@pytest.fixture
def toy(monkeypatch):
    rule = Rule(
        signed_mean,
        rates=("lr", "momentum"),
        states=(RuleState("mean", "Accl1", "mean_type"),),
        flags={"doubled": Flag(label="_DOUBLED")},
    )
    monkeypatch.setitem(RULES, "toy", rule)

    class Toy(OwnRule):
        _kind = "toy"
        _defaults = {"lr": 0.125, "momentum": 0.5}
        doubled: bool = False

    return Toy


def differences(step: Step):
    """d ← β₂·d + β₃·(g − p);  w ← w − lr·(β₁·g + d);  p ← g, the previous gradient, which starts as the first one."""
    rates = step.group
    for state, weight, gradient in zip(step.states, step.parameters, step.gradients, strict=True):
        state["sum"].mul_(rates["beta2"]).add_(gradient - state["previous"], alpha=rates["beta3"])
        state["previous"].copy_(gradient)
        weight.sub_(rates["lr"] * (rates["beta1"] * gradient + state["sum"]))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x):
        return poptorch.identity_loss(self.layer(x) ** 2, "mean")


def options():
    return poptorch.Options().showCompilationProgressBar(False)


def batches():
    torch.manual_seed(2)
    return [torch.randn(4, 3) for _ in range(3)]


@pytest.mark.parametrize("doubled", [False, True])
def test_it_trains_as_on_the_host(toy, doubled):
    host, device = Net(), Net()
    stepping = toy(host.parameters(), lr=0.25, doubled=doubled)
    executor = poptorch.trainingModel(device, options(), toy(device.parameters(), lr=0.25, doubled=doubled))
    for batch in batches():
        stepping.zero_grad()
        host(batch).backward()
        stepping.step()
        executor(batch)
    assert torch.equal(host.layer.weight, device.layer.weight)
    assert not torch.equal(host.layer.weight, Net().layer.weight)


def test_its_state_and_rates_are_in_checkpoints_and_go_on_from_there(toy):
    def trained(count, state=None, model=None):
        model = model or Net()
        optimizer = toy(model.parameters())
        executor = poptorch.trainingModel(model, options(), optimizer)
        if state is not None:
            optimizer.load_state_dict(state)
        for batch in batches()[count]:
            executor(batch)
        return copy.deepcopy(optimizer.state_dict()), model

    state, model = trained(slice(2))
    assert state["ipu_state"].keys() == {"Accl1___layer.weight", "Accl1___layer.bias"}
    assert state["ipu_param"]["learningRate___specific___layer.weight"] == 0.125
    assert state["ipu_param"]["momentum___specific___layer.bias"] == 0.5
    host = Net()
    host.load_state_dict(copy.deepcopy(model.state_dict()))
    _, resumed = trained(slice(2, 3), state, host)
    _, expected = trained(slice(3))
    assert torch.equal(resumed.layer.weight, expected.layer.weight)


def test_messages_and_checks_cover_it(toy):
    model = Net()
    executor = poptorch.trainingModel(model, options(), toy(model.parameters(), lr=0.25))
    executor(batches()[0])
    with pytest.raises(poptorch.Error, match="it was TOY, this one is TOY_DOUBLED"):
        executor.setOptimizer(toy(model.parameters(), lr=0.25, doubled=True))
    with pytest.raises(poptorch.Error, match="modified constant attribute 'momentum'"):
        executor.setOptimizer(toy(model.parameters(), lr=0.25, momentum=0.75))
    with pytest.raises(
        AssertionError, match="Unknown attribute eps, allowed values: loss_scaling, lr, momentum"
    ):
        toy(model.parameters()).variable_attrs.markAsVariable("eps")
    with pytest.raises(AssertionError, match=r"Types supported: .*poptorch\.optim\.Toy, .*torch\.optim\.SGD"):
        poptorch.trainingModel(Net(), options(), model.parameters())


def test_a_rule_has_as_many_betas_as_it_says_and_a_state_can_start_as_the_first_gradient(monkeypatch):
    previous, count = RuleState("previous", "Accl2", is_gradient_first=True), RuleState("step", "Step")
    states = RuleState("sum", "Accl1"), previous, count
    monkeypatch.setitem(RULES, "differences", Rule(differences, ("lr", "betas"), states, betas=3))

    class Differences(OwnRule):
        _kind = "differences"
        _defaults = {"lr": 0.5, "betas": (0.5, 0.25, 0.125)}

    model, twin = Net(), Net()
    executor = poptorch.trainingModel(model, options(), Differences(model.parameters()))
    sums = previous = 0
    for batch in batches():
        twin.zero_grad()
        twin(batch).backward()
        gradient = twin.layer.weight.grad.clone()
        sums = 0.25 * sums + 0.125 * (gradient - (previous if torch.is_tensor(previous) else gradient))
        previous = gradient
        executor(batch)
        with torch.no_grad():
            twin.layer.weight.sub_(0.5 * (0.5 * gradient + sums))
            twin.layer.bias.copy_(model.layer.bias)
    torch.testing.assert_close(model.layer.weight, twin.layer.weight)
    with pytest.raises(AssertionError, match="Expected a tuple of 3 numbers for betas"):
        executor.setOptimizer(Differences(model.parameters(), betas=(0.5, 0.5)))
