"""The weights of a model are the ones that train: what a call sees, and what is seen after it."""

import pytest
import torch
from executor_models import Counting, Trained, batch, options, trainer
from torch import nn

import poptorch
from poptorch import CommGroupType, VariableRetrievalMode
from small_models import module

# ---- several executors of a model ------------------------------------------------------------------------


# ---- what is changed after compilation -------------------------------------------------------------------


def test_weights_that_are_tied_and_untied_after_compilation_count():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = tied = model[0].weight
    executor, x = poptorch.inferenceModel(model, options()), torch.ones(2, 2)
    for weight in (tied, nn.Parameter(torch.ones(2, 2)), tied, nn.Parameter(torch.zeros(2, 2))):
        model[1].weight = weight
        torch.testing.assert_close(executor(x), model(x).detach())


# ---- replicas --------------------------------------------------------------------------------------------


def test_buffers_that_would_drift_apart_are_refused():
    executor = poptorch.inferenceModel(Counting(), options(replicas=2))
    with pytest.raises(poptorch.Error, match="does not support broadcasting buffers") as error:
        executor(torch.zeros(2))
    assert "broadcastBuffers(False)" in str(error.value)


def test_batch_norm_statistics_are_exempt_and_the_host_gets_replica_0s():
    executor, model = trainer(
        module(
            lambda self, x: poptorch.identity_loss(self.norm(x), "mean"), norm=nn.BatchNorm1d(1, momentum=1.0)
        ),
        options(replicas=2),
    )
    executor(torch.tensor([[1.0], [3.0], [10.0], [20.0]]))
    assert torch.equal(model.norm.running_mean, torch.tensor([2.0]))


class PerReplica(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, rows + 1).reshape(rows, 1))

    def forward(self, x):
        assert self.weight.shape == (1,)
        return poptorch.identity_loss(self.weight * x, "sum")


@pytest.mark.parametrize(
    ("kind", "size", "groups"),
    [
        (CommGroupType.All, 0, [0, 0, 0, 0]),
        (CommGroupType.Consecutive, 2, [0, 0, 1, 1]),
        (CommGroupType.Orthogonal, 2, [0, 1, 0, 1]),
        (CommGroupType.NoGrouping, 0, [0, 1, 2, 3]),
    ],
)
def test_a_per_replica_parameter_has_a_row_a_group_and_reduces_within_it(kind, size, groups):
    rows = max(groups) + 1
    model = PerReplica(rows)
    sgd = poptorch.optim.SGD(model.parameters(), lr=1.0)
    executor = poptorch.trainingModel(model, options(replicas=4, mode=poptorch.OutputMode.All), sgd)
    executor.weight.replicaGrouping(kind, size, VariableRetrievalMode.OnePerGroup)
    x = torch.tensor([1.0, 2.0, 4.0, 8.0])
    before = torch.arange(1.0, rows + 1)
    outputs = executor(x)
    assert torch.equal(outputs, before[groups] * x)
    means = [x[torch.tensor(groups) == group].sum() / 4 for group in range(rows)]  # over all replicas
    assert torch.equal(model.weight.detach()[:, 0], before - torch.stack(means))


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("weight", (CommGroupType.All, 1), "fix:"),
        ("weight", "all", "fix:"),
        ("weight", (1, 1, 1), "takes a poptorch.CommGroupType"),
        (
            "wait",
            (CommGroupType.All, 1, VariableRetrievalMode.OnePerGroup),
            "takes one of 'weight'; found 'wait'",
        ),
    ],
)
def test_a_grouping_that_is_none_is_refused(name, given, message):
    executor = poptorch.inferenceModel(PerReplica(1), options())
    executor.per_replica_params[name] = given
    with pytest.raises(poptorch.Error, match=message):
        executor(torch.ones(1))


def test_all_replicas_values_can_come_back():
    model = PerReplica(2)
    sgd = poptorch.optim.SGD(model.parameters(), lr=1.0)
    executor = poptorch.trainingModel(model, options(replicas=4), sgd)
    executor.weight.replicaGrouping(CommGroupType.Consecutive, 2, VariableRetrievalMode.AllReplicas)
    executor(torch.ones(4))
    assert torch.equal(model.weight.detach(), torch.tensor([[0.5], [0.5], [1.5], [1.5]]))
    executor.copyWeightsToDevice()
    executor(torch.ones(4))
    assert torch.equal(model.weight.detach(), torch.tensor([[0.0], [0.0], [1.0], [1.0]]))


