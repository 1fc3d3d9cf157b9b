"""A replica that spans several processes, each with some of its ipus: the program and the bits of one process."""

import os
import signal
import time
import weakref
from unittest.mock import patch

import processes
import pytest
import torch
from torch import nn
from torch.nn import functional

import popdist
import popdist.poptorch
import poptorch
from popengine.run.instances.connections import Tag
from popengine.run.instances.process_group import ProcessGroup
from popengine.run.mailbox import ProcessMailbox

PER_REPLICA = ("norm.running_mean", "norm.running_var")


class Net(nn.Module):
    """Blocks A to D, one on each ipu; D uses B's weight, and gets a value of A's."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)
        self.drop, self.c, self.d = nn.Dropout(0.2), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x, label):
        with poptorch.Block("A"):
            a = self.norm(self.a(x))
        with poptorch.Block("B"):
            b = self.drop(torch.relu(self.b(a)))
        with poptorch.Block("C"):
            c = torch.tanh(self.c(b))
        with poptorch.Block("D"):
            output = self.d(self.norm(functional.linear(c, self.b.weight) + a))
            return output, functional.cross_entropy(output, label)


def batch(call, rows, share=(0, 1)):
    """The rows of a call; `share`: (replica, number of replicas), of which each reads its micro-batches."""
    torch.manual_seed(call)
    x, label = torch.randn(rows, 8), torch.randint(0, 4, (rows,))
    replica, replicas = share
    pick = [value.view(-1, replicas, 2, *value.shape[1:])[:, replica].flatten(0, 1) for value in (x, label)]
    return [value.contiguous() for value in pick]


def options_of(parts, replicas, schedule, accumulation=8):
    alone = parts * replicas == 1
    options = poptorch.Options() if alone else popdist.poptorch.Options(4)
    options.deviceIterations(2 if accumulation > 1 else 16).Training.gradientAccumulation(accumulation)
    options.randomSeed(3).outputMode(poptorch.OutputMode.All).showCompilationProgressBar(False)
    stages = [poptorch.Stage(block).ipu(ipu) for ipu, block in enumerate("ABCD")]
    options.setExecutionStrategy(poptorch.PipelinedExecution(*stages, schedule=schedule))
    return options


def trained(parts=1, replicas=1, local=1, schedule="1f1b", bad_call=-1, interrupted=False):
    """Outputs and losses of some calls, the names of weights without memory, all weights and states, and errors."""
    if parts * replicas > 1:
        popdist.init()
    torch.manual_seed(0)
    model, options = Net(), options_of(parts, replicas, schedule)
    if local > 1:
        options.replicationFactor(local)
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.01, max_grad_norm=0.5)
    executor = poptorch.trainingModel(model, options, optimizer)
    outputs, errors, rows = [], [], 2 * 2 * 8 * max(replicas, local)
    share = (options.Distributed.processId // parts, replicas) if local == 1 else (0, 1)
    for call in range(3):
        x, label = batch(call, rows, share)
        if call == bad_call:
            with pytest.raises((poptorch.Error, KeyboardInterrupt)) as caught:
                if interrupted and popdist.getInstanceIndex() == 1:
                    with patch.object(ProcessMailbox, "send", interrupted_send):
                        executor(x, label)
                executor(x, label if interrupted else label + 9)
            errors.append(str(caught.value) or caught.type.__name__)
        outputs += [value.numpy() for value in executor(x, label)]
    found = {name: value.numpy().copy() for name, value in model.state_dict().items()}
    missing = [name for name, value in model.named_parameters() if value.is_meta]
    for number, each in optimizer.state_dict()["state"].items():
        found[f"state {number}"] = each["exp_avg"].numpy().copy()
    if max(replicas, local) > 1:
        executor.averageRunningStatistics()
        means = model.state_dict()
        found |= {f"mean of {name}": means[name].numpy().copy() for name in PER_REPLICA}
    executor.copyWeightsToHost()
    assert all(
        (found.get(f"mean of {name}", found[name]) == value.numpy()).all()
        for name, value in model.named_buffers()
    )
    assert all((found[name] == value.detach().numpy()).all() for name, value in model.named_parameters())
    executor(*batch(3, rows, share))
    assert missing == [name for name, value in model.named_parameters() if value.is_meta]
    return outputs, missing, found, errors


SEND = ProcessMailbox.send


def interrupted_send(self, place, key, values):
    """In place of `ProcessMailbox.send`: Ctrl-C, while the other process waits for the message."""
    if key[1] == 3:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1.0)  # the main thread sees the signal
    SEND(self, place, key, values)


def assert_equal_to_one_process(ended, parts, **options):
    outputs, _, want, _ = trained(**options)
    assert [each.error for each in ended] == [""] * len(ended)
    for each in ended:
        _, missing, found, _ = each.value
        assert found.keys() == want.keys()
        assert [name for name in found if name not in PER_REPLICA and (found[name] != want[name]).any()] == []
        assert 0 < len(missing) < len(list(Net().parameters()))
    for each in ended[:parts]:
        assert all((one == other).all() for one, other in zip(each.value[0], ended[0].value[0], strict=True))
    if parts == len(ended):
        assert all((one == other).all() for one, other in zip(outputs, ended[0].value[0], strict=True))


@pytest.mark.kind("a part of a replica")
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_replica_in_two_processes_has_the_bits_of_one_process(schedule):
    ended = processes.run(trained, 2, 2, 1, 1, schedule, parts=2)
    assert_equal_to_one_process(ended, 2, schedule=schedule)


def test_two_replicas_in_two_processes_each_have_the_bits_of_one_process():
    ended = processes.run(trained, 4, 2, 2, parts=2)
    assert_equal_to_one_process(ended, 2, local=2)


def test_incomplete_batches_and_models_made_on_meta_have_the_bits_of_one_process():
    # In a process with one thread: two would divide the last micro-batch, which is alone, and change its last bits.
    outputs, weights = processes.run(trained_on_incomplete_batches, 1, "cpu")[0].value
    for ended in processes.run(trained_on_incomplete_batches, 2, "meta", parts=2):
        assert ended.error == ""
        assert all((one == other).all() for one, other in zip(outputs, ended.value[0], strict=True))
        assert all((weights[name] == ended.value[1][name]).all() for name in weights)


def trained_on_incomplete_batches(device):
    popdist.init()
    torch.manual_seed(0)
    with torch.device(device):
        model = poptorch.materialize(Net())
    assert all(value.device.type == device for value in model.parameters())
    options = options_of(popdist.getNumInstancesPerReplica(), 1, "1f1b")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    executor = poptorch.trainingModel(model, options.allowNewShapes(4), optimizer)
    outputs = []
    for call, rows in enumerate((64, 64 - 6, 14, 64)):  # the last micro-batch has 2 of 4 rows
        outputs += [value.numpy() for value in executor(*(value[:rows] for value in batch(call, 64)))]
    return outputs, {name: value.numpy().copy() for name, value in model.state_dict().items()}


def test_the_memory_of_a_message_is_free_when_it_is_sent():
    """All messages of a step were kept to its end, and so the activations of all its micro-batches."""
    for ended in processes.run(alive_before_the_end_of_a_step, 2, parts=2):
        assert ended.error == ""
        assert len(ended.value) == 2 and all(sent > 20 and not alive for sent, alive in ended.value)


def alive_before_the_end_of_a_step():
    popdist.init()
    torch.manual_seed(0)
    send, finish, sent, found = ProcessGroup.send, ProcessMailbox._finish_sends, [], []

    def send_and_record(self, value, peer, tag):
        if tag == Tag.PLACES:
            sent.append(weakref.ref(value))
        return send(self, value, peer, tag)

    def wait_and_finish(self):
        until = time.monotonic() + processes.LIMIT / 2
        while sent and any(value() is not None for value in sent) and time.monotonic() < until:
            time.sleep(0.01)
        if sent:
            found.append((len(sent), sum(value() is not None for value in sent)))
            sent.clear()
        finish(self)

    executor = poptorch.trainingModel(Net(), options_of(2, 1, "1f1b"))
    record = patch.object(ProcessGroup, "send", send_and_record)
    with record, patch.object(ProcessMailbox, "_finish_sends", wait_and_finish):
        executor(*batch(0, 32))
    return found


def test_an_error_in_one_process_is_an_error_in_both_and_changes_nothing():
    ended = processes.run(trained, 2, 2, 1, 1, "1f1b", 1, parts=2)
    assert_equal_to_one_process(ended, 2)
    (first,), (last,) = (each.value[3] for each in ended)
    assert "failed on ipu 3" in last
    assert "another instance failed: instance 1 failed at call" in first


def test_an_interrupt_of_one_process_is_an_error_in_the_other_and_changes_nothing():
    ended = processes.run(trained, 2, 2, 1, 1, "1f1b", 1, True, parts=2)
    assert_equal_to_one_process(ended, 2)
    (first,), (last,) = (each.value[3] for each in ended)
    assert last == "KeyboardInterrupt"
    assert "instance 1 was interrupted at call" in first


def test_processes_of_a_replica_that_get_other_rows_are_an_error():
    ended = processes.run(with_other_rows, 2, parts=2)
    assert all(
        "the instances differ at call 2" in each.error and "batch of 0" in each.error for each in ended
    )


def with_other_rows():
    popdist.init()
    torch.manual_seed(0)
    executor = poptorch.inferenceModel(Net().eval(), options_of(2, 1, "1f1b", 1))
    executor(*batch(0, 32))
    executor(*batch(popdist.getInstanceIndex(), 32))


def test_a_weight_of_the_other_process_is_read_from_state_dict_only_and_predicts():
    for ended, other in zip(processes.run(read_weights, 2, parts=2), ("d.weight", "a.weight"), strict=True):
        assert ended.error == ""
        errors, differing = ended.value
        assert all(f"{other} has no value in this process" in error for error in errors)
        assert "threads per operation" in differing and "1 in instance 0; 2 in instance 1" in differing


def read_weights():
    popdist.init()
    torch.manual_seed(0)
    instance, model = popdist.getInstanceIndex(), Net()
    executor = poptorch.trainingModel(model, options_of(2, 1, "1f1b"))
    executor(*batch(0, 32))
    assert "stage 3 on ipu 3 of instance 1," in str(executor.plan)
    layer, errors = (model.d, model.a)[instance], []
    x, label = batch(1, 32)
    output, _ = poptorch.inferenceModel(model.eval(), options_of(2, 1, "1f1b", 1))(x, label)
    twin = Net().eval()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(
        output, torch.cat([twin(*rows)[0] for rows in zip(x.split(2), label.split(2), strict=True)])
    )
    assert all(torch.equal(value, getattr(twin.d, name)) for name, value in model.d.state_dict().items())
    model.train()
    for read in (lambda: layer.weight.sum().item(), lambda: layer(torch.ones(2, layer.in_features))):
        with pytest.raises(poptorch.Error) as caught:
            read()
        errors.append(str(caught.value))
    doubled = {name: 2 * value for name, value in model.state_dict().items()}
    model.load_state_dict(doubled)
    model.d.load_state_dict({name: 2 * value for name, value in twin.d.state_dict().items()})
    assert all(torch.equal(value, doubled[name]) for name, value in model.state_dict().items())
    executor(*batch(0, 32))
    assert layer.weight.is_meta
    torch.set_num_threads((8, 16)[instance])
    with pytest.raises(poptorch.Error) as caught:
        poptorch.trainingModel(Net(), options_of(2, 1, "1f1b"))(*batch(0, 32))
    return errors, str(caught.value)


def resumed(folder, parts, calls, begun):
    """The weights and optimizer states after so many calls, those before the checkpoint included; whether the weights
    are back in this process without the executor; and the weights after another call of a saved executor."""
    if parts > 1:
        popdist.init()
    torch.manual_seed(begun)  # the weights are those of the checkpoint
    model = Net()
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.01)
    options = options_of(parts, 1, "1f1b")
    executor = poptorch.trainingModel(model, options, optimizer)
    checkpoint = popdist.Checkpoint(folder, every=2)
    assert checkpoint.restore(executor) == begun
    while checkpoint.calls < calls:
        executor(*batch(checkpoint.calls, 32))
        checkpoint.step()
    checkpoint.wait()
    found = {name: value.numpy().copy() for name, value in model.state_dict().items()}
    found |= {name: value.numpy() for name, value in optimizer.state_dict()["ipu_state"].items()}
    file = folder / f"of {parts}" / str(popdist.getInstanceIndex() if parts > 1 else 0)
    executor.save(str(file))
    if parts == 4:
        executor.detachFromDevice()
    else:
        executor.destroy()
    here = {
        name: value.detach().numpy() for name, value in [*model.named_parameters(), *model.named_buffers()]
    }
    assert all((found[name] == value).all() for name, value in here.items())
    executor.destroy()
    again = poptorch.load(str(file))
    again(*batch(calls, 32))
    return found | {f"{name} later": value.numpy() for name, value in again.model.state_dict().items()}


def test_a_checkpoint_of_any_number_of_processes_resumes_in_any_other(tmp_path):
    """Written by four processes with an ipu each, two with two, or one with four: the same bits."""
    resumed(tmp_path / "one", 1, 2, 0)
    ended = processes.run(resumed, 4, tmp_path / "several", 4, 2, 0, parts=4)
    assert [each.error for each in ended] == [""] * 4
    for parts, calls, begun in ((2, 4, 2), (1, 6, 4)):
        whole = resumed(tmp_path / "one", 1, calls, begun)
        if parts > 1:
            ended = processes.run(resumed, parts, tmp_path / "several", parts, calls, begun, parts=parts)
            assert [each.error for each in ended] == [""] * parts
            found = [each.value for each in ended]
        else:
            found = [resumed(tmp_path / "several", 1, calls, begun)]
        for each in found:
            assert each.keys() == whole.keys()
            assert [name for name in whole if (each[name] != whole[name]).any()] == []


def test_the_file_of_an_instance_is_not_loaded_in_another(tmp_path):
    for ended in processes.run(loaded_elsewhere, 2, tmp_path, parts=2):
        assert "the options are those of instance" in ended.error


def loaded_elsewhere(folder):
    popdist.init()
    executor = poptorch.trainingModel(Net(), options_of(2, 1, "1f1b"))
    executor.compileAndExport(str(folder / str(popdist.getInstanceIndex())), *batch(0, 32))
    executor.destroy()
    popdist.synchronize()
    poptorch.load(str(folder / str(1 - popdist.getInstanceIndex())))(*batch(0, 32))


def profiled(folder):
    popdist.init()
    torch.manual_seed(0)
    time.sleep(0.5 * popdist.getInstanceIndex())  # its profile begins later
    model, options = Net(), popdist.poptorch.Options(2).enableProfiling(folder)
    options.deviceIterations(4).Training.gradientAccumulation(8)
    options.randomSeed(3).showCompilationProgressBar(False)
    stages = [poptorch.Stage(*blocks).ipu(ipu) for ipu, blocks in enumerate(("AB", "CD"))]
    options.setExecutionStrategy(poptorch.PipelinedExecution(*stages))
    executor = poptorch.trainingModel(model, options, poptorch.optim.SGD(model.parameters(), lr=0.01))
    for call in range(2):
        executor(*batch(call, 4 * 8 * 2))
    executor.detachFromDevice()


def test_a_report_joins_the_tasks_of_all_instances_on_one_clock(tmp_path):
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "profile.1.pop").write_text("of an earlier run")
    assert [each.error for each in processes.run(profiled, 2, str(tmp_path), parts=2)] == ["", ""]
    report = poptorch.Report(tmp_path)
    runs = {
        (run["step"], run["phase"], run["stage"], run["micro_batch"]): run
        for run in report.trace()
        if run["kind"] in ("forward", "backward")
    }
    assert len(runs) == 8 * 2 * 2 * 8  # steps, phases, stages, micro-batches
    for (step, phase, stage, micro_batch), run in runs.items():
        assert run["ipu"] == run["core"] == stage
        before = runs[step, phase, 1 - stage, micro_batch]
        if stage == (phase == "F"):  # it got the other process's values
            assert before["end"] <= run["start"]
    (figures,) = report.figures()
    assert 0.05 < figures["bubble_measured"] < 1 and 1 / 9 < figures["bubble_apart"] < 1
    assert "instance 0 has ipu 0, instance 1 has ipu 1" in repr(report)
