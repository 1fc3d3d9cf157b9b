"""Where weights are while an executor is attached to an accelerator: `late_device.py`, whose kernels are the CPU's."""

from collections import Counter

import pytest
import torch
from torch import nn

import popdist
import poptorch
from late_device import late_devices
from popengine.profile import load
from popvision.report import summary
from popvision.times import whole_steps

BATCHES = [(torch.randn(16, 4), torch.randint(0, 3, (16,))) for _ in range(3)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.last, self.loss = nn.Linear(6, 3), nn.CrossEntropyLoss()

    def forward(self, x, labels=None):
        with poptorch.Block("first", ipu_id=0):
            hidden = self.norm(self.first(x)).relu()
        with poptorch.Block("last", ipu_id=1):
            output = self.last(hidden)
            return output if labels is None else (output, self.loss(output, labels))


@pytest.fixture
def late(monkeypatch):
    """The device that `options.device("cuda")` finds."""
    with late_devices(monkeypatch) as found:
        yield found[0]


def trainer_of(device, replicas=1, optimizer="AdamW", new_shapes=False, make=Net):
    torch.manual_seed(0)
    model = make()
    options = poptorch.Options().device(device).replicationFactor(replicas)
    options.deviceIterations(max(1, 2 // replicas))
    options.Training.gradientAccumulation(4)
    options.randomSeed(1)
    if new_shapes:
        options.allowNewShapes()
    kind = getattr(poptorch.optim, optimizer)
    return model, poptorch.trainingModel(model, options, kind(model.parameters(), lr=0.05))


def kinds_of(model):
    return {value.device.type for value in model.state_dict().values()}


def calls(trainer, batches=BATCHES):
    """Return all results of calls with some batches."""
    return [value for batch in batches for value in trainer(*batch)]


def assert_equal_on_the_cpu(run, device, **how):
    """Assert that a training on a device has the bits of one on the CPU. Returns: the model on the device

    run: trains with an executor, and returns results; it takes the executor, its model, and whether they are on the CPU
    """
    trained = []
    for place in (device, "cpu"):
        model, trainer = trainer_of(place, **how)
        results = run(trainer, model, place == "cpu")
        trainer.copyWeightsToHost()
        trained.append((model, results))
    (model, results), (other, theirs) = trained
    assert_equal(model, other)
    assert all(map(torch.equal, results, theirs))
    return model


def assert_equal(model, other):
    for (name, value), theirs in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(value.cpu(), theirs), name


def test_weights_and_optimizer_state_live_on_the_device_between_calls_and_stay_the_same_objects(late):
    model, trainer = trainer_of("cuda")
    objects = [*model.parameters(), *model.buffers()]
    trainer(*BATCHES[0])
    assert kinds_of(model) == {"late"}
    addresses = [value.data_ptr() for value in model.state_dict().values()]
    output, loss = trainer(*BATCHES[1])
    assert output.is_cpu and loss.is_cpu
    assert addresses == [value.data_ptr() for value in model.state_dict().values()]
    assert all(
        one is other for one, other in zip(objects, [*model.parameters(), *model.buffers()], strict=True)
    )
    moments = [state["exp_avg"] for state in trainer._optimizer.state.values()]
    assert {value.device.type for value in moments} == {"late"}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("leave", ["copyWeightsToHost", "detachFromDevice", "destroy", "save"])
def test_weights_return_to_the_cpu_and_calls_continue_with_the_same_bits(leave, replicas, late, tmp_path):
    def run(trainer, model, is_cpu):
        results = []
        for batch in BATCHES:
            results += trainer(*batch)
            getattr(trainer, leave)(*[tmp_path / "file"] * (leave == "save"))
            assert kinds_of(model) == {"cpu"}
            states = trainer._optimizer.state.values()
            assert {value.device.type for state in states for value in state.values()} <= {"cpu"}
        return [*results, *trainer(*BATCHES[0])]

    assert_equal_on_the_cpu(run, "cuda", replicas=replicas)


def test_a_call_of_the_users_own_model_with_cpu_tensors_brings_the_weights_back(late):
    model, trainer = trainer_of("cuda")
    trainer(*BATCHES[0])
    with torch.no_grad():
        output = model.eval()(BATCHES[1][0])
    assert output.is_cpu and kinds_of(model) == {"cpu"}
    model.train()
    other, theirs = trainer_of("cpu")
    theirs(*BATCHES[0])
    with torch.no_grad():
        assert torch.equal(other.eval()(BATCHES[1][0]), output)
    other.train()
    assert all(map(torch.equal, trainer(*BATCHES[1]), theirs(*BATCHES[1])))
    trainer.destroy()
    assert not model._forward_pre_hooks


def test_a_second_executor_reads_the_weights_where_they_are(late):
    model, trainer = trainer_of("cuda")
    predict = poptorch.inferenceModel(model, poptorch.Options().device("cuda").deviceIterations(2))
    host = poptorch.inferenceModel(model, poptorch.Options().deviceIterations(2))
    rows = BATCHES[0][0][:8]
    for batch in BATCHES:
        trainer(*batch)
        on_device = predict(rows)
        assert kinds_of(model) == {"late"}
        assert torch.equal(on_device, host(rows))  # the CPU's executor brings them back
        assert kinds_of(model) == {"cpu"}


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "LAMB"])
def test_the_host_waits_once_for_a_call(optimizer, late):
    _, trainer = trainer_of("cuda", optimizer=optimizer)
    for batch in BATCHES[:2]:
        trainer(*batch)
    before = late.waits.copy()
    trainer(*BATCHES[2])
    assert late.waits - before == Counter({"synchronize": 1})


def test_a_checkpoint_of_an_accelerator_has_tensors_of_the_cpu(late, tmp_path):
    model, trainer = trainer_of("cuda")
    checkpoint = popdist.Checkpoint(tmp_path)
    checkpoint.restore(trainer)
    trainer(*BATCHES[0])
    checkpoint.step()
    checkpoint.wait()
    trainer(*BATCHES[1])
    other, theirs = trainer_of("cpu")
    assert popdist.Checkpoint(tmp_path).restore(theirs) == 1
    theirs(*BATCHES[1])
    trainer.copyWeightsToHost()
    assert_equal(model, other)


def test_a_plan_for_other_shapes_is_compiled_while_the_weights_are_on_the_device(late):
    found = []
    for device in ("cuda", "cpu"):
        torch.manual_seed(0)
        model = Net().eval()
        options = poptorch.Options().device(device).deviceIterations(2).allowNewShapes()
        predict = poptorch.inferenceModel(model, options)
        found.append([predict(torch.ones(rows, 4)) for rows in (4, 8, 4)])
    assert all(map(torch.equal, *found))
    assert kinds_of(model) == {"cpu"}


@pytest.mark.parametrize("chosen", ["cuda", ["cuda:0", "cuda:1"], ["cpu", "cuda:0"], ["cuda:1", "cpu"]])
def test_ipus_on_several_devices_have_the_bits_of_the_cpu(chosen, monkeypatch):
    def run(trainer, model, is_cpu):
        results = calls(trainer)
        if not is_cpu:
            names = chosen if isinstance(chosen, list) else ["cuda:0", "cuda:1"]
            places = [str(layer.weight.device) for layer in (model.first, model.last)]
            assert places == [name.replace("cuda", "late") for name in names]
        return results

    with late_devices(monkeypatch, count=2):
        assert_equal_on_the_cpu(run, chosen)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_profile_of_several_devices_has_the_tasks_of_all_on_one_clock(replicas, monkeypatch, tmp_path):
    with late_devices(monkeypatch, count=2 * replicas):
        model, options = Net(), poptorch.Options().device("cuda").replicationFactor(replicas)
        options.Training.gradientAccumulation(4)
        options.enableProfiling(tmp_path)
        trainer = poptorch.trainingModel(model, options, poptorch.optim.SGD(model.parameters(), lr=0.1))
        for batch in [*BATCHES, *BATCHES]:
            trainer(*batch)
        trainer.detachFromDevice()
    profile = load(tmp_path / "training" / "profile.pop")
    computed = Counter((e.ipu, e.replica, e.micro_batch, e.core) for e in profile.events() if e.phase == "F")
    micro_batches = range(4)
    assert {key[:3] for key in computed} == {
        (i, r, m) for i in (0, 1) for r in range(replicas) for m in micro_batches
    }
    assert {key[3] for key in computed} == set(range(2 * replicas))
    assert {
        core: len({(i, r) for i, r, _, at in computed if at == core}) for *_, core in computed
    } == dict.fromkeys(range(2 * replicas), 1)
    assert len(whole_steps(profile)) == profile.facts["steps"] == 6
    for call in profile.calls:
        assert all(
            call.start <= run.start <= run.end <= call.end for run in profile.runs if run.call == call.call
        )
    assert all(row.ns for row in profile.operations)
    text = summary(profile)
    assert "measured bubble" in text
    said = "late:0 has ipu 0, late:1 has ipu 1."
    if replicas > 1:
        pairs = [(replica, ipu) for replica in (0, 1) for ipu in (0, 1)]
        said = ", ".join(f"late:{2 * r + i} has ipu {i} of replica {r}" for r, i in pairs) + "."
    assert f"The ipus are on {2 * replicas} devices: {said}" in text


def test_a_profile_of_several_devices_has_the_memory_of_all_ipus(monkeypatch, tmp_path):
    class Tied(Net):
        def forward(self, x):  # ipu 1 reads a weight of ipu 0
            with poptorch.Block("first", ipu_id=0):
                hidden = self.first(x)
            with poptorch.Block("last", ipu_id=1):
                output = nn.functional.linear(hidden, self.first.weight.T)
                return output, poptorch.identity_loss(output.square(), "mean")

    held = []
    with late_devices(monkeypatch, count=2):
        for device in (["cpu", "cuda"], "cpu"):
            options = poptorch.Options().device(device).enableProfiling(tmp_path / str(device))
            options.Training.gradientAccumulation(4)
            trainer = poptorch.trainingModel(Tied(), options)
            trainer(torch.ones(4, 4))
            trainer.detachFromDevice()
            held.append(load(tmp_path / str(device) / "training" / "profile.pop").memory)
    assert held[0] == held[1] and [row.ipu for row in held[0]] == [0, 1]
    assert [row.weights for row in held[0]] == [4 * (4 * 6 + 6), 4 * 4 * 6]


@pytest.mark.parametrize("chosen", ["cuda", ["cuda:1", "cuda:0"]])
def test_replicas_on_devices_follow_what_the_user_writes_between_calls(chosen, monkeypatch):
    def run(trainer, model, is_cpu):
        results = [*trainer(*BATCHES[0])]
        with torch.no_grad():
            model.first.weight.data.mul_(0.5)
            model.norm.running_mean.fill_(0.25)
        model.last.load_state_dict({"weight": torch.ones(3, 6), "bias": torch.zeros(3)})
        for state in trainer._optimizer.state.values():
            state["exp_avg"].mul_(2.0)
        results += trainer(*BATCHES[1])
        places = [str(layer.weight.device) for layer in (model.first, model.last)]
        trainer.averageRunningStatistics()
        results += trainer(*BATCHES[2])
        trainer.copyWeightsToHost()
        results += calls(trainer, BATCHES[:2])
        trainer.copyWeightsToHost()
        if not is_cpu:
            assert places == (["late:0", "late:1"] if chosen == "cuda" else ["late:1", "late:0"])
            assert trainer.getLatency()[2] > 0
        return results + [value for state in trainer._optimizer.state.values() for value in state.values()]

    with late_devices(monkeypatch, count=4):  # ipu i of replica r is on cuda:2r+i, or as the list says
        assert_equal_on_the_cpu(run, chosen, replicas=2)


class Unsplit(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))

    def forward(self, x, labels):
        output = self.model(x)
        return output, nn.functional.cross_entropy(output, labels)


