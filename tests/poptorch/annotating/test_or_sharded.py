"""A pipeline that has too few micro-batches, and a user who allows that."""

import logging

import pytest
import torch
from executor_models import options
from torch import nn

import poptorch


class Four(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            poptorch.BeginBlock(nn.Linear(3, 3), str(ipu), ipu_id=ipu) for ipu in range(4)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return poptorch.identity_loss(x**2, "mean")


def executor(strategy, accumulation=1):
    torch.manual_seed(1)
    model = Four()
    opts = options(accumulation=accumulation)
    opts.setExecutionStrategy(strategy)
    return poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.1)), model


def test_it_runs_sharded_with_the_same_bits_and_says_so(caplog):
    with caplog.at_level(logging.INFO, logger="poptorch::python"):
        allowed, model = executor(poptorch.PipelinedExecution().orSharded())
        allowed(torch.ones(2, 3))
    assert "gradientAccumulation is 1, and from 7 they are a pipeline" in caplog.text
    sharded, twin = executor(poptorch.ShardedExecution())
    sharded(torch.ones(2, 3))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_with_enough_micro_batches_it_stays_a_pipeline():
    allowed, _ = executor(poptorch.PipelinedExecution().orSharded(), accumulation=7)
    allowed(torch.ones(7, 3))
    assert allowed._executable.settings.strategy.order == "1f1b"


def test_without_leave_it_is_refused():
    refused, _ = executor(poptorch.PipelinedExecution())
    with pytest.raises(poptorch.Error, match="pipeline stages"):
        refused(torch.ones(2, 3))
