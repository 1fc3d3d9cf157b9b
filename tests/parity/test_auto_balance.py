"""AutoBalance: blocks are placed by what they were measured to take."""

import logging

import pytest
import torch
from torch import nn

import poptorch


class Uneven(nn.Module):
    """Seven blocks; the fourth takes about half of all the work."""

    WIDTHS = (16, 16, 16, 4096, 16, 16, 16)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            poptorch.BeginBlock(nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64)), f"L{i}")
            for i, width in enumerate(self.WIDTHS)
        )

    def forward(self, x, y):
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.mse_loss(x, y)


def trained(strategy):
    torch.manual_seed(0)
    model = Uneven()
    opts = poptorch.Options().showCompilationProgressBar(False).setExecutionStrategy(strategy)
    opts.Training.gradientAccumulation(6)
    executor = poptorch.trainingModel(model, opts, poptorch.optim.Adam(model.parameters()))
    losses = [executor(torch.randn(6 * 32, 64), torch.randn(6 * 32, 64)) for _ in range(2)]
    return executor, losses, model.state_dict()


def test_the_heavy_block_is_alone_and_the_bits_are_those_of_any_layout(caplog):
    with caplog.at_level(logging.INFO, logger="poptorch::python"):
        executor, losses, weights = trained(poptorch.PipelinedExecution(poptorch.AutoBalance(3)))
    assert [names for _, _, names, _ in executor.plan.stages] == ["L0, L1, L2", "L3", "L4, L5, L6"]
    assert "AutoBalance placed 7 blocks" in caplog.text and "ipu 1:" in caplog.text
    blocks = [f"L{i}" for i in range(7)]
    _, same_losses, same_weights = trained(poptorch.PipelinedExecution(blocks))
    assert all(map(torch.equal, losses, same_losses))
    assert all(torch.equal(weights[name], same_weights[name]) for name in weights)


def test_a_model_without_blocks_or_with_too_few_says_so():
    with pytest.raises(poptorch.Error, match="7 blocks can't be placed on 8 ipus"):
        trained(poptorch.PipelinedExecution(poptorch.AutoBalance(8)))
    opts = poptorch.Options().setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoBalance(2)))
    with pytest.raises(poptorch.Error, match="AutoBalance has no blocks to place"):
        poptorch.inferenceModel(nn.Linear(2, 2), opts)(torch.randn(4, 2))


def test_auto_balance_takes_a_number_of_ipus():
    with pytest.raises(AssertionError, match="AutoBalance takes an int from 1; found 0"):
        poptorch.AutoBalance(0)
    assert "AutoBalance(ipus=2" in repr(poptorch.PipelinedExecution(poptorch.AutoBalance(2)))