def test_replicas_of_one_ipu_run_captured_steps_on_devices_of_their_own(monkeypatch):
    def run(trainer, model, is_cpu):
        results = calls(trainer)
        if not is_cpu:
            assert [each.replays for each in late[:2]] == [2, 2]  # of three steps
        return results

    with late_devices(monkeypatch, count=2) as late:
        assert_equal_on_the_cpu(run, "cuda", replicas=2, make=Unsplit)


def test_the_last_micro_batch_may_have_fewer_rows_on_several_devices(monkeypatch):
    twice = [torch.cat([value, value]) for value in BATCHES[0]]
    batches = [[value[:rows] for value in twice] for rows in (32, 30, 18, 32)]  # of a micro-batch of 4 rows
    with late_devices(monkeypatch, count=2):
        assert_equal_on_the_cpu(lambda trainer, *_: calls(trainer, batches), "cuda", new_shapes=True)


class Scaled(Net):
    """Each replica has a value of `scales`."""

    def __init__(self):
        super().__init__()
        self.scales = nn.Parameter(torch.tensor([[1.0], [2.0]]))

    def forward(self, x, labels):
        with poptorch.Block("first", ipu_id=0):
            hidden = self.first(x) * self.scales
        with poptorch.Block("last", ipu_id=1):
            output = self.last(hidden * self.scales)
            return output, self.loss(output, labels)


