"""However many instances share the replicas, and however many replicas an instance has: the same bits."""

import os
from itertools import product

import processes
import pytest
import torch
from torch import Tensor, nn

import popdist
import poptorch

REPLICAS = 16


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.dropout = nn.Linear(5, 7), nn.Linear(7, 3), nn.Dropout(0.2)

    def forward(self, x, targets):
        with poptorch.Block("a"):
            x = self.dropout(self.first(x).relu())
        with poptorch.Block("b"):
            return nn.functional.mse_loss(self.last(x), targets)


RULES = {
    "sgd": lambda w: poptorch.optim.SGD(w, lr=0.1, momentum=0.9, max_grad_norm=0.1),
    "adam": lambda w: poptorch.optim.Adam(w, lr=0.01),
    "adamw": lambda w: poptorch.optim.AdamW(w, lr=0.01, loss_scaling=8.0),
    "rmsprop": lambda w: poptorch.optim.RMSprop(w, lr=0.01, momentum=0.5, centered=True),
    "lamb": lambda w: poptorch.optim.LAMB(w, lr=0.01, weight_decay=0.1),
    "lars": lambda w: poptorch.optim.LARS(w, lr=0.5, weight_decay=0.1),
    "nadam": lambda w: torch.optim.NAdam(w, lr=0.01),  # by its own step()
}


def weights(rule, opts, instances, instance, shares_state=False):
    """All weights after two calls, with automatic loss scaling where the rule is adamw."""
    location = poptorch.TensorLocationSettings().useReplicatedTensorSharding(shares_state)
    opts.TensorLocations.setOptimizerLocation(location)
    here = REPLICAS // instances
    opts.randomSeed(7).showCompilationProgressBar(False)
    opts.setExecutionStrategy(poptorch.ShardedExecution("a", "b"))
    opts.Training.gradientAccumulation(2).setAutomaticLossScaling(rule == "adamw")
    torch.manual_seed(0)
    model = Net()
    executor = poptorch.trainingModel(model, opts, RULES[rule](model.parameters()))
    data = torch.Generator().manual_seed(3)
    for _ in range(2):
        rows = torch.randn(2, REPLICAS, 2, 8, generator=data)[:, instance * here : (instance + 1) * here]
        rows = rows.flatten(0, 2)
        executor(rows[:, :5].contiguous(), rows[:, 5:].contiguous())
    found = torch.cat([value.flatten() for value in model.state_dict().values()]).tolist()
    executor.destroy()
    return found


def in_one_of(instances, cases):
    """The weights of each case: a rule, and whether its state is shared out."""
    popdist.init()
    instance = popdist.getInstanceIndex()
    return {
        (rule, shares_state): weights(rule, popdist.poptorch.Options(), instances, instance, shares_state)
        for rule, shares_state in cases
    }


CASES = [*product(RULES, (False, True))]


@pytest.fixture(scope="module")
def whole():
    return {rule: weights(rule, poptorch.Options().replicationFactor(REPLICAS), 1, 0) for rule in RULES}


@pytest.mark.parametrize("instances", [2, 4, 8, 16])
def test_sixteen_replicas_in_several_instances_train_to_the_bits_of_one(whole, instances):
    ended = processes.run(in_one_of, instances, instances, CASES, replicas=REPLICAS // instances)
    assert [one.error for one in ended] == [""] * instances
    differ = [
        (how, i) for i in range(instances) for how, value in ended[i].value.items() if value != whole[how[0]]
    ]
    assert differ == []


# Instances: processes that train together compute what one process with all their replicas computes.


@pytest.mark.parametrize("replicas", [1, 2], ids=["one replica each", "two replicas each"])
def test_two_instances_train_to_the_bits_of_one_with_all_replicas(replicas):
    ended = processes.run(in_one, 2, replicas=replicas)
    assert [one.error for one in ended] == ["", ""]
    losses, weights = trained(poptorch.Options().replicationFactor(2 * replicas), 1, 0)
    for one in ended:
        assert one.value[1] == {name: value.tolist() for name, value in weights.items()}
    for call, expected in enumerate(losses):
        parts = [torch.tensor(one.value[0][call]).reshape(-1, replicas) for one in ended]
        assert torch.equal(torch.stack(parts, dim=1).flatten(), expected)


def test_an_instance_that_others_have_left_says_so():
    left, early = processes.run(until_the_second_leaves, 2)
    assert early.value is None and left.error == ""
    assert "another instance has left the run" in left.value and "same number of calls" in left.value


# One instance of a run with several. Its test trains the same with all replicas in one process.


class Dropping(nn.Module):
    """Two stages with dropout, so that every replica has to draw its own numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 3)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        with poptorch.Block("a"):
            x = self.dropout(self.a(x).relu())
        with poptorch.Block("b"):
            return nn.functional.mse_loss(self.b(x), targets)


ITERATIONS, ACCUMULATION, ROWS, CALLS = 2, 4, 2, 3


def trained(
    opts: poptorch.Options, instances: int, instance: int, calls: int = CALLS
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and weights after some calls with dropout, momentum and clipping over two stages."""
    replicas = opts.replication_factor
    opts.deviceIterations(ITERATIONS).randomSeed(7).showCompilationProgressBar(False)
    opts.outputMode(poptorch.OutputMode.All).setExecutionStrategy(poptorch.PipelinedExecution("a", "b"))
    opts.Training.gradientAccumulation(ACCUMULATION)
    torch.manual_seed(0)
    model = Dropping()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, max_grad_norm=0.2)
    executor = poptorch.trainingModel(model, opts, optimizer)
    losses = []
    for _ in range(calls):
        rows = ITERATIONS * ACCUMULATION * instances * replicas * ROWS
        data = torch.randn(rows, 5), torch.randn(rows, 3)
        shards = [
            value.unflatten(0, (ITERATIONS * ACCUMULATION, instances, -1))[:, instance].flatten(0, 1)
            for value in data
        ]
        losses.append(executor(*shards))
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def place() -> tuple[int, int]:
    popdist.init()
    return popdist.getNumInstances(), popdist.getInstanceIndex()


def in_one() -> tuple[list[list[float]], dict[str, list[float]]]:
    """Losses and weights, as lists."""
    losses, weights = trained(popdist.poptorch.Options(), *place())
    popdist.synchronize()
    return [value.tolist() for value in losses], {name: value.tolist() for name, value in weights.items()}


def until_the_second_leaves() -> str:
    """What the first instance says when the second has ended after a call less, as if it were killed."""
    instances, instance = place()
    try:
        trained(popdist.poptorch.Options(), instances, instance, CALLS - instance)
    except poptorch.UnrecoverableError as error:
        return str(error)
    os._exit(0)
