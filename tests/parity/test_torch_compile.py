"""A model that torch.compile was given is captured as it is written: torch.compile is left out, and said to be."""

import pytest
import torch
from parity_runs import options
from torch import nn

import poptorch

X = torch.arange(8.0).reshape(2, 4)


@pytest.fixture(autouse=True)
def checks_of_distributions():
    """torch.compile switches them off for the whole process."""
    checks = torch.distributions.Distribution._validate_args
    yield
    torch.distributions.Distribution.set_default_validate_args(checks)


def doubled(x):
    return x * 2


class Parts(nn.Module):
    """A layer in an OptimizedModule, one compiled in place, and a compiled function."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.wrapped, self.inside, self.last = nn.Linear(4, 4), nn.Linear(4, 4), doubled

    def forward(self, x):
        return poptorch.identity_loss(self.last(self.inside(self.wrapped(x))), "mean")


def compiled_parts():
    model = Parts()
    model.wrapped = torch.compile(model.wrapped)
    model.inside.compile()
    model.last = torch.compile(doubled)
    return model


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def updated(model):
    """The weights after one update by an executor, and its loss."""
    loss = poptorch.trainingModel(model, options(accumulation=1), sgd(model))(X)
    return loss, list(model.state_dict().values())


@pytest.mark.parametrize("make", [compiled_parts, lambda: torch.compile(Parts())], ids=["parts", "whole"])
def test_a_model_that_is_compiled_trains_as_the_model_inside(make, caplog):
    # Compiled code ran on memory that was never written; a whole model ended in a RecursionError.
    loss, weights = updated(make())
    expected_loss, expected = updated(Parts())
    assert torch.equal(loss, expected_loss)
    assert all(map(torch.equal, weights, expected))
    assert len([line for line in caplog.messages if "torch.compile is left out" in line]) == 1


@pytest.mark.parametrize("make", [lambda: Parts().wrapped, compiled_parts])
def test_a_compiled_model_predicts_as_the_model_inside(make):
    model = make()
    with torch.compiler.set_stance("force_eager"):
        expected = model(X).detach()
    assert torch.equal(poptorch.inferenceModel(torch.compile(model))(X), expected)


def test_a_compiled_model_that_is_wrapped_is_not_wrapped_again():
    model = torch.compile(Parts())
    trainer = poptorch.trainingModel(model)
    with pytest.raises(RuntimeError, match="already been wrapped"):
        poptorch.trainingModel(model)
    assert "1 stage" in str(poptorch.describe(model, None, X))
    trainer.destroy()
