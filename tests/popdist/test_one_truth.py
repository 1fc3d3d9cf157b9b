"""Instances that differ, fail, leave or are interrupted: an error in all of them, within seconds."""

import os
import re
import signal
import socket
import time
from functools import partial
from pathlib import Path

import processes
import pytest
import torch
import training
from ports import free_port
from torch import nn

import popdist
import poptorch
from popengine.environment import Launch
from popengine.run.instances import connections


def caught(work):
    try:
        work()
    except poptorch.Error as error:
        return error.message
    return "nothing"


# ---- differences ---------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self, factor=0.5, shift=1.0):
        super().__init__()
        self.linear, self.factor, self.shift = nn.Linear(4, 3), factor, torch.tensor([shift, 0.0, 0.0])

    def forward(self, x, labels):
        scaled = self.linear(x) * self.factor  # the line of the factor
        return nn.functional.cross_entropy(scaled + self.shift, labels)  # the line of the shift


def line_of(text):
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# the line of the {text}"))


OTHER_ARGUMENTS = {
    "accumulation": ({"accumulation": 4}, r"gradient accumulation: 3 in instance 0; 4 in instance 1"),
    "optimizer": ({"rule": poptorch.optim.Adam}, r"optimizer: 'SGD2' in instance 0; 'ADAM' in instance 1"),
    "width": (
        {"width": 7},
        r"shape of first.weight: \(6, 4\) torch.float32 in instance 0; \(7, 4\) torch.float32",
    ),
    "random seed": ({"random_seed": 2}, r"random seed: 1 in instance 0; 2 in instance 1"),
    "first weights": ({"seed": 5}, r"first value of first.weight: "),
    "first rate": ({"lr": 0.2}, r"lr of parameter group 0: 0.1 in instance 0; 0.2 in instance 1"),
}
DIFFERENT = {name: text for name, (_, text) in OTHER_ARGUMENTS.items()} | {
    "factor": rf"test_one_truth.py:{line_of('factor')}, line \d+ of piece 0: \w+ = aten_mul_Tensor\(\w+, 0.5\)"
    r" in instance 0; \w+ = aten_mul_Tensor\(\w+, 0.25\) in instance 1\n",
    "shift": rf"which aten.add.Tensor reads at \S*test_one_truth.py:{line_of('shift')}:"
    r" \(3,\) torch.float32 \[1.0, 0.0, 0.0\] in instance 0;"
    r" \(3,\) torch.float32 \[2.0, 0.0, 0.0\] in instance 1\n",
    "shape": r"input of 0: \(2, 4\) in instance 0; \(4, 4\) in instance 1",
    "new shape": r"other inputs",
    "value that forward reads": r"differ at call 3(.|\n)*plan of the step: ",
    "rate": r"differ at call 2(.|\n)*lr of parameter group 0: 0.1 in instance 0; 0.3 in instance 1",
    "loaded weights": r"differ at call 3(.|\n)*value of first.weight",
    "less": r"at different places: call 4 of the run in instance 0; popdist.synchronize\(\) in instance 1",
}


def differ():
    """What an instance says when the second one is built otherwise or does something else, for each difference."""
    popdist.init()
    is_other, found = popdist.getInstanceIndex() == 1, {}

    def trainer_of_scaled(**how):
        torch.manual_seed(0)
        model = Scaled(**how)
        opts = popdist.poptorch.Options().randomSeed(0).allowNewShapes()
        executor = poptorch.trainingModel(model, opts, poptorch.optim.SGD(model.parameters(), lr=0.1))
        return model, lambda n=2: caught(partial(executor, torch.ones(n, 4), torch.arange(n) % 3))

    for name, (other, _) in OTHER_ARGUMENTS.items():
        own = other if is_other else {}
        executor, _, _ = training.executor(**own)
        found[name] = caught(partial(executor, *training.batch(0, own.get("accumulation", 3))))
    for name, value in {"factor": 0.25, "shift": 2.0}.items():
        found[name] = trainer_of_scaled(**{name: value} if is_other else {})[1]()
    model, call = trainer_of_scaled()
    for name, factor in (("first", 0.5), ("second", 0.25), ("value that forward reads", 0.25), ("last", 0.5)):
        model.factor = 0.5 if name == "value that forward reads" and is_other else factor
        found[name] = call()
    for name, rows in (("first", 2), ("second", 4), ("shape", 2 + 2 * is_other), ("new shape", 2 + is_other)):
        found[name] = call(rows)
    executor, model, optimizer = training.executor()
    executor(*training.batch(0))
    if is_other:
        optimizer.param_groups[0]["lr"] = 0.3
        executor.setOptimizer(optimizer)
    found["rate"] = caught(lambda: executor(*training.batch(1)))
    optimizer.param_groups[0]["lr"] = 0.3
    executor.setOptimizer(optimizer)
    executor(*training.batch(1))
    before = model.state_dict()
    if is_other:  # a checkpoint that only one instance has loaded
        executor.load_state_dict({name: value + 1 for name, value in before.items()})
    found["loaded weights"] = caught(lambda: executor(*training.batch(2)))
    executor, _, _ = training.executor()
    for call in range(3):
        executor(*training.batch(call))
    found["less"] = caught(popdist.synchronize if is_other else partial(executor, *training.batch(3)))
    return found


