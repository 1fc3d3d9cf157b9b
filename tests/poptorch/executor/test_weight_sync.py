"""The two copies of the weights: when they move between host and devices, and when they don't."""

import pytest
import torch
from executor_models import Counting, Dropping, Trained, batch, options, trainer
from torch import nn

import poptorch
from poptorch import CommGroupType, VariableRetrievalMode


def host(model):
    return model.layer.weight.detach().clone()


def test_the_host_sees_training_at_its_next_look():
    executor, model = trainer()
    before = host(model)
    executor(*batch())
    assert executor._weights.stale
    assert not torch.equal(host(model), before)
    assert not executor._weights.stale


def test_explicit_copies_count_as_versions():
    executor, model = trainer()
    executor(*batch())
    assert executor.copyWeightsToHostIfNeeded() is True
    assert executor.copyWeightsToHostIfNeeded() is False
    assert model.copyWeightsToHostIfNeeded() is False
    version = executor._host_weights_version
    executor.copyWeightsToHost()
    assert executor._host_weights_version == version + 1


def test_changes_on_the_host_wait_for_copy_weights_to_device():
    executor, model = trainer(lr=0.0)
    x, target = batch()
    first, _ = executor(x, target)
    with torch.no_grad():
        model.layer.weight.fill_(0.0)
        model.layer.bias.fill_(7.0)
    assert torch.equal(executor(x, target)[0], first)
    with torch.no_grad():
        model.layer.weight.fill_(0.0)
        model.layer.bias.fill_(7.0)
    executor.copyWeightsToDevice()
    assert torch.equal(executor(x, target)[0], torch.full((2, 2), 7.0))


def test_uploading_discards_the_training_since_the_last_copy():
    executor, model = trainer()
    executor(*batch())
    kept = host(model)
    executor(*batch())
    executor.copyWeightsToDevice()
    assert torch.equal(host(model), kept)
    executor.copyWeightsToHost()
    assert torch.equal(host(model), kept)


def test_load_state_dict_of_the_executor_uploads():
    executor, _ = trainer(lr=0.0)
    x, target = batch()
    executor(x, target)
    state = {"layer.weight": torch.zeros(2, 3), "layer.bias": torch.ones(2)}
    keys = executor.load_state_dict(state)
    assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
    assert torch.equal(executor(x, target)[0], torch.ones(2, 2))
    with pytest.raises(RuntimeError, match="Missing key"):
        executor.load_state_dict({})
    assert executor.load_state_dict({"other": torch.ones(1)}, strict=False).unexpected_keys == ["other"]


@pytest.mark.parametrize("leave", ["detachFromDevice", "destroy"])
def test_detach_and_destroy_bring_the_weights_home(leave):
    executor, model = trainer()
    before = host(model)
    executor(*batch())
    getattr(executor, leave)()
    assert not torch.equal(model.layer.weight.detach(), before)


def test_an_interrupted_run_equals_an_uninterrupted_one():
    def losses(interrupted):
        torch.manual_seed(3)
        model = Dropping()
        optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.1)
        executor = poptorch.trainingModel(model, options().randomSeed(5), optimizer)
        found = []
        for step in range(4):
            found.append(float(executor(torch.ones(2, 4))))
            if interrupted and step == 1:
                executor.detachFromDevice()
                assert not executor.isAttachedToDevice()
        return found

    assert losses(True) == losses(False)


def test_inference_alone_sees_changes_when_told():
    model = Trained()
    executor = poptorch.inferenceModel(model, options())
    x, _ = batch()
    first = executor(x)
    with torch.no_grad():
        model.layer.weight.zero_()
        model.layer.bias.zero_()
    assert torch.equal(executor(x), first)
    executor.copyWeightsToDevice()
    assert torch.equal(executor(x), torch.zeros(2, 2))


def test_buffers_of_inference_stay_on_the_device():
    model = Counting()
    executor = poptorch.inferenceModel(model, options(iterations=2))
    assert torch.equal(executor(torch.zeros(2)), torch.tensor([1.0, 2.0]))
    assert torch.equal(executor(torch.zeros(2)), torch.tensor([3.0, 4.0]))
    assert model.seen == 0
    executor.copyWeightsToHost()
    assert model.seen == 4


