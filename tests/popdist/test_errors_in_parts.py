"""Errors of one process of a replica reach all of them, and what would be half a model is refused."""

import contextlib
import gc
from unittest.mock import patch

import processes
import pytest
import torch
import torch.distributed as dist
from torch import nn

import popdist
import popdist.poptorch
import poptorch
from popengine.environment import WAIT_LIMIT


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        with poptorch.Block("A"):
            x = self.a(x).tanh()
        with poptorch.Block("B"):
            return poptorch.identity_loss(self.b(x), reduction="mean")


def options():
    found = popdist.poptorch.Options(2).deviceIterations(4).showCompilationProgressBar(False)
    return found.setExecutionStrategy(poptorch.ShardedExecution("A", "B"))


def trainer(model):
    return poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=0.1))


@contextlib.contextmanager
def errors(found):
    """Add the text of an error inside the `with`, or "none"."""
    try:
        yield
        found.append("none")
    except poptorch.Error as error:
        found.append(str(error))


def one_fails():
    """Errors of one process: while it wraps a model, while an engine is made, and of other first weights and states."""
    popdist.init()
    first, found, x = popdist.getInstanceIndex() == 0, [], torch.ones(4, 4)
    with errors(found):  # [0] an optimizer of another model
        model = Net()
        strange = Net() if first else model
        executor = poptorch.trainingModel(model, options(), torch.optim.SGD(strange.parameters(), lr=0.1))
        executor(x)
    with errors(found):  # [1]
        refuse = patch("popengine.run.engine.RowFunctions", side_effect=poptorch.Error("no memory"))
        with refuse if first else contextlib.nullcontext():
            torch.manual_seed(0)
            trainer(Net())(x)
    with errors(found):  # [2] without torch.manual_seed
        torch.manual_seed(popdist.getInstanceIndex())
        trainer(Net())(x)
    with errors(found):  # [3] neither here
        torch.manual_seed(popdist.getInstanceIndex())
        with torch.device("meta"):
            model = poptorch.materialize(Net())
        trainer(model)(x)
    torch.manual_seed(0)
    with errors(found):  # [4] the executor has gone, and no process can read the weights of others
        twin = Net()
        trainer(twin)(x)
        gc.collect()
        twin.state_dict()
    return found


def test_an_error_in_one_process_of_a_replica_is_an_error_in_all():
    first, second = processes.run(one_fails, 2, parts=2)
    assert [first.error, second.error] == ["", ""]
    texts = list(zip(first.value, second.value, strict=True))
    assert "parameters" in texts[0][0] and "instance 0 failed" in texts[0][1]
    assert "no memory" in texts[1][0] and "instance 0 failed" in texts[1][1]
    for text in texts[2]:
        assert "the instances differ at compilation" in text and "a.weight" in text
    for text in texts[3]:
        assert "the instances differ at compilation" in text and "drawn from" in text
    assert all("no executor of the model is attached" in text for text in texts[4])


def one_reads():
    popdist.init()
    torch.manual_seed(0)
    model, found = Net(), []
    executor = trainer(model)
    executor(torch.ones(4, 4))
    with errors(found):
        if popdist.getInstanceIndex() == 0:
            model.state_dict()
    dist.barrier()
    return found


@pytest.mark.slow  # waits for the limit
def test_a_state_dict_of_one_process_that_another_waits_for_ends_with_an_error_that_names_it():
    launches = [{**each, WAIT_LIMIT: "30"} for each in processes.launches(2, 1, 2)]
    first, second = processes.finish(processes.start(one_reads, launches))
    assert second.value == ["none"]
    assert "by state_dict(), to be called in all instances" in first.value[0]