@pytest.fixture(scope="module")
def said():
    return [ended.value or ended.error for ended in processes.run(differ, 2)]


def test_instances_that_differ_say_what_differs_and_where(said):
    for message in said:
        for name, text in DIFFERENT.items():
            assert re.search(text, message[name]), message[name]
            is_place = "the instances are at different places" in message[name]
            assert is_place or "nothing has changed in any instance" in message[name]
        assert [message[name] for name in ("first", "second", "last")] == ["nothing"] * 3


class Summed(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x):
        return poptorch.identity_loss(self.blocks(x), "sum")


def balanced_stages():
    """The stages that AutoBalance makes of four blocks, where each instance measures another heavy one."""
    from poptorch.compiling import tune

    popdist.init()
    heavy = popdist.getInstanceIndex()
    tune.seconds_of_pieces = lambda parts, *given: [9.0 if p.stage == heavy else 1.0 for p in parts.pieces]
    torch.manual_seed(0)
    blocks = [poptorch.BeginBlock(nn.Linear(4, 4), name) for name in "abcd"]
    opts = popdist.poptorch.Options().setExecutionStrategy(
        poptorch.PipelinedExecution(poptorch.AutoBalance(2))
    )
    opts.showCompilationProgressBar(False)
    opts.Training.gradientAccumulation(4)
    trainer = poptorch.trainingModel(Summed(blocks), opts)
    trainer(torch.ones(4, 4))
    return [stage.blocks for stage in trainer._executable.settings.strategy.stages]


def test_instances_take_the_stages_that_the_first_one_has_measured():
    """Each had stages of its own, so that a training ended before its first call, on some days."""
    ended = processes.run(balanced_stages, 2)
    assert [one.value or one.error for one in ended] == [[("a",), ("b", "c", "d")]] * 2


# ---- failures ------------------------------------------------------------------------------------------------


def fail_in_one():
    popdist.init()
    return [train(fails, iterations) for iterations in (1, 2) for fails in (True, False)]


def train(fails, iterations):
    executor, model, _ = training.executor(momentum=0.9, iterations=iterations)
    message = ""
    for call in range(3):
        x, labels = training.batch(call, iterations=iterations)
        if fails and call == 1:
            message = caught(partial(executor, x / (popdist.getInstanceIndex() != 2), labels))
        executor(x, labels)
    return message, training.weights(model)


@pytest.mark.kind("one process fails")
def test_a_call_that_fails_in_one_instance_fails_in_all_and_leaves_no_trace():
    """Before, the instance that had failed restored its weights and trained on with others than the rest."""
    found = processes.run(fail_in_one, 3)
    assert [ended.error for ended in found] == [""] * 3
    for number in (0, 2):
        messages = [ended.value[number][0] for ended in found]
        weights = [ended.value[each][1] for ended in found for each in (number, number + 1)]
        assert weights == [weights[0]] * 6
        assert "forward of stage 0" in messages[2]
        for message in messages[:2]:
            assert "another instance failed: instance 2 failed" in message
            assert "in all instances the weights are those of the last finished update" in message


def leave_early(how):
    popdist.init()
    executor, model, _ = training.executor()
    executor(*training.batch(0))
    before = training.weights(model)
    if popdist.getInstanceIndex():
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return None
    message = caught(lambda: executor(*training.batch(1)))
    return message, training.weights(model) == before


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_an_instance_that_is_gone_ends_the_training(how):
    stays, _ = processes.run(leave_early, 2, how)
    message, has_its_weights = stays.value
    assert "another instance has left the run: instance 1" in message
    assert has_its_weights


# ---- interrupts and waiting ----------------------------------------------------------------------------------


def interrupted(function, folder, names):
    """How two instances ended, of which the first is interrupted when FOLDER/waits-NAME is there, for each name."""
    started = processes.start(function, processes.launches(2), folder)
    for name in names:
        processes.wait_for(folder / f"waits-{name}", started)
        time.sleep(0.5)
        os.kill(started[0][0].pid, signal.SIGINT)
    ended = processes.finish(started)
    assert [each.error for each in ended] == ["", ""]
    return [each.value for each in ended]


