"""Optimizer state that instances share out: each keeps its part, and the whole can be read wherever somebody asks."""

import processes
import pytest
import torch
import training
from torch import nn

import popdist
import poptorch
from popengine.run.instances import process_group
from small_models import Signed

RULES = {
    "poptorch's": lambda weights: poptorch.optim.AdamW(weights, lr=0.01, max_grad_norm=0.5),
    "torch's": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "a user's": lambda weights: Signed(weights, lr=0.1),
}


class Layers(nn.Module):
    """Eight weights of one size, so that each of 2 or 4 owners has as many."""

    def __init__(self):
        super().__init__()
        layers = [nn.Linear(6, 6, bias=False) for _ in range(8)]
        self.first, self.last = nn.Sequential(*layers[:4]), nn.Sequential(*layers[4:])

    def forward(self, x):
        with poptorch.Block("a"):
            x = self.first(x).tanh()
        with poptorch.Block("b"):
            return poptorch.identity_loss(self.last(x).square(), "mean")


def trained(rule, opts, instance, calls=3):
    """An executor after some calls, and its optimizer; all replicas of all instances take the same rows."""
    opts.randomSeed(1).showCompilationProgressBar(False)
    opts.setExecutionStrategy(poptorch.PipelinedExecution("a", "b"))
    opts.Training.gradientAccumulation(3)
    opts.TensorLocations.setOptimizerLocation(poptorch.TensorLocationSettings().useReplicatedTensorSharding())
    torch.manual_seed(0)
    model = Layers()
    optimizer = RULES[rule](model.parameters())
    executor = poptorch.trainingModel(model, opts, optimizer)
    data = torch.Generator().manual_seed(2)
    for _ in range(calls):
        rows = torch.randn(3, 4, 2, 6, generator=data)
        here = opts.replication_factor
        executor(rows[:, instance * here : (instance + 1) * here].flatten(0, 2))
    return executor, optimizer


def plain(state):
    """A state as lists, in an order that does not matter."""
    if isinstance(state, dict):
        return {str(key): plain(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [plain(value) for value in state]
    return state.tolist() if isinstance(state, torch.Tensor) else state


def kept(executor):
    """How many elements of state this instance keeps."""
    states = executor._optimizer.state.values()
    return sum(value.numel() for state in states for value in state.values())


def read_by(chosen, rule):
    """The state of who is chosen, and how much each keeps; the others go on to the end of the program."""
    popdist.init()
    executor, optimizer = trained(rule, popdist.poptorch.Options(), popdist.getInstanceIndex())
    state = plain(optimizer.state_dict()) if popdist.getInstanceIndex() in chosen else None
    process_group.announce_end()
    return state, kept(executor)


@pytest.mark.parametrize(
    "chosen, instances", [((0, 1), 2), ((0,), 2), ((1, 2), 4)], ids=["all", "the first", "some of four"]
)
@pytest.mark.parametrize("rule", [*RULES])
def test_the_whole_state_is_read_by_whoever_asks_and_each_keeps_its_part(chosen, instances, rule):
    executor, optimizer = trained(rule, poptorch.Options().replicationFactor(4), 0)
    expected, whole = plain(optimizer.state_dict()), kept(executor)
    ended = processes.run(read_by, instances, chosen, rule, replicas=4 // instances)
    assert [one.error for one in ended] == [""] * instances
    for place, one in enumerate(ended):
        state, part = one.value
        assert state == (expected if place in chosen else None)
        assert part == whole // instances


def trained_by_three_replicas():
    """The weights without and with a shared state, which the first instance reads while the other one trains."""
    popdist.init()
    found = []
    for shares_state in (False, True):
        executor, model, optimizer = training.executor(
            rule=poptorch.optim.AdamW, shares_state=shares_state, max_grad_norm=0.1
        )
        for call in range(4):
            executor(*training.batch(call))
            if call == 2 and popdist.getInstanceIndex() == 0:
                optimizer.state_dict()
        found.append(training.weights(model))
    return found


def test_replicas_that_are_several_nodes_of_the_tree_train_while_an_instance_reads_all_state():
    """Three replicas of an instance add up to two nodes of the sum; processes that agree send one number."""
    ended = processes.run(trained_by_three_replicas, 2, replicas=3)
    assert [one.error for one in ended] == ["", ""]
    weights = [each for one in ended for each in one.value]
    assert weights == [weights[0]] * 4


def read_when_the_other_is_gone():
    popdist.init()
    executor, _, optimizer = training.executor(rule=poptorch.optim.AdamW, lr=0.01, shares_state=True)
    executor(*training.batch(0))
    if popdist.getInstanceIndex() == 1:
        return ""
    with pytest.raises(poptorch.UnrecoverableError) as raised:
        optimizer.state_dict()
    return str(raised.value)


def test_who_asks_for_the_part_of_an_instance_that_is_gone_is_told():
    first, _ = processes.run(read_when_the_other_is_gone, 2)
    assert first.error == ""
    assert "another instance has left the run" in first.value


def read_when_the_other_has_destroyed_it():
    """The names of the parameters whose state the first instance reads, also without barriers around that."""
    popdist.init()
    found = []
    for meets in (True, False):
        executor, _, optimizer = training.executor(rule=poptorch.optim.AdamW, lr=0.01, shares_state=True)
        executor(*training.batch(0))
        if popdist.getInstanceIndex() == 1:
            executor.destroy()
        if meets:
            popdist.synchronize()
        if popdist.getInstanceIndex() == 0:
            found.append({name.split("___")[-1] for name in optimizer.state_dict()["ipu_state"]})
        if meets:
            popdist.synchronize()
    if popdist.getInstanceIndex() == 1:
        process_group.announce_end()
    return found


def test_the_first_may_still_save_when_the_others_have_destroyed_the_executor():
    first, second = processes.run(read_when_the_other_has_destroyed_it, 2)
    assert (first.error, second.error) == ("", "")
    assert len(first.value) == 2
    assert all(names >= {"first.bias", "first.weight", "last.bias", "last.weight"} for names in first.value)


def read_without_devices():
    popdist.init()
    for rule in RULES:
        executor, optimizer = trained(rule, popdist.poptorch.Options(), popdist.getInstanceIndex())
        state = optimizer.state_dict()
        executor.detachFromDevice()
        assert plain(optimizer.state_dict()) == plain(state)
        executor.destroy()
        assert plain(optimizer.state_dict()) == plain(state)
        assert len(optimizer.state) == len(optimizer.param_groups[0]["params"]) // 2  # this instance's shard
        optimizer.load_state_dict(state)  # to go on with in another executor
        assert plain(optimizer.state_dict()) == plain(state)


def test_state_that_is_not_on_devices_is_whole():
    assert [ended.error for ended in processes.run(read_without_devices, 2, replicas=2)] == ["", ""]
