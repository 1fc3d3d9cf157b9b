"""Hooks on parameters and tensors change gradients as in plain PyTorch; where they can't, they are refused."""

from functools import partial

import pytest
import torch
from parity_runs import ACCUMULATION, ROWS, assert_trains_as_plain_pytorch, options
from torch import nn

import poptorch

seen = []


class Hooked(nn.Module):
    """Hooks on a weight of each stage, on a value of forward, and on a layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = poptorch.BeginBlock(nn.Linear(3, 3), "a", ipu_id=0)
        self.b = poptorch.BeginBlock(nn.Linear(3, 3), "b", ipu_id=1)
        mask = torch.eye(3)
        self.a.weight.register_hook(lambda gradient: gradient * mask)
        self.a.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        self.b.weight.register_hook(lambda gradient: gradient + self.a.bias.detach())
        self.b.bias.register_hook(lambda gradient: None)
        self.b.register_full_backward_hook(lambda layer, inner, outer: (inner[0] * 3,))

    def forward(self, x):
        y = self.a(x)
        y.register_hook(lambda gradient: gradient * 2)
        return poptorch.identity_loss(self.b(y).square(), "mean")


X = torch.randn(ACCUMULATION * ROWS, 3, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("stages", [("a", "b"), None], ids=["two stages", "one stage"])
def test_hooks_change_gradients_as_in_plain_pytorch(stages):
    strategy = stages and poptorch.PipelinedExecution(*stages)
    assert_trains_as_plain_pytorch(Hooked, partial(torch.optim.SGD, lr=0.5), X, strategy=strategy)


def trainer():
    model = nn.Sequential(nn.Linear(3, 1))
    loss = nn.Module()
    loss.forward = lambda x: poptorch.identity_loss(model(x), "mean")
    loss.model = model
    return model[0].weight, poptorch.trainingModel(
        loss, options(accumulation=1), torch.optim.SGD(model.parameters(), lr=0.5)
    )


def test_a_hook_that_is_set_or_removed_is_followed_by_the_next_call_and_one_after_accumulation_is_refused():
    weight, executor = trainer()

    def change_by(factor):
        before = weight.detach().clone()
        handle = weight.register_hook(lambda gradient: factor * gradient)
        executor(X)
        handle.remove()
        return weight.detach() - before

    executor(X)
    first = weight.detach().clone()
    assert torch.equal(change_by(0), torch.zeros_like(weight))
    executor(X)
    assert not torch.equal(weight, first)
    weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(poptorch.Error, match=r"model\.0\.weight has a hook of register_post_accumulate_grad"):
        executor(X)


def test_a_gradient_that_a_hook_keeps_is_an_error():
    weight, executor = trainer()
    weight.register_hook(seen.append)
    with pytest.raises(poptorch.Error, match=r"leaves tensors behind in a hook of model\.0\.weight"):
        executor(X)
    seen.clear()
    weight, executor = trainer()
    weight.register_hook(lambda gradient: seen.append(gradient))
    with pytest.raises(poptorch.Error, match=r"leaves tensors behind in seen\[0\]"):
        executor(X)
    seen.clear()
