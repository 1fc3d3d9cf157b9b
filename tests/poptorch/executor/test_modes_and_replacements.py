"""The mode of a wrapped model, and parameters that take the place of others after wrapping."""

import logging

import pytest
import torch
from torch import nn

import poptorch

X = torch.ones(1, 2)


class Modal(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.Dropout(1.0)

    def forward(self, x):
        return self.part(x) + (10 if self.training else 20)


def test_a_mode_that_comes_after_the_compilation_is_a_warning(caplog):
    executor = poptorch.inferenceModel(Modal().eval())
    executor(X)
    with caplog.at_level(logging.WARNING):
        executor.train()
    assert "come too late" in caplog.text
    assert torch.equal(executor(X), X + 20)
    executor.destroy()
    assert torch.equal(executor(X), X * 0 + 10)


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 2, bias=False)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        return poptorch.identity_loss(self.a(x).sum() * self.scale, "none")


def trained(model):
    return poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))


# As in plain PyTorch the optimizer goes on with the parameters that it was made of.


@pytest.mark.parametrize(
    "replace",
    [
        lambda model: setattr(model.a, "weight", nn.Parameter(torch.full((2, 2), 5.0))),
        lambda model: model.load_state_dict(
            {"a.weight": torch.full((2, 2), 5.0), "scale": torch.tensor(1.0)}, assign=True
        ),
    ],
)
@pytest.mark.parametrize("compiled", [True, False])
def test_a_parameter_that_replaces_another_trains_with_an_optimizer_that_holds_it(replace, compiled, caplog):
    model = Loss()
    executor = trained(model)
    if compiled:
        executor(X)
    replace(model)
    for _ in range(2):
        assert executor(X).item() == 20
    assert torch.equal(model.a.weight, torch.full((2, 2), 5.0))
    (message,) = caplog.messages
    assert message.startswith("the optimizer does not hold these parameters of the model")
    assert "so they are not updated: a.weight\n" in message
    assert "fix: executor.setOptimizer" in message
    executor.setOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    assert executor(X).item() == 20
    assert torch.equal(model.a.weight, torch.full((2, 2), 4.0))
    assert len(caplog.messages) == 1


def test_a_parameter_that_is_gone_is_an_error_until_there_is_one():
    model = Loss()
    executor = trained(model)
    executor(X)
    del model.a.weight
    with pytest.raises(poptorch.Error, match=r"the model has lost a\.weight since it was compiled"):
        executor.copyWeightsToHost()
    model.a.weight = nn.Parameter(torch.zeros(2, 2))
    executor.copyWeightsToHost()
    assert executor(X) == 0


def test_the_class_of_a_wrapped_model_makes_new_models():
    class Sized(Loss):
        def __init__(self, size=2):
            super().__init__()
            self.size = size

    model = Sized()
    executor = trained(model)
    twin = type(model)(size=7)
    assert type(twin) is Sized
    assert twin.size == 7
    assert twin(X).shape == ()
    assert isinstance(model, Sized)
    executor(X)
    assert type(model)().state_dict().keys() == model.state_dict().keys()


def test_float64_inputs_become_float32_with_one_warning(caplog):
    model = nn.Linear(2, 2)
    executor = poptorch.inferenceModel(model, poptorch.Options().deviceIterations(2))
    x = torch.tensor([[0.1, 0.2], [0.3, 0.4]], dtype=torch.float64)
    with caplog.at_level(logging.WARNING):
        found = executor(x)
        executor(x)
    assert torch.equal(found, model(x.float()).detach())
    assert sum("become float32" in record.message for record in caplog.records) == 1


def test_a_model_of_float64_takes_and_returns_float64():
    model = nn.Linear(2, 2).double()
    x = torch.tensor([[0.1, 0.2]], dtype=torch.float64)
    torch.testing.assert_close(poptorch.inferenceModel(model)(x), model(x).detach(), rtol=1e-14, atol=1e-15)