def test_validation_follows_training_without_explicit_copies():
    executor, model = trainer()
    validation = poptorch.inferenceModel(model, options())
    x, target = batch()
    before = validation(x)  # with an uncompiled trainer
    for _ in range(2):
        executor(x, target)
        now = validation(x)
        assert not torch.equal(now, before)
        torch.testing.assert_close(now, model(x).detach())
        before = now
    assert torch.equal(validation(x), before)


def test_validation_uploads_only_what_is_new():
    executor, model = trainer()
    validation = poptorch.inferenceModel(model, options())
    x, target = batch()
    executor(x, target)
    validation(x)
    uploads = 0
    original = validation._weights.copyWeightsToDevice

    def count():
        nonlocal uploads
        uploads += 1
        original()

    validation._weights.copyWeightsToDevice = count
    validation(x)
    assert uploads == 0
    executor(x, target)
    validation(x)
    validation(x)
    assert uploads == 1


def test_after_the_trainers_end_validation_keeps_its_weights():
    executor, model = trainer()
    validation = poptorch.inferenceModel(model, options())
    x, target = batch()
    executor(x, target)
    executor.destroy()
    torch.testing.assert_close(validation(x), model(x).detach())


# ---- replicas --------------------------------------------------------------------------------------------


def test_buffers_that_would_drift_apart_are_refused():
    executor = poptorch.inferenceModel(Counting(), options(replicas=2))
    with pytest.raises(poptorch.Error, match="does not support broadcasting buffers") as error:
        executor(torch.zeros(2))
    assert "broadcastBuffers(False)" in str(error.value)


def test_replicas_keep_buffers_of_their_own_when_allowed():
    class Summing(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(1))

        def forward(self, x):
            self.total += x
            return self.total.clone()

    model = Summing()
    executor = poptorch.inferenceModel(model, options(replicas=2).broadcastBuffers(False))
    assert torch.equal(executor(torch.tensor([1.0, 10.0])), torch.tensor([1.0, 10.0]))
    assert torch.equal(executor(torch.tensor([1.0, 10.0])), torch.tensor([2.0, 20.0]))
    executor.copyWeightsToHost()
    assert model.total == 2  # replica 0's


def test_batch_norm_statistics_are_exempt_and_the_host_gets_replica_0s():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(1, momentum=1.0)

        def forward(self, x):
            return poptorch.identity_loss(self.norm(x), "mean")

    executor, model = trainer(Normed(), options(replicas=2))
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
    class Scalar(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(1.0))

        def forward(self, x):
            return self.weight * x

    executor = poptorch.inferenceModel(Scalar(), options(replicas=2))
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


class Offset(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("offset", torch.ones(1))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.scale + self.offset


def test_only_the_named_buffers_are_uploaded():
    model = Offset()
    executor = poptorch.inferenceModel(model, options().updatableNamedBuffers(["offset"]))
    executor(torch.zeros(1))
    with torch.no_grad():
        model.offset.fill_(5.0)
        model.scale.fill_(3.0)
    executor.copyNamedBuffersToDevice()
    assert executor(torch.ones(1)) == 6


def test_named_buffers_must_be_named_and_exist():
    executor = poptorch.inferenceModel(Offset(), options())
    executor(torch.zeros(1))
    with pytest.raises(poptorch.Error, match="No named buffers marked as updatable"):
        executor.copyNamedBuffersToDevice()
    executor = poptorch.inferenceModel(Offset(), options().updatableNamedBuffers(["offest"]))
    with pytest.raises(poptorch.Error, match="offest; the model's buffers are offset"):
        executor(torch.zeros(1))


def test_setting_an_optimizer_between_calls_moves_no_weights(monkeypatch):
    executor, _ = trainer()
    executor(*batch())
    copies = []
    monkeypatch.setattr(executor._weights, "copyWeightsToHost", lambda: copies.append(1))
    for _ in range(3):
        executor.setOptimizer(executor._optimizer)
        executor(*batch())
    assert copies == []


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