@pytest.mark.parametrize("chosen", ["cuda", ["cuda:0", "cuda:1"]])
def test_a_parameter_with_a_value_for_each_replica_may_be_on_any_device(chosen, monkeypatch, caplog):
    def run(trainer, model, is_cpu):
        groups = poptorch.CommGroupType.NoGrouping, 0, poptorch.VariableRetrievalMode.OnePerGroup
        trainer.per_replica_params["scales"] = groups
        return calls(trainer)

    caplog.set_level("INFO", "popengine")
    with late_devices(monkeypatch, count=4):
        model = assert_equal_on_the_cpu(run, chosen, replicas=2, make=Scaled)
    assert not torch.equal(*model.scales - torch.tensor([[0.0], [1.0]]))
    assert ("replicas share devices: parameters have a value for each" in caplog.text) == (chosen == "cuda")


class Grouped(Net):
    def __init__(self):
        super().__init__()
        del self.norm
        self.grouped = poptorch.GroupedBatchNorm2d(6, group_size=2)

    def norm(self, value):
        return self.grouped(value[..., None, None])[..., 0, 0]


@pytest.mark.parametrize("chosen", ["cuda", ["cuda:0", "cuda:1"]])
def test_layers_that_gather_over_replicas_may_be_on_any_device(chosen, monkeypatch, caplog):
    caplog.set_level("INFO", "popengine")
    with late_devices(monkeypatch, count=4):
        assert_equal_on_the_cpu(lambda trainer, *_: calls(trainer), chosen, replicas=4, make=Grouped)
    assert ("replicas share devices: layers gather values of several" in caplog.text) == (chosen == "cuda")


