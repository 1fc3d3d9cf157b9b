"""A program that means to evaluate, and trains or changes statistics, is told so, with its line."""

import contextlib

import pytest
import torch
from executor_models import options
from torch import nn

import poptorch

X = torch.tensor([[1.0, 2.0], [3.0, -1.0]])


class Model(nn.Module):
    def __init__(self, returns=True):
        super().__init__()
        self.layer, self.norm, self.returns = nn.Linear(2, 2), nn.BatchNorm1d(2), returns

    def forward(self, x):
        loss = poptorch.identity_loss(self.norm(self.layer(x)).square().mean(), "none")
        return loss if self.returns else None


@pytest.mark.parametrize("name", ["no_grad", "inference_mode", "eval"])
def test_a_training_call_in_an_evaluation_warns_once_with_its_line(name, caplog):
    model = Model()
    trainer = poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=0.1))
    trainer(X)
    before, words = model.layer.weight.clone(), "trains: each call updates the weights"
    assert words not in caplog.text
    if name == "eval":
        trainer.eval()
    with contextlib.nullcontext() if name == "eval" else getattr(torch, name)():
        for _ in range(2):
            trainer(X)
    assert caplog.text.count(words) == 1 and "poptorch.inferenceModel(model) evaluates" in caplog.text
    assert f"{__file__}:" in caplog.text
    assert not torch.equal(model.layer.weight, before)


@pytest.mark.parametrize("part", ["", "norm"])
def test_an_inference_that_would_change_statistics_in_eval_mode_is_an_error(part):
    # It was a warning, and an evaluation went on with statistics that each call changed.
    model = Model().train()
    executor = poptorch.inferenceModel(model, options())
    executor(X)
    model.get_submodule(part).eval()
    before = model.norm.running_mean.clone()
    with pytest.raises(poptorch.Error, match=r"norm is in eval\(\) mode now"):
        executor(X)
    assert torch.equal(model.norm.running_mean, before)
    executor.destroy()
    assert torch.equal(executor(X), model(X).detach())


def test_an_inference_of_layers_without_statistics_goes_on_in_the_mode_of_its_first_call():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).train()
    executor = poptorch.inferenceModel(model, options())
    executor(X)
    model.eval()
    assert executor(X).shape == X.shape


def test_a_training_forward_that_returns_nothing_is_named(caplog):
    model = Model(returns=False)
    trainer = poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=0.1))
    assert trainer(X) is None
    assert caplog.text.count("forward returns nothing") == 1
