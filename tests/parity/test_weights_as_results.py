"""A weight that forward returns is the one that was used, however early its home is updated."""

import pytest
import torch
from parity_runs import cut, differing, options, plain_update
from torch import nn

import poptorch


class Returned(nn.Module):
    """Stage 0 reads a weight that is trained in stage 1, forward and backward; forward returns it."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        with poptorch.Block("a"):
            x = self.a(x) @ self.b.weight.detach()
        with poptorch.Block("b"):
            return poptorch.identity_loss((self.b(x) ** 2).mean(), "none"), self.b.weight


@pytest.mark.parametrize("strategy", [poptorch.PipelinedExecution, poptorch.ShardedExecution])
def test_a_returned_weight_is_that_of_the_step_in_every_stage_that_reads_it(strategy):
    # The value that stage 1 returns was handed to stage 0 too, whose last backward then raced with the update.
    torch.manual_seed(0)
    x, updates = torch.randn(40, 3), 5
    model = Returned()
    twin = Returned()
    twin.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    executor = poptorch.trainingModel(
        model, options(strategy("a", "b"), accumulation=4, iterations=updates), optimizer
    )
    losses, returned = executor(x)
    seen, kept, step = [], [], torch.optim.SGD(twin.parameters(), lr=0.1)
    for rows in cut(8, x):
        kept += [twin.b.weight.detach().clone()] * 4
        seen += plain_update(twin, step, cut(2, *rows))
    assert torch.equal(losses, torch.stack(seen))
    assert torch.equal(returned, torch.cat(kept))
    assert differing(model, twin) == []
