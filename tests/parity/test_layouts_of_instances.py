"""However many instances share the replicas, and however many replicas an instance has: the same bits."""

from itertools import product

import processes
import pytest
import torch
from torch import nn

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
