"""Each replica keeps its running statistics in whole and incomplete calls, and after writes by the program."""

import itertools

import pytest
import torch
from torch import nn

import poptorch

STEPS = ("whole", "incomplete", "written")
ROWS = torch.randn(4, 2, generator=torch.Generator().manual_seed(3))


def new_model():
    return nn.BatchNorm1d(2, affine=False)


@pytest.mark.parametrize("steps", [*itertools.product(STEPS, repeat=2)], ids=" ".join)
def test_each_replica_keeps_its_running_statistics(steps):
    model, twins = new_model(), [new_model() for _ in range(2)]
    options = poptorch.Options().replicationFactor(2).allowNewShapes().showCompilationProgressBar(False)
    options.broadcastBuffers(False)
    executor = poptorch.inferenceModel(model, options)
    for number, step in enumerate(("whole", *steps)):
        rows = ROWS + number
        if step == "written":
            for each in (model, *twins):
                each.running_mean.fill_(number)
            continue
        parts = rows.split(2) if step == "whole" else [rows[:2]]
        found = executor(torch.cat([*parts]))
        expected = [twin(part) for twin, part in zip(twins, parts, strict=False)]
        torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=0)
        assert torch.equal(model.running_mean, twins[0].running_mean)
        if number == len(steps):
            executor.averageRunningStatistics()
            mean = (twins[0].running_mean.double() + twins[1].running_mean.double()) / 2
            assert torch.equal(model.running_mean, mean.float())