def await_file(path):
    while not path.exists():
        time.sleep(0.05)


def wait_for_another(folder):
    """Instance 1 doesn't come for long; instance 0 waits, and is interrupted."""
    popdist.init()
    executor, _, _ = training.executor()
    found = []
    for name, act in (("barrier", popdist.synchronize), ("call", lambda: executor(*training.batch(0)))):
        act()
        if popdist.getInstanceIndex():
            await_file(folder / f"interrupted-{name}")
            found.append(caught(act))
        else:
            with pytest.raises(KeyboardInterrupt):
                (folder / f"waits-{name}").touch()
                act()
            # Instance 1 waits for this file: so the wait for instance 1 has ended before.
            (folder / f"interrupted-{name}").touch()
        found.append(caught(act))
    return found


def test_an_interrupt_ends_the_wait_for_another_instance(tmp_path):
    first, second = interrupted(wait_for_another, tmp_path, ("barrier", "call"))
    assert first == ["nothing"] * 2 and second[1::2] == ["nothing"] * 2
    assert all("another instance failed: instance 0 was interrupted at" in text for text in second[::2])


def slow_in_the_middle(folder):
    """Instance 1 is long with its gradients, for which instance 0 waits."""
    popdist.init()
    found = []
    for iterations in (1, 2):
        executor, model, _ = training.executor(iterations=iterations)
        executor(*training.batch(0, iterations=iterations))
        again = training.batch(1, iterations=iterations)
        before, message = training.weights(model), ""
        updates = executor._plans.engine.workers[0].updates
        inner = updates._divide_means

        def slow(sums, inner=inner, name=iterations):
            (folder / f"waits-{name}").touch()  # both are in the call now
            await_file(folder / f"interrupted-{name}")
            inner(sums)

        if popdist.getInstanceIndex():
            updates._divide_means = slow
            message = caught(partial(executor, *again))
            updates._divide_means = inner
        else:
            with pytest.raises(KeyboardInterrupt):
                executor(*again)
            (folder / f"interrupted-{iterations}").touch()
        same = training.weights(model) == before
        executor(*again)  # both come again
        found.append((message, same, training.weights(model)))
    return found


def test_an_interrupt_within_a_step_gives_it_up_in_all_instances(tmp_path):
    for first, second in zip(*interrupted(slow_in_the_middle, tmp_path, (1, 2)), strict=True):
        assert "instance 0 was interrupted at call 2" in second[0]
        assert first[1:] == second[1:] and first[1]


def interrupted_while_it_writes(comes):
    """Instance 0 is interrupted, where it comes, when the update of a call that has no other has begun."""
    executor, model, optimizer = training.executor(iterations=1, rule=poptorch.optim.Adam)
    interrupts = []

    def interrupt(*_):
        if interrupts:
            interrupts.pop()
            run = executor._plans.state.commit
            os.kill(os.getpid(), signal.SIGINT)
            until = time.monotonic() + processes.LIMIT
            while not run.is_stopping and time.monotonic() < until:
                time.sleep(0.001)

    optimizer.register_step_pre_hook(interrupt)
    outcomes = []
    for call in range(3):
        if call == 1 and comes and not popdist.getInstanceIndex():
            interrupts.append(call)
        try:
            executor(*training.batch(call, iterations=1))
            outcomes.append("done")
        except KeyboardInterrupt:
            outcomes.append("interrupted")
    return outcomes, training.weights(model), executor.rng_state


def with_and_without_interrupt():
    popdist.init()
    return [interrupted_while_it_writes(comes) for comes in (True, False)]


def test_an_interrupt_that_comes_to_one_instance_while_it_writes_its_update_undoes_nothing():
    ended = processes.run(with_and_without_interrupt, 2)
    assert [one.error for one in ended] == ["", ""]
    (first, undisturbed), (second, _) = (one.value for one in ended)
    assert first[0] == ["done", "interrupted", "done"] and second[0] == ["done"] * 3
    assert first[1:] == second[1:] == undisturbed[1:]


def wait_at_most_two_seconds(folder):
    popdist.init()
    executor, model, _ = training.executor()
    executor(*training.batch(0))
    before = training.weights(model)
    if popdist.getInstanceIndex() == 2:
        while len(list(folder.iterdir())) < 2:
            time.sleep(0.05)
        return caught(lambda: executor(*training.batch(1)))
    message = caught(lambda: executor(*training.batch(1)))
    (folder / f"{popdist.getInstanceIndex()}").touch()
    return message, training.weights(model) == before


