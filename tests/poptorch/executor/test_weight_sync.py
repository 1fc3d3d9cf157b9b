"""The two copies of the weights: when they move between host and devices, and when they don't."""

import pytest
import torch
from executor_models import Counting, Dropping, Outer, Trained, batch, options, trainer
from torch import nn

import poptorch
from poptorch import CommGroupType, VariableRetrievalMode


def host(model):
    return model.layer.weight.detach().clone()


def test_the_host_sees_training_at_its_next_look():
    executor, model = trainer()
    before = host(model)
    executor(*batch())
    assert executor._weights.host_is_stale
    assert not torch.equal(host(model), before)
    assert not executor._weights.host_is_stale


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
    original = validation._plans.engine.write

    def count(weights):
        nonlocal uploads
        uploads += 1
        original(weights)

    validation._plans.engine.write = count
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


# ---- several executors of a model ------------------------------------------------------------------------


def zeros(model):
    return {name: torch.zeros_like(value) for name, value in model.state_dict().items()}


def write_zeros(executor, model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    executor.copyWeightsToDevice()


@pytest.mark.parametrize("upload", [lambda e, m: e.load_state_dict(zeros(m)), write_zeros])
@pytest.mark.parametrize("by", ["training", "inference"])
def test_an_upload_is_seen_by_the_models_executors_for_inference(upload, by):
    # They computed with the old weights until the next training call: restore the best, then evaluate.
    executor, model = trainer()
    first, second = (poptorch.inferenceModel(model, options()) for _ in range(2))
    x, target = batch()
    if by == "training":
        executor(x, target)
    assert not torch.equal(first(x), torch.zeros(2, 2))
    assert not torch.equal(second(x), torch.zeros(2, 2))
    upload(executor if by == "training" else first, model)
    for _ in range(2):
        assert torch.equal(first(x), torch.zeros(2, 2))
        assert torch.equal(second(x), torch.zeros(2, 2))


def test_uploads_are_not_handed_back_and_forth(monkeypatch):
    executor, model = trainer()
    both = [poptorch.inferenceModel(model, options()) for _ in range(2)]
    x, target = batch()
    executor(x, target)
    for each in both:
        each(x)
    uploads = []
    for each in both:
        original = each._plans.engine.write
        monkeypatch.setattr(
            each._plans.engine, "write", lambda weights, write=original: uploads.append(write(weights))
        )
    executor(x, target)
    for _ in range(3):
        for each in both:
            each(x)
    assert len(uploads) == 2


def test_inference_sees_what_was_trained_until_destroy():
    executor, model = trainer()
    validation = poptorch.inferenceModel(model, options())
    x, target = batch()
    before = validation(x)
    executor(x, target)
    executor.destroy()
    assert not torch.equal(validation(x), before)
    torch.testing.assert_close(validation(x), model(x).detach())


@pytest.mark.parametrize("related", [lambda m: m.layer, Outer, lambda m: nn.Sequential(m.layer)])
def test_inference_of_a_part_or_a_wrapper_follows_training(related):
    # Only executors of the very same module did.
    executor, model = trainer()
    other = related(model)
    validation = poptorch.inferenceModel(other, options())
    x, target = batch()
    before = validation(x)
    for _ in range(2):
        executor(x, target)
        now = validation(x)
        assert not torch.equal(now, before)
        before = now
    torch.testing.assert_close(now, model(x).detach())


def test_a_trainer_wrapped_later_is_followed_too():
    model = Trained()
    validation = poptorch.inferenceModel(model, options())
    x, target = batch()
    before = validation(x)
    trainer(model)[0](x, target)
    assert not torch.equal(validation(x), before)


def test_an_upload_to_inference_leaves_what_was_trained():
    executor, model = trainer()
    validation = poptorch.inferenceModel(model, options())
    x, target = batch()
    executor(x, target)
    validation(x)
    executor(x, target)
    validation.copyWeightsToDevice()
    trained = model.layer.weight.detach().clone()
    executor(x, target)
    twin, other = trainer()
    for _ in range(3):
        twin(x, target)
    assert torch.equal(model.layer.weight, other.layer.weight)
    assert not torch.equal(trained, model.layer.weight)


def test_two_trainers_that_share_a_layer_are_one_warning(caplog):
    executor, model = trainer()
    x, target = batch()
    executor(x, target)

    class Other(Trained):
        def __init__(self):
            super().__init__()
            self.layer = model.layer

    other, _ = trainer(Other())
    (message,) = caplog.messages
    assert message.startswith("another executor trains layer.weight, layer.bias, too")
    assert "fix:" in message
    newest = model.layer.weight.detach().clone()
    other.compile(x, target)
    other.copyWeightsToHost()
    assert torch.equal(model.layer.weight, newest)  # it began with what the first had trained
    other(x, target)
    executor(x, target)
    assert len(caplog.messages) == 1


# ---- what is changed on the host after compilation -------------------------------------------------------


def test_weights_written_on_the_host_without_an_upload_are_one_warning(caplog):
    executor, model = trainer()
    x, target = batch()
    executor(x, target)
    executor(x, target)
    assert model.state_dict()
    executor(x, target)
    assert caplog.messages == []
    model.load_state_dict(zeros(model))
    executor(x, target)
    (message,) = caplog.messages
    assert message.startswith(
        "layer.weight, layer.bias changed on the host, and the compiled program uses the values"
    )
    assert "copyWeightsToDevice()" in message
    model.load_state_dict(zeros(model))
    executor(x, target)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    "write",
    [
        lambda m: m.load_state_dict(zeros(m)),
        lambda m: m.load_state_dict(zeros(m), assign=True),
        lambda m: nn.init.zeros_(m.layer.weight),
        lambda m: setattr(m.layer.weight, "data", torch.zeros(2, 3)),
        lambda m: setattr(m.layer, "weight", nn.Parameter(torch.zeros(2, 3))),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_each_way_to_write_on_the_host_is_seen_and_an_upload_answers_it(caplog, write, training):
    model = Trained()
    wrap = poptorch.trainingModel if training else poptorch.inferenceModel
    executor, told = wrap(model, options()), wrap(Trained(), options())
    inputs = batch() if training else batch()[:1]
    for each in (executor, told):
        each(*inputs)
    caplog.clear()
    write(model)
    executor.copyWeightsToDevice()
    executor(*inputs)
    assert caplog.messages == []
    write(told.model)
    told(*inputs)
    (message,) = caplog.messages
    assert "layer.weight" in message
    assert "changed on the host" in message


def test_weights_written_before_devices_are_taken_again_are_used_without_a_word(caplog):
    executor, model = trainer(lr=0.0)
    x, target = batch()
    executor(x, target)
    executor.detachFromDevice()
    model.load_state_dict(zeros(model))
    assert torch.equal(executor(x, target)[0], torch.zeros(2, 2))
    assert caplog.messages == []


@pytest.mark.parametrize(
    "change", [lambda m: m.half(), lambda m: m.layer.double(), lambda m: m.to(torch.bfloat16)]
)
@pytest.mark.parametrize("training", [True, False])
def test_another_dtype_after_compilation_is_refused_and_can_be_taken_back(change, training):
    # Training went on in float32, and copies to the host rounded.
    model = Trained()
    executor = (poptorch.trainingModel if training else poptorch.inferenceModel)(model, options())
    inputs = batch() if training else batch()[:1]
    executor(*inputs)
    change(model)
    for use in (lambda: executor(*inputs), executor.copyWeightsToDevice):
        with pytest.raises(
            poptorch.Error, match=r"layer.weight has the type torch\..* compiled for torch.float32"
        ) as error:
            use()
        assert "fix:" in str(error.value)
    model.float()
    executor.copyWeightsToDevice()
    executor(*inputs)
    change(model)
    executor.destroy()
    executor(*(value.to(model.layer.weight.dtype) for value in inputs))


def test_a_layer_frozen_after_compilation_is_one_warning(caplog):
    executor, model = trainer()
    x, target = batch()
    executor(x, target)
    model.layer.requires_grad_(False)
    before = host(model)
    for _ in range(2):
        executor(x, target)
    (message,) = caplog.messages
    assert message.startswith("layer.weight, layer.bias was frozen after the compilation")
    assert "destroy()" in message
    assert not torch.equal(host(model), before)


def test_a_layer_frozen_while_no_devices_are_held_is_a_warning_too(caplog):
    executor, model = trainer()
    executor(*batch())
    executor.detachFromDevice()
    model.layer.bias.requires_grad_(False)
    executor(*batch())
    assert "layer.bias was frozen after the compilation" in caplog.text
    executor.destroy()
    caplog.clear()
    bias = model.layer.bias.detach().clone()
    executor(*batch())
    assert caplog.messages == []
    assert torch.equal(model.layer.bias, bias)


def test_a_layer_made_trainable_after_compilation_is_one_warning(caplog):
    model = Trained()
    model.layer.bias.requires_grad_(False)
    executor, _ = trainer(model)
    executor(*batch())
    model.layer.bias.requires_grad_(True)
    executor(*batch())
    (message,) = caplog.messages
    assert message.startswith("layer.bias was made trainable after the compilation")


@pytest.mark.parametrize("training", [True, False])
def test_a_layer_replaced_after_compilation_is_one_warning(caplog, training):
    model = Trained()
    executor = (poptorch.trainingModel if training else poptorch.inferenceModel)(model, options())
    inputs = batch() if training else batch()[:1]
    executor(*inputs)
    caplog.clear()
    model.layer = nn.Linear(3, 2)
    executor(*inputs)
    executor(*inputs)
    (message,) = caplog.messages
    assert message.startswith("layer has another layer in its place since the compilation")
    executor.destroy()
    executor(*inputs)
    assert len(caplog.messages) == 1


def test_a_layer_of_another_shape_in_the_place_of_a_compiled_one_is_refused():
    executor, model = trainer()
    x, target = batch()
    executor(x, target)
    model.layer = nn.Sequential(nn.Linear(3, 2))
    with pytest.raises(poptorch.Error, match=r"the model has lost layer\.weight"):
        executor(x, target)
    model.layer = nn.Linear(3, 5)
    with pytest.raises(poptorch.Error, match=r"layer.weight has the shape \[5, 3\] now, and .*\[2, 3\]"):
        executor(x, target)


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


def test_a_grouping_may_be_written_as_a_tuple():
    # As programs do.
    model = PerReplica(2)
    executor = poptorch.trainingModel(
        model, options(replicas=4), poptorch.optim.SGD(model.parameters(), lr=1.0)
    )
    executor.per_replica_params["weight"] = (CommGroupType.Consecutive, 2, VariableRetrievalMode.OnePerGroup)
    executor(torch.tensor([1.0, 2.0, 4.0, 8.0]))
    assert torch.equal(model.weight.detach()[:, 0], torch.tensor([1.0 - 3 / 4, 2.0 - 12 / 4]))


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("weight", (CommGroupType.All, 1), "fix:"),
        ("weight", "all", "fix:"),
        ("weight", (1, 1, 1), "takes a poptorch.CommGroupType"),
        ("wait", (CommGroupType.All, 1, VariableRetrievalMode.OnePerGroup), "use one of weight"),
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


def test_a_named_buffer_that_was_uploaded_is_no_unused_change(caplog):
    model = Offset()
    executor = poptorch.inferenceModel(model, options().updatableNamedBuffers(["offset"]))
    other = poptorch.inferenceModel(model, options())
    assert executor(torch.ones(1)) == other(torch.ones(1)) == 2
    with torch.no_grad():
        model.offset.fill_(5.0)
    executor.copyNamedBuffersToDevice()
    assert executor(torch.ones(1)) == other(torch.ones(1)) == 6
    assert caplog.messages == []
    with torch.no_grad():
        model.scale.fill_(5.0)
    executor(torch.ones(1))
    assert "scale changed on the host" in caplog.text


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
