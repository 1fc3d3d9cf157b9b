"""Ipus in processes: who writes or reads a weight, a buffer, a state, when, and with which executors around it.

One program makes event after event, with calls of a trainer, of a second one that shares layers, and of a predictor in
between. All processes make an event: the bits of one process. A single process makes it: an error in all processes that
names the weight; when the others have made it, too, the bits of one process. One process reads: its values are right.
"""

import io
import os
import signal
import time
from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import processes
import pytest
import torch
from torch import nn
from torch.nn import functional

import popdist
import popdist.poptorch
import poptorch
from popengine.run.mailbox import ProcessMailbox


class Net(nn.Module):
    """Blocks A to D, on four ipus. BatchNorm on ipus 0 and 2; values that are conjugated, also in a
    buffer; a head of training only; layers of evaluation only, and that forward does not read; a weight that two ipus
    use, and a layer that `moved` moves to another ipu."""

    def __init__(self):
        super().__init__()
        self.moved = False
        self.a, self.norm1, self.b = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)
        self.drop, self.c, self.norm2 = nn.Dropout(0.2), nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.d, self.auxiliary, self.evaluated = nn.Linear(16, 4), nn.Linear(16, 4), nn.Linear(4, 4)
        self.register_buffer("phase", torch.full((8,), 0.6 + 0.8j).conj())
        self.unread, self.mixed, self.moving = nn.LSTM(4, 4), nn.LSTM(4, 4, bias=False), nn.Linear(16, 16)

    def forward(self, x, label):
        output, loss = self.values(x, label)
        with poptorch.Block("D"):
            return output, poptorch.identity_loss(loss, reduction="none")

    def values(self, x, label):
        with poptorch.Block("A"):
            a = self.norm1(self.a(x))
        with poptorch.Block("B"):
            b = self.drop(torch.relu(self.b(a)))
            b = self.moving(b) if not self.moved else b
            b = torch.view_as_complex(b.unflatten(1, (8, 2))).conj()
        with poptorch.Block("C"):
            b = torch.view_as_real(b * self.phase).flatten(1)
            b = self.moving(b) if self.moved else b
            c = self.mixed(self.norm2(torch.tanh(self.c(b))).view(-1, 4, 4))[0].flatten(1)
            auxiliary = self.auxiliary(c) if self.training else None
        with poptorch.Block("D"):
            output = self.d(functional.linear(c, self.b.weight) + a)
            output = output if self.training else self.evaluated(output)
            loss = functional.cross_entropy(output, label)
            if auxiliary is not None:
                loss = loss + 0.3 * functional.cross_entropy(auxiliary, label)
            return output, loss


class Second(nn.Module):
    """Trains a layer of its own on the outputs of a network, of which it also changes the running statistics."""

    def __init__(self, net):
        super().__init__()
        self.net, self.own = net, nn.Linear(4, 4)

    def forward(self, x, label):
        output, _ = self.net.values(x, label)
        with poptorch.Block("D"):
            return output, functional.cross_entropy(self.own(output.detach()), label)


