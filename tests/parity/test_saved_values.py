"""A value that autograd saved may be changed in place: gradients are those of the value that was saved."""

import copy

import pytest
import torch
from parity_runs import options
from torch import nn

import poptorch


class Changes(nn.Module):
    """Saved values are changed as a whole, in a slice, through a view, and in a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (poptorch.BeginBlock(nn.Linear(4, 4), name) for name in "ab")
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        y = self.a(x).relu()
        z = torch.sigmoid(y * y)
        y.mul_(2)
        y[0] += 1
        w = z * self.scale
        self.scale.mul_(0.5)
        z.view(-1)[:3].exp_()
        return poptorch.identity_loss(self.b(y + w + z).square(), "mean")


class Drops(Changes):
    """As networks for speech are written: an activation, and a dropout that overwrites it."""

    def __init__(self):
        super().__init__()
        self.c = nn.Sequential(
            nn.ReLU(), nn.Dropout(0.0, inplace=True), nn.SiLU(), nn.Dropout(0.0, inplace=True)
        )

    def forward(self, x):
        return poptorch.identity_loss(self.b(self.c(self.a(x))).square(), "mean")


X = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


@pytest.mark.parametrize("make", [Changes, Drops])
@pytest.mark.parametrize("stages", [("a", "b"), None], ids=["two stages", "one stage"])
def test_a_saved_value_that_is_changed_in_place_has_the_gradient_of_what_was_saved(make, stages):
    user = make()
    plain = copy.deepcopy(user)
    if stages is None:
        poptorch.removeBlocks(user)
    strategy = stages and poptorch.ShardedExecution(*stages)
    executor = poptorch.trainingModel(user, options(strategy, accumulation=1), sgd(user))
    loss = executor(X)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        expected = plain(X)
        expected.backward()
    sgd(plain).step()
    assert torch.equal(loss, expected.detach())
    for name, value in plain.state_dict().items():
        assert torch.equal(user.state_dict()[name], value), name


def test_a_dropout_that_overwrites_an_activation_trains():
    model = nn.Sequential(
        nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.5, inplace=True), nn.Linear(4, 4), nn.MSELoss()
    )
    model.forward = lambda x: model[4](model[3](model[2](model[1](model[0](x)))), x)
    before = model[0].weight.clone()
    poptorch.trainingModel(model, options(accumulation=1), sgd(model))(X)
    assert not torch.equal(model[0].weight, before)
    assert model[0].weight.isfinite().all()
