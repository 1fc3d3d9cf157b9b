"""A replica that spans several processes, each with some of its ipus: batches, checkpoints, reports, errors.

`test_who_writes_and_reads.py` has what the program does between calls.
"""

import gc
import time
import weakref
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import processes
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import popdist
import popdist.poptorch
import poptorch
from popengine.environment import WAIT_LIMIT
from popengine.run.instances.connections import Tag
from popengine.run.instances.process_group import ProcessGroup
from popengine.run.mailbox import ProcessMailbox


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


def batch(call, rows):
    torch.manual_seed(call)
    return torch.randn(rows, 8), torch.randint(0, 4, (rows,))


def options(accumulation=8, ipus=4, iterations=2):
    found = popdist.poptorch.Options(ipus).deviceIterations(iterations)
    found.Training.gradientAccumulation(accumulation)
    found.randomSeed(3).outputMode(poptorch.OutputMode.All).showCompilationProgressBar(False)
    stages = [
        poptorch.Stage(*"ABCD"[4 // ipus * ipu : 4 // ipus * (ipu + 1)]).ipu(ipu) for ipu in range(ipus)
    ]
    return found.setExecutionStrategy(poptorch.PipelinedExecution(*stages))


def trainer(model, **how):
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.01)
    return poptorch.trainingModel(model, options(**how), optimizer)


def arrays(values):
    return {name: value.detach().numpy().copy() for name, value in values.items()}


def assert_same_bits(ended, whole):
    """The arrays that each process returns are those of a single process."""
    for each in ended:
        assert each.error == "" and each.value.keys() == whole.value.keys(), each.error
        assert [name for name, value in whole.value.items() if (each.value[name] != value).any()] == []


def trained_on_incomplete_batches(device):
    popdist.init()
    torch.manual_seed(0)
    with torch.device(device):
        model = poptorch.materialize(Net())
    assert all(value.device.type == device for value in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    executor = poptorch.trainingModel(model, options().allowNewShapes(4), optimizer)
    outputs = []
    for call, rows in enumerate((64, 64 - 6, 14, 64)):  # the last micro-batch has 2 of 4 rows
        outputs += executor(*(value[:rows] for value in batch(call, 64)))
    return arrays(dict(enumerate(outputs)) | model.state_dict())


def test_incomplete_batches_and_models_made_on_meta_have_the_bits_of_one_process():
    (whole,) = processes.run(trained_on_incomplete_batches, 1, "cpu")
    assert_same_bits(processes.run(trained_on_incomplete_batches, 2, "meta", parts=2), whole)


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

    record = patch.object(ProcessGroup, "send", send_and_record)
    with record, patch.object(ProcessMailbox, "_finish_sends", wait_and_finish):
        trainer(Net())(*batch(0, 32))
    return found


# ---- checkpoints and reports -----------------------------------------------------------------------------------


def resumed(folder, calls, begun):
    """The weights and optimizer states after so many calls, those before the checkpoint included, and the weights after
    another call of a saved executor. The weights are back in this process when the executor has gone."""
    popdist.init()
    torch.manual_seed(begun)  # the weights are those of the checkpoint
    model = Net()
    executor = trainer(model)
    checkpoint = popdist.Checkpoint(folder, every=2)
    assert checkpoint.restore(executor) == begun
    while checkpoint.calls < calls:
        executor(*batch(checkpoint.calls, 32))
        checkpoint.step()
    checkpoint.wait()
    found = arrays(model.state_dict() | executor._optimizer.state_dict()["ipu_state"])
    parts = popdist.getNumInstances()
    file = folder / f"of {parts}" / str(popdist.getInstanceIndex())
    executor.save(str(file))
    if parts == 4:
        executor.detachFromDevice()
    else:
        executor.destroy()
    here = arrays(dict(model.named_parameters()) | dict(model.named_buffers()))
    assert all((found[name] == value).all() for name, value in here.items())
    executor.destroy()
    again = poptorch.load(str(file))
    again(*batch(calls, 32))
    return found | {f"{name} later": value for name, value in arrays(again.model.state_dict()).items()}


def test_a_checkpoint_of_any_number_of_processes_resumes_in_any_other(tmp_path):
    """Written by four processes with an ipu each, two with two, or one with four: the same bits."""
    for parts, calls, begun in ((4, 2, 0), (2, 4, 2), (1, 6, 4)):
        (whole,) = processes.run(resumed, 1, tmp_path / "one", calls, begun)
        ended = processes.run(resumed, parts, tmp_path / "several", calls, begun, parts=parts)
        assert_same_bits(ended, whole)


def profiled(folder):
    popdist.init()
    torch.manual_seed(0)
    time.sleep(0.5 * popdist.getInstanceIndex())  # its profile begins later
    found = options(ipus=2, iterations=4).enableProfiling(folder)
    executor = poptorch.trainingModel(Net(), found)
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


# ---- errors ----------------------------------------------------------------------------------------------------


@contextmanager
def errors(found):
    """Add the text of an error inside the `with`, or "none"."""
    try:
        yield
        found.append("none")
    except poptorch.Error as error:
        found.append(str(error))


def refused(folder):
    """The errors of each process."""
    popdist.init()
    instance, found, rows = popdist.getInstanceIndex(), [], batch(0, 32)
    with errors(found):  # [0] an optimizer of another model in one process
        model = Net()
        strange = model if instance else Net()
        poptorch.trainingModel(model, options(), poptorch.optim.SGD(strange.parameters(), lr=0.1))(*rows)
    with errors(found):  # [1] one process can't make its engine
        refuse = patch("popengine.run.engine.RowFunctions", side_effect=poptorch.Error("no memory"))
        with nullcontext() if instance else refuse:
            torch.manual_seed(0)
            trainer(Net())(*rows)
    for device in ("cpu", "meta"):
        with errors(found):  # [2], [3] without torch.manual_seed
            torch.manual_seed(instance)
            with torch.device(device):
                model = poptorch.materialize(Net())
            trainer(model)(*rows)
    torch.manual_seed(0)
    model = Net()
    with errors(found):  # [4] the executor has gone, and no process can read the weights of others
        trainer(model)(*rows)
        gc.collect()
        model.state_dict()
    model = Net()
    executor = trainer(model)
    executor(*rows)
    assert "stage 3 on ipu 3 of instance 1," in str(executor.plan)
    layer = (model.d, model.a)[instance]
    with errors(found):  # [5] and [6] read a weight of the other process
        layer.weight.sum().item()
    with errors(found):
        layer(torch.ones(2, layer.in_features))
    with errors(found):  # [7] the processes get different rows
        executor(*batch(instance, 32))
    torch.manual_seed(0)
    with errors(found):  # [8] and have different numbers of threads
        torch.set_num_threads((8, 16)[instance])
        trainer(Net())(*rows)
    torch.set_num_threads(1)
    with errors(found):  # [9] each loads the other's file
        trainer(Net()).compileAndExport(str(folder / str(instance)), *rows)
        popdist.synchronize()
        poptorch.load(str(folder / str(1 - instance)))(*rows)
    return found


def test_an_error_in_one_process_of_a_replica_is_an_error_in_all_and_half_a_model_is_refused(tmp_path):
    first, second = processes.run(refused, 2, tmp_path, parts=2)
    assert [first.error, second.error] == ["", ""]
    texts = list(zip(first.value, second.value, strict=True))
    assert "parameters" in texts[0][0] and "instance 0 failed" in texts[0][1]
    assert "no memory" in texts[1][0] and "instance 0 failed" in texts[1][1]
    assert "d.weight has no value in this process" in texts[5][0]
    assert "a.weight has no value in this process" in texts[6][1]
    for number, *words in (
        (2, "the instances differ at compilation", "a.weight"),
        (3, "the instances differ at compilation", "drawn from"),
        (4, "no executor of the model is attached"),
        (5, "has no value in this process"),
        (6, "has no value in this process"),
        (7, "the instances differ at call 2", "batch of 0"),
        (8, "threads per operation", "1 in instance 0; 2 in instance 1"),
        (9, "the options are those of instance"),
    ):
        assert all(word in text for word in words for text in texts[number]), (number, texts[number])


def one_reads():
    popdist.init()
    torch.manual_seed(0)
    model, found = Net(), []
    executor = trainer(model)
    executor(*batch(0, 32))
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
    assert "by state_dict(), which all instances must call" in first.value[0]