def test_a_wait_for_an_instance_that_is_alive_ends_at_the_limit_with_an_error_that_names_it(tmp_path):
    limits = ("2", "2", str(processes.LIMIT))
    environments = [
        {**environment, "POPDIST_WAIT_LIMIT": limit}
        for environment, limit in zip(processes.launches(3), limits, strict=True)
    ]
    first, second, late = processes.finish(processes.start(wait_at_most_two_seconds, environments, tmp_path))
    for message, has_its_weights in (first.value, second.value):
        assert "another instance has left the run: instance 2 has not arrived at call 2 of the run" in message
        assert "for 2 s, the limit (poprun --wait-limit, POPDIST_WAIT_LIMIT)" in message
        assert has_its_weights
    assert "another instance has left the run" in late.value


def stopped_with_the_store(folder):
    popdist.init()
    popdist.synchronize()
    connections.WARN_AFTER = 0.3

    def warn(text, *values):
        # Appended: the end of the process may cut a later warning off.
        with (folder / "warned").open("a") as file:
            file.write(text % values)

    connections.logger.warning = warn
    if popdist.getInstanceIndex() == 0:
        (folder / "process").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    popdist.synchronize()


def test_an_instance_that_is_stopped_is_named_though_it_serves_the_store(tmp_path):
    started = processes.start(stopped_with_the_store, processes.launches(2), tmp_path)
    until = time.monotonic() + processes.LIMIT
    warned = tmp_path / "warned"
    while not (warned.exists() and "instance 0 has not" in warned.read_text()) and time.monotonic() < until:
        time.sleep(0.02)
    os.kill(int((tmp_path / "process").read_text()), signal.SIGCONT)
    assert [ended.error for ended in processes.finish(started)] == ["", ""]
    assert warned.read_text().startswith("instance 0 has not arrived at popdist.synchronize() for 0 s")


# ---- the first meeting ---------------------------------------------------------------------------------------


def init():
    popdist.init()


def test_a_missing_instance_or_a_wrong_address_is_named_with_the_time_limit():
    limit, (first, second, _) = {"POPDIST_INIT_TIMEOUT": "1"}, processes.launches(3)
    with socket.socket() as used:
        used.bind(("", 0))
        used.listen()
        cases = (
            ({**second, **limit}, "instance 1 found no store at localhost:", " in 1 s"),
            ({**first, **limit}, "after 1 s instances 1, 2 of 3 had not come to localhost:"),
            ({**first, "MASTER_ADDR": ""}, "MASTER_ADDR is ''"),
            (
                {**first, "MASTER_PORT": str(used.getsockname()[1])},
                *("instance 0 can't use localhost:", "must be a free port"),
            ),
        )
        for environment, *words in cases:
            (ended,) = processes.finish(processes.start(init, [environment]))
            assert all(word in ended.error for word in ("popdist.init(): ", *words)), ended.error


def without_init():
    executor, _, _ = training.executor()
    return caught(lambda: executor(*training.batch(0)))


def test_processes_that_have_not_met_do_not_train_alone():
    """Under torchrun every process trained a model of its own, and nobody said so."""
    launchers = (
        Launch(2, 1, 1, 0, 0, 2, 0).variables(),
        {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"},
        {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    )
    for ended in processes.finish(processes.start(without_init, launchers)):
        assert "trains in 2 processes, but they have not met" in ended.value


def step(tasks):
    """The variables of each task of `srun --ntasks TASKS`, as the manual of srun names them."""
    while (port := free_port()) < 20_000:  # which the number of the job chooses
        pass
    common = {
        **dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID"), str(port - 20_000)),
        **dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST"), "localhost"),
        **dict.fromkeys(("SLURM_NNODES", "SLURM_STEP_NUM_NODES"), "1"),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), str(tasks)),
        "SLURM_STEP_ID": "0",
        "POPDIST_INIT_TIMEOUT": str(processes.LIMIT),
    }
    return [{**common, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)} for i in range(tasks)]


def trained():
    popdist.init()
    place = popdist.getInstanceIndex(), popdist.getNumInstances(), popdist.getNumTotalReplicas()
    executor, model, _ = training.executor()
    executor(*training.batch(0))
    return place, training.weights(model)


def test_tasks_of_srun_train_together_to_the_weights_of_poprun():
    of_srun = processes.finish(processes.start(trained, step(2)))
    of_poprun = processes.run(trained, 2)
    assert [ended.error for ended in (*of_srun, *of_poprun)] == [""] * 4
    assert [ended.value[0] for ended in of_srun] == [(0, 2, 2), (1, 2, 2)]
    assert [ended.value for ended in of_srun] == [ended.value for ended in of_poprun]
