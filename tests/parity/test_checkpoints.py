"""torch.utils.checkpoint inside a model: the part that is computed again draws the same random numbers."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import poptorch


class Dropping(nn.Module):
    def __init__(self, checkpointed):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(24, 24), nn.Linear(24, 4)
        self.dropout = nn.Dropout(0.5)
        self.checkpointed = checkpointed

    def part(self, x):
        return torch.relu(self.dropout(self.first(x)))

    def forward(self, x):
        h = checkpoint(self.part, x, use_reentrant=False) if self.checkpointed else self.part(x)
        return poptorch.identity_loss(self.last(self.dropout(h)).pow(2), "mean")


def trained(checkpointed):
    model = Dropping(checkpointed)
    opts = poptorch.Options().randomSeed(5).showCompilationProgressBar(False)
    executor = poptorch.trainingModel(model, opts, poptorch.optim.SGD(model.parameters(), lr=0.1))
    before = torch.get_rng_state()
    losses = [executor(torch.ones(8, 24)) for _ in range(3)]
    assert torch.equal(before, torch.get_rng_state())  # tracing leaves the user's random state alone
    return losses, model.state_dict()


def test_a_checkpoint_with_dropout_changes_no_bit():
    # Backward used to draw another mask than forward: wrong gradients, and no word about it.
    losses, weights = trained(checkpointed=False)
    same_losses, same_weights = trained(checkpointed=True)
    assert all(map(torch.equal, losses, same_losses))
    assert all(torch.equal(weights[name], same_weights[name]) for name in weights)