class Program:
    """The model and its executors: a trainer, and with `others` a predictor and (2) a second trainer."""

    def __init__(self, optimizer, schedule, others):
        self.schedule, self.calls, self.saved = schedule, 0, {}
        self.model = model = Net()
        self.optimizer = optimizer(model.parameters(), lr=0.01)
        self.trainer = poptorch.trainingModel(model, self.options(8), self.optimizer)
        self.executors = {self.trainer: True}  # and whether each trains
        if others == 2:
            second = Second(model)
            sgd = poptorch.optim.SGD(second.own.parameters(), lr=0.1)
            self.executors[poptorch.trainingModel(second, self.options(8), sgd)] = True
        if others:
            self.executors[poptorch.inferenceModel(model, self.options(1))] = False

    def options(self, accumulation):
        options = popdist.poptorch.Options(4).deviceIterations(8 // accumulation)
        options.Training.gradientAccumulation(accumulation)
        options.randomSeed(3).outputMode(poptorch.OutputMode.All).showCompilationProgressBar(False)
        stages = [poptorch.Stage(block).ipu(ipu) for ipu, block in enumerate("ABCD")]
        strategy = poptorch.PipelinedExecution(*stages, schedule=self.schedule)
        return options.setExecutionStrategy(strategy)

    def batch(self):
        """The rows of this process's replica, of [8 micro-batches, replicas, 2 rows]."""
        data, rows = torch.Generator().manual_seed(self.calls), (8, popdist.getNumTotalReplicas(), 2)
        values = torch.randn(*rows, 8, generator=data), torch.randint(0, 4, rows, generator=data)
        return [value[:, popdist.getReplicaIndexOffset()].flatten(0, 1) for value in values]

    def call(self):
        """The outputs of a call of each executor."""
        outputs = []
        for executor, trains in self.executors.items():
            self.model.train(trains)
            outputs += [value.numpy().tobytes() for value in executor(*self.batch())]
        self.calls += 1
        self.model.train()
        return outputs

    def states(self):
        return {n: bytes_of(state) for n, state in self.optimizer.state_dict()["state"].items() if state}


def bytes_of(values):
    return {
        name: value.detach().resolve_conj().numpy().tobytes()
        for name, value in values.items()
        if torch.is_tensor(value)
    }


# ---- events: functions of a program ----------------------------------------------------------------------------


@torch.no_grad()
def multiply_weights(program):
    for weight in program.model.parameters():
        weight.mul_(0.9)


@torch.no_grad()
def write_first_weight(program):
    program.model.a.weight[0] += 1


@torch.no_grad()
def write_last_weight(program):
    program.model.d.weight.add_(0.1)


def assign_data(program):
    program.model.c.weight.data = torch.full((16, 16), 0.1)
    program.model.a.weight.data = torch.full((16, 8), 0.1)


def load(program):
    program.model.load_state_dict(program.saved["model"])


def load_part(program):
    program.model.d.load_state_dict({"weight": torch.full((4, 16), 0.2), "bias": torch.ones(4)})


def draw_weights(program):
    torch.manual_seed(11)
    for layer in (program.model.d, program.model.a, program.model.norm2, program.model.unread):
        layer.reset_parameters()
    with torch.no_grad():
        functional.dropout(program.model.c.weight, 0.1, inplace=True)
        program.model.b.weight.normal_(0, 0.1)
    nn.init.kaiming_normal_(program.model.moving.weight)
    return {"random state": torch.get_rng_state().tolist()}


def write_buffers(program):
    program.model.norm1.running_mean.add_(1)
    program.model.norm2.running_var.mul_(2)


def replace_buffer(program):
    program.model.norm2.running_mean = torch.full((16,), 0.1)


def reset_buffers(program):
    program.model.norm2.reset_running_stats()


def load_optimizer(program):
    program.optimizer.load_state_dict(program.saved["optimizer"])


def change_rate(program):
    program.optimizer.param_groups[0]["lr"] = 0.1 / (10 + program.calls)
    program.trainer.setOptimizer(program.optimizer)


def change_random_state(program):
    program.trainer.rng_state = [7, 3 * program.calls]


def double_states(program):
    for state in filter(None, program.optimizer.state.values()):
        state["exp_avg"].mul_(2)


def move_layer(program):
    program.model.moved = not program.model.moved


def share_memory(program):
    program.model.share_memory()


def fetch_and_write(program):
    program.trainer.copyWeightsToHost()
    for weight in program.model.parameters():
        weight.data.mul_(1.1)
    torch.manual_seed(12)
    nn.init.orthogonal_(program.model.moving.weight)  # skips weights without memory
    return bytes_of(dict(program.model.named_parameters()))


def average(program):
    program.trainer.averageRunningStatistics()


def save(program):
    model, optimizer = program.model.state_dict(), program.optimizer.state_dict()
    file = io.BytesIO()
    torch.save([model, optimizer], file)
    program.saved["model"], program.saved["optimizer"] = torch.load(io.BytesIO(file.getvalue()))
    return bytes_of(model) | program.states()


def reload(program):
    """A state that is read before weights are written is that from before."""
    before = {name: value.clone() for name, value in program.model.state_dict().items()}
    multiply_weights(program)
    program.model.load_state_dict(before)
    program.optimizer.load_state_dict(program.optimizer.state_dict())


def read_weights(program):
    return bytes_of(program.model.state_dict())


def read_tied_weight(program):
    return bytes_of(nn.ModuleDict({"inside": program.model.b}).state_dict())


def read_optimizer(program):
    return program.states()


def detach(program):
    for executor in program.executors:
        executor.detachFromDevice()
    return bytes_of(dict(program.model.named_parameters()))


def fail(program):
    """Only the last process of a replica has the labels."""
    x, label = program.batch()
    with pytest.raises(poptorch.Error, match=r"failed on ipu 3|another instance failed: instance \d failed"):
        program.trainer(x, label + 9)


def interrupt(program):
    """Ctrl-C in the second process, while the first one waits for its message."""
    send, (kind, text) = ProcessMailbox.send, (poptorch.Error, "instance 1 was interrupted at call")

    def interrupt_and_send(self, place, key, values):
        if key[1] == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1.0)  # the main thread sees the signal
        send(self, place, key, values)

    if popdist.getNumInstancesPerReplica() > 1:
        signals = nullcontext()
        if popdist.getInstanceIndex() == 1:
            signals, kind, text = (
                patch.object(ProcessMailbox, "send", interrupt_and_send),
                KeyboardInterrupt,
                "",
            )
        with signals, pytest.raises(kind, match=text):
            program.trainer(*program.batch())


