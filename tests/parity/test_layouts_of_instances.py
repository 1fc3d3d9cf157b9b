"""However many instances share the replicas, and however many replicas an instance has: the same bits."""

from itertools import chain, product

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


def trained(rule, opts, instances, instance, shares_state=False):
    """The losses [steps, replicas] and all weights after two calls, with automatic loss scaling for adamw."""
    location = poptorch.TensorLocationSettings().useReplicatedTensorSharding(shares_state)
    opts.TensorLocations.setOptimizerLocation(location)
    here = REPLICAS // instances
    opts.randomSeed(7).showCompilationProgressBar(False).deviceIterations(2)
    opts.outputMode(poptorch.OutputMode.All).setExecutionStrategy(poptorch.ShardedExecution("a", "b"))
    opts.Training.gradientAccumulation(2).setAutomaticLossScaling(rule == "adamw")
    torch.manual_seed(0)
    model = Net()
    executor = poptorch.trainingModel(model, opts, RULES[rule](model.parameters()))
    data, losses = torch.Generator().manual_seed(3), []
    for _ in range(2):
        rows = torch.randn(4, REPLICAS, 2, 8, generator=data)[:, instance * here : (instance + 1) * here]
        rows = rows.flatten(0, 2)
        losses += executor(rows[:, :5].contiguous(), rows[:, 5:].contiguous()).view(-1, here).tolist()
    found = torch.cat([value.flatten() for value in model.state_dict().values()]).tolist()
    executor.destroy()
    return losses, found


def in_one_of(instances, cases):
    """The losses and weights of each case: a rule, and whether its state is shared out."""
    popdist.init()
    instance = popdist.getInstanceIndex()
    return {
        (rule, shares_state): trained(rule, popdist.poptorch.Options(), instances, instance, shares_state)
        for rule, shares_state in cases
    }


CASES = [*product(RULES, (False, True))]


@pytest.fixture(scope="module")
def whole():
    return {rule: trained(rule, poptorch.Options().replicationFactor(REPLICAS), 1, 0) for rule in RULES}


@pytest.mark.parametrize("instances", [2, 4, 8, 16])
def test_sixteen_replicas_in_several_instances_train_to_the_bits_of_one(whole, instances):
    ended = processes.run(in_one_of, instances, instances, CASES, replicas=REPLICAS // instances)
    assert [one.error for one in ended] == [""] * instances
    for (rule, _), cases in ((case, [one.value[case] for one in ended]) for case in CASES):
        losses, weights = zip(*cases, strict=True)
        assert [[*chain(*step)] for step in zip(*losses, strict=True)] == whole[rule][0], rule
        assert list(weights) == [whole[rule][1]] * instances, rule