def test_optimizer_state_has_the_same_rows():
    model = PerReplica(2)
    adam = poptorch.optim.Adam(model.parameters(), lr=1.0)
    executor = poptorch.trainingModel(model, options(replicas=2), adam)
    executor.weight.replicaGrouping(CommGroupType.NoGrouping, 0, VariableRetrievalMode.OnePerGroup)
    executor(torch.tensor([1.0, 2.0]))
    state = adam.state_dict()["ipu_state"]["Accl1___weight"]
    torch.testing.assert_close(state, torch.tensor([[0.05], [0.1]]))  # gradients 1 and 2, over 2 replicas
    executor.detachFromDevice()
    executor(torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(
        adam.state_dict()["ipu_state"]["Accl1___weight"], torch.tensor([[0.095], [0.19]])
    )


def test_a_scalar_cannot_be_per_replica():
    executor = poptorch.inferenceModel(
        module(lambda self, x: self.weight * x, weight=nn.Parameter(torch.tensor(1.0))), options(replicas=2)
    )
    executor.weight.replicaGrouping(CommGroupType.NoGrouping, 0, VariableRetrievalMode.OnePerGroup)
    with pytest.raises(poptorch.Error, match="Scalars cannot be passed as per-replica"):
        executor(torch.ones(2))


def test_groups_are_fixed_by_the_compilation_and_must_fit():
    executor = poptorch.inferenceModel(PerReplica(3), options(replicas=2))
    executor.weight.replicaGrouping(CommGroupType.NoGrouping, 0, VariableRetrievalMode.OnePerGroup)
    with pytest.raises(poptorch.Error, match="3 rows, but its replicaGrouping makes 2 groups"):
        executor(torch.ones(2))
    executor.weight.replicaGrouping(CommGroupType.Consecutive, 3, VariableRetrievalMode.OnePerGroup)
    with pytest.raises(poptorch.Error, match="groups of 3 replicas do not divide"):
        executor(torch.ones(2))
    other = poptorch.inferenceModel(PerReplica(2), options(replicas=2))
    other.weight.replicaGrouping(CommGroupType.NoGrouping, 0, VariableRetrievalMode.OnePerGroup)
    other.compile(torch.ones(2))
    with pytest.raises(poptorch.Error, match="after compilation"):
        other.weight.replicaGrouping(CommGroupType.All, 0, VariableRetrievalMode.OnePerGroup)


# ---- named buffers ---------------------------------------------------------------------------------------


def offset():
    return module(
        lambda self, x: x * self.scale + self.offset, offset=torch.ones(1), scale=nn.Parameter(torch.ones(1))
    )


def test_named_buffers_and_all_other_weights_are_read_by_the_next_call():
    model = offset()
    executor = poptorch.inferenceModel(model, options().updatableNamedBuffers(["offset"]))
    executor(torch.zeros(1))
    with torch.no_grad():
        model.offset.fill_(5.0)
        model.scale.fill_(3.0)
    executor.copyNamedBuffersToDevice()
    assert executor(torch.ones(1)) == 8


def test_named_buffers_must_be_named_and_exist():
    executor = poptorch.inferenceModel(offset(), options())
    executor(torch.zeros(1))
    with pytest.raises(poptorch.Error, match="No named buffers marked as updatable"):
        executor.copyNamedBuffersToDevice()
    executor = poptorch.inferenceModel(offset(), options().updatableNamedBuffers(["offest"]))
    with pytest.raises(poptorch.Error, match="found 'offest'; did you mean 'offset'"):
        executor(torch.zeros(1))


class Prefixed(nn.Module):
    """Holds a model, and says its names as the model does."""

    def __init__(self):
        super().__init__()
        self.inner = Trained()

    def forward(self, *args):
        return self.inner(*args)

    def named_parameters(self, *args, **kwargs):
        return self.inner.named_parameters(*args, **kwargs)


def test_a_wrapper_says_what_its_parameters_are_called():
    torch.manual_seed(1)
    executor, model = trainer(Prefixed())
    executor(*batch())
    assert {"layer.weight", "layer.bias"} <= set(executor.getTensorNames())
    state = executor._optimizer.state_dict()
    assert not any("inner" in name for name in state["ipu_state"])
    alone, plain = trainer()
    alone(*batch())
    assert torch.equal(model.inner.layer.weight, plain.layer.weight)
