"""How many threads an operation has: as many as micro-batches leave idle, whatever the layout is."""

import os
import threading

import pytest
import torch
from torch import nn

import poptorch
from popengine.run.ready_queue import end_openmp_threads

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


def threads_of_libraries():
    return len(os.listdir("/proc/self/task")) - threading.active_count()


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="Linux lists a process's threads")
def test_nobody_keeps_threads_that_would_make_those_of_another_sleep_between_operations(four_threads):
    """With two teams of four on four cores a step of ResNet-18 took 1.4 times as long."""
    large = torch.ones(1 << 20)
    model = poptorch.inferenceModel(nn.ReLU(), poptorch.Options().showCompilationProgressBar(False))
    end_openmp_threads()
    alone = threads_of_libraries()
    large.add_(1)
    if threads_of_libraries() == alone:
        pytest.skip("torch has another library of threads here, or none")
    for _ in range(2):
        model(large)
        assert threads_of_libraries() == alone
        large.add_(1)