def test_a_list_of_devices_is_checked(monkeypatch):
    for wrong in ("gpu", "cuda:0", [], ["cuda:x"], ["cpu:0"]):
        with pytest.raises(AssertionError, match="device takes one of 'cpu', 'cuda', 'xpu'"):
            poptorch.Options().device(wrong)
    with late_devices(monkeypatch, count=2):
        for devices, message in (
            (["cuda:2", "cpu"], "there is no cuda:2"),
            (["cuda:0", "xpu:0"], "GPUs of two kinds"),
            (["cuda:1"], "the model uses ipu 1, and a replica has 1 ipus"),
        ):
            _, trainer = trainer_of(devices)
            with pytest.raises(poptorch.Error, match=message):
                trainer(*BATCHES[0])


def test_a_file_does_not_say_on_which_devices_a_model_runs(monkeypatch, tmp_path):
    with late_devices(monkeypatch, count=2):
        for device, other in (("cpu", "cuda"), (["cuda:0", "cuda:1"], ["cpu", "cpu"])):
            model, trainer = trainer_of(device)
            trainer(*BATCHES[0])
            trainer.save(tmp_path / "model.poptorch")
            again = poptorch.load(tmp_path / "model.poptorch", lambda opts, other=other: opts.device(other))
            for each in (trainer, again):
                each(*BATCHES[1])
                each.copyWeightsToHost()
            assert_equal(model, again.model)