WRITES = (
    multiply_weights, write_first_weight, write_last_weight, assign_data, load, load_part, draw_weights,
    write_buffers, replace_buffer, reset_buffers, load_optimizer, change_rate, change_random_state,
)  # fmt: skip
READS = read_weights, read_tied_weight, read_optimizer
OTHERS = (
    detach, fail, interrupt, fetch_and_write, average, reload, move_layer, share_memory, double_states, save,
)  # fmt: skip


def script(whole):
    """Pairs of an event and the process that makes it: 0, -1 (the last) or None (all). `whole`: each by each of them,
    between calls, after a detachment and after an error."""
    yield save, None
    for turn, before in enumerate((None, detach, fail) if whole else (None,)):
        for number, event in enumerate((*WRITES, *READS)):
            yield from [(before, None)] if before is not None else []
            yield event, (0, -1, None)[(number + turn) % 3]
    for event in (*OTHERS, *READS, move_layer) if whole else ():
        yield event, None


def run_script(whole, optimizer, schedule):
    """The outputs after each event, what the event returned, and its name."""
    popdist.init()
    torch.manual_seed(0)
    program = Program(optimizer, schedule, 2 if whole else 1)
    found = [(program.call(), None, "nothing")]
    found += [made_by(program, event, who) for event, who in script(whole)]
    firsts = (multiply_weights, 0), (load_optimizer, -1), (load, None)
    for event, who in firsts if whole else ():  # before the first call
        torch.manual_seed(1)
        first = Program(optimizer, schedule, 0)
        first.saved = program.saved
        found += [made_by(first, event, who), made_by(first, save, None)]
    return found


def made_by(program, event, who):
    """The outputs of a call after an event, what the event returned, and the event's name. A write of a single process
    is first an error; a process with a whole replica makes each event."""
    makes_it, value = True, None
    if who is not None and popdist.getNumInstancesPerReplica() > 1:
        makes_it = who % popdist.getNumInstances() == popdist.getInstanceIndex()
    if makes_it:
        value = event(program)
    if who is not None and event in WRITES and popdist.getNumInstancesPerReplica() > 1:
        with pytest.raises(poptorch.Error, match=r"instances differ(.|\n)* in instance"):
            program.call()
        if not makes_it:
            event(program)
    return program.call(), value, f"{event.__name__} by {who}, call {program.calls}"


@pytest.mark.kind("weights that several processes hold")
def test_an_event_has_the_bits_of_one_process_or_is_an_error():
    check(2, 1, False, poptorch.optim.AdamW, "1f1b")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "replicas", "optimizer", "schedule"),
    [
        (2, 1, torch.optim.AdamW, "1f1b"),
        (4, 1, torch.optim.AdamW, "zero-bubble"),
        (2, 2, partial(poptorch.optim.AdamW, max_grad_norm=0.5), "1f1b"),
    ],
)
def test_events_in_all_or_one_of_the_processes_have_the_bits_of_one_process_or_are_an_error(
    parts, replicas, optimizer, schedule
):
    check(parts, replicas, True, optimizer, schedule)


def check(parts, replicas, *args):
    """Compare with a process for each replica."""
    started = processes.start(run_script, processes.launches(parts * replicas, 1, parts), *args)
    whole = processes.run(run_script, replicas, *args)
    assert [ended.error for ended in whole] == [""] * replicas
    for number, ended in enumerate(processes.finish(started)):
        assert ended.error == ""
        for (outputs, value, name), expected in zip(ended.value, whole[number // parts].value, strict=True):
            assert outputs == expected[0], name
            assert value is None or value == expected[1], name
