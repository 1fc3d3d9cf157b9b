"""How many threads an operation has: as many as micro-batches leave idle, whatever the layout is."""

import pytest
import torch
from torch import nn

import poptorch

seen = []


def noted(x):
    seen.append(torch.get_num_threads())
    return x


class Noting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        with poptorch.Block("first"):
            x = poptorch.CPU(noted, "noted")(self.layer(x))
        with poptorch.Block("second"):
            return x + 1


@pytest.fixture
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    seen.clear()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("micro_batches", "replicas", "expected"),
    [(1, 1, 4), (2, 1, 2), (1, 2, 2), (3, 1, 1), (2, 2, 1), (8, 1, 1)],
)
@pytest.mark.parametrize("stages", [(("first", "second"),), (("first",), ("second",))])
def test_an_operation_has_the_cores_that_micro_batches_and_replicas_leave(
    micro_batches, replicas, expected, stages, four_threads
):
    options = poptorch.Options().deviceIterations(micro_batches).replicationFactor(replicas)
    options.showCompilationProgressBar(False)
    options.setExecutionStrategy(poptorch.ShardedExecution(*(poptorch.Stage(*names) for names in stages)))
    poptorch.inferenceModel(Noting(), options)(torch.ones(micro_batches * replicas, 2))
    assert seen[-micro_batches * replicas :] == [expected] * (micro_batches * replicas)
