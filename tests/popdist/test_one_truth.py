"""Instances that differ, fail, leave or are interrupted: an error in all of them, within seconds."""

import os
import re
import signal
import time
from functools import partial
from pathlib import Path

import processes
import pytest
import torch
import training

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


class Summed(torch.nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = torch.nn.Sequential(*blocks)

    def forward(self, x):
        return poptorch.identity_loss(self.blocks(x), "sum")


def balanced_stages():
    """The stages that AutoBalance makes of four blocks, where each instance measures another heavy one."""
    from poptorch.compiling import tune

    popdist.init()
    heavy = popdist.getInstanceIndex()
    tune.seconds_of_pieces = lambda parts, *given: [9.0 if p.stage == heavy else 1.0 for p in parts.pieces]
    torch.manual_seed(0)
    blocks = [poptorch.BeginBlock(torch.nn.Linear(4, 4), name) for name in "abcd"]
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
    assert [one.error for one in ended] == ["", ""]
    assert [one.value for one in ended] == [[("a",), ("b", "c", "d")]] * 2


# ---- differences ---------------------------------------------------------------------------------------------

DIFFERENT = {
    "accumulation": ({"accumulation": 4}, "gradient accumulation: 3 in instance 0; 4 in instance 1"),
    "optimizer": ({"rule": poptorch.optim.Adam}, "optimizer: 'SGD2' in instance 0; 'ADAM' in instance 1"),
    "width": (
        {"width": 7},
        "shape of first.weight: (6, 4) torch.float32 in instance 0; (7, 4) torch.float32 in instance 1",
    ),
    "random seed": ({"random_seed": 2}, "random seed: 1 in instance 0; 2 in instance 1"),
    "first weights": ({"seed": 5}, "first value of first.weight: "),
    "learning rate": (
        {"lr": 0.2},
        "lr of parameter group 0: 0.1 in instance 0; 0.2 in instance 1",
    ),
}


def differ():
    """What an instance says when the second one is built otherwise, for each difference."""
    popdist.init()
    found = {}
    for name, (other, _) in DIFFERENT.items():
        own = other if popdist.getInstanceIndex() else {}
        executor, _, _ = training.executor(**own)
        batch = training.batch(0, own.get("accumulation", 3))
        found[name] = caught(partial(executor, *batch))
        executor.destroy()
    return found


@pytest.fixture(scope="module")
def said():
    return [ended.value or ended.error for ended in processes.run(differ, 2)]


@pytest.mark.parametrize("name", DIFFERENT)
def test_instances_that_differ_say_what_differs_and_where(said, name):
    for message in said:
        assert "the instances differ" in message[name] and DIFFERENT[name][1] in message[name]
        assert "nothing has changed in any instance" in message[name]


class Scaled(torch.nn.Module):
    def __init__(self, factor, shift):
        super().__init__()
        self.linear, self.factor, self.shift = torch.nn.Linear(4, 3), factor, torch.tensor([shift, 0.0, 0.0])

    def forward(self, x, labels):
        scaled = self.linear(x) * self.factor  # the line of the factor
        return torch.nn.functional.cross_entropy(scaled + self.shift, labels)  # the line of the shift


def other_constants():
    popdist.init()
    found = []
    for factor, shift in ((0.25, 1.0), (0.5, 2.0)):
        is_other = popdist.getInstanceIndex() == 1
        torch.manual_seed(0)
        model = Scaled(factor if is_other else 0.5, shift if is_other else 1.0)
        opts = popdist.poptorch.Options().randomSeed(0)
        executor = poptorch.trainingModel(model, opts, poptorch.optim.SGD(model.parameters(), lr=0.1))
        found.append(caught(partial(executor, torch.ones(2, 4), torch.tensor([0, 1]))))
        executor.destroy()
    return found


def line_of(text):
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# the line of the {text}"))


def test_a_constant_of_the_model_that_differs_is_told_with_its_operation_and_line():
    for ended in processes.run(other_constants, 2):
        factor, shift = ended.value
        assert re.search(
            rf"test_one_truth.py:{line_of('factor')}, line \d+ of piece 0: \w+ = aten_mul_Tensor\(\w+, 0.5\)"
            rf" in instance 0; \w+ = aten_mul_Tensor\(\w+, 0.25\) in instance 1\n",
            factor,
        ), factor
        assert re.search(
            rf"which aten.add.Tensor reads at \S*test_one_truth.py:{line_of('shift')}:"
            r" \(3,\) torch.float32 \[1.0, 0.0, 0.0\] in instance 0;"
            r" \(3,\) torch.float32 \[2.0, 0.0, 0.0\] in instance 1\n",
            shift,
        ), shift


def new_rate_in_one():
    popdist.init()
    executor, model, optimizer = training.executor()
    executor(*training.batch(0))
    if popdist.getInstanceIndex():
        optimizer.param_groups[0]["lr"] = 0.3
        executor.setOptimizer(optimizer)
    message = caught(lambda: executor(*training.batch(1)))
    optimizer.param_groups[0]["lr"] = 0.3
    executor.setOptimizer(optimizer)
    executor(*training.batch(1))
    if popdist.getInstanceIndex():  # a checkpoint that only one instance has loaded
        executor.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    return message, caught(lambda: executor(*training.batch(2)))


@pytest.mark.kind("one process differs")
def test_a_rate_or_weights_that_change_in_one_instance_are_noticed_before_the_next_call():
    for ended in processes.run(new_rate_in_one, 2):
        rate, loaded = ended.value
        assert "differ at call 2" in rate
        assert "lr of parameter group 0: 0.1 in instance 0; 0.3 in instance 1" in rate
        assert "differ at call 3" in loaded and "value of first.weight" in loaded


def forward_reads_another_value_in_one():
    popdist.init()
    torch.manual_seed(0)
    model = Scaled(0.5, 1.0)
    opts = popdist.poptorch.Options().randomSeed(0)
    executor = poptorch.trainingModel(model, opts, poptorch.optim.SGD(model.parameters(), lr=0.1))

    def call(factor):
        model.factor = factor
        return caught(partial(executor, torch.ones(2, 4), torch.tensor([0, 1])))

    apart = 0.25 if popdist.getInstanceIndex() else 0.5
    return [call(0.5), call(0.25), call(apart), call(0.5)]


def test_a_value_that_forward_reads_and_that_changes_in_one_instance_is_noticed():
    for ended in processes.run(forward_reads_another_value_in_one, 2):
        first, second, apart, equal = ended.value
        assert (first, second, equal) == ("nothing",) * 3
        assert "differ at call 3" in apart and "plan of the step: " in apart


# ---- failures ------------------------------------------------------------------------------------------------


def fail_in_one(iterations):
    popdist.init()
    return train(True, iterations), train(False, iterations)


def train(fails, iterations):
    executor, model, _ = training.executor(momentum=0.9, iterations=iterations)
    message = ""
    for call in range(3):
        x, labels = training.batch(call, iterations=iterations)
        if fails and call == 1 and popdist.getInstanceIndex() == 2:
            message = caught(lambda x=x, labels=labels: executor(x / 0, labels))
        elif fails and call == 1:
            message = caught(lambda x=x, labels=labels: executor(x, labels))
        executor(x, labels)
    result = message, training.weights(model)
    executor.destroy()
    return result


@pytest.mark.kind("one process fails")
@pytest.mark.parametrize("iterations", [1, 2])
def test_a_call_that_fails_in_one_instance_fails_in_all_and_leaves_no_trace(iterations):
    """Before, the instance that had failed restored its weights and trained on with others than the rest."""
    found = processes.run(fail_in_one, 3, iterations)
    assert [ended.error for ended in found] == [""] * 3
    messages = [failed[0] for failed, _ in (ended.value for ended in found)]
    weights = [one[1] for ended in found for one in ended.value]
    assert weights == [weights[0]] * 6
    assert "forward of stage 0" in messages[2]
    for message in messages[:2]:
        assert "another instance failed: instance 2 failed" in message
        assert "in all instances the weights are those of the last finished update" in message


def one_batch_less():
    popdist.init()
    executor, _, _ = training.executor()
    for call in range(3 - popdist.getInstanceIndex()):
        if call == 2:
            return caught(lambda: executor(*training.batch(2)))
        executor(*training.batch(call))
    return caught(popdist.synchronize)


def test_a_batch_less_in_one_instance_is_told_to_all():
    for ended in processes.run(one_batch_less, 2):
        assert "the instances are at different places: call 3 of the run in instance 0;" in ended.value
        assert "popdist.synchronize() in instance 1" in ended.value


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


def wait_for_another(folder, where):
    """Instance 1 doesn't come for long; instance 0 waits, and is interrupted."""
    popdist.init()
    if where == "barrier":
        act = popdist.synchronize
        act()
    else:
        executor, _, _ = training.executor()
        executor(*training.batch(0))

        def act():
            executor(*training.batch(1))

    if popdist.getInstanceIndex():
        while not (folder / "interrupted").exists():
            time.sleep(0.05)
        return caught(act), caught(act)
    try:
        (folder / "waits").touch()
        act()
    except KeyboardInterrupt:
        # Instance 1 waits for this file: so the wait for instance 1 has ended before.
        (folder / "interrupted").touch()
        return caught(act)


@pytest.mark.parametrize("where", ["call", "barrier"])
def test_an_interrupt_ends_the_wait_for_another_instance(tmp_path, where):
    started = processes.start(wait_for_another, processes.launches(2), tmp_path, where)
    processes.wait_for(tmp_path / "waits", started)
    time.sleep(0.5)
    os.kill(started[0][0].pid, signal.SIGINT)
    interrupted, other = processes.finish(started)
    assert interrupted.value == "nothing"
    assert "another instance failed: instance 0 was interrupted at" in other.value[0]
    assert other.value[1] == "nothing"


def slow_in_the_middle(folder, iterations):
    """Instance 1 is long with its gradients, for which instance 0 waits."""
    popdist.init()
    executor, model, _ = training.executor(iterations=iterations)
    executor(*training.batch(0, iterations=iterations))
    again = training.batch(1, iterations=iterations)
    before = training.weights(model)
    if popdist.getInstanceIndex():
        updates = executor._plans.engine._rows.updates
        inner = updates._divide_means

        def slow(sums):
            (folder / "waits").touch()  # both are in the call now
            while not (folder / "interrupted").exists():
                time.sleep(0.05)
            inner(sums)

        updates._divide_means = slow
    try:
        executor(*again)
    except KeyboardInterrupt:
        (folder / "interrupted").touch()
        executor(*again)  # both come again
        return training.weights(model)
    except poptorch.Error as error:
        updates._divide_means = inner
        same = training.weights(model) == before
        executor(*again)
        return error.message, same, training.weights(model)


@pytest.mark.parametrize("iterations", [1, 2])
def test_an_interrupt_within_a_step_gives_it_up_in_all_instances(tmp_path, iterations):
    started = processes.start(slow_in_the_middle, processes.launches(2), tmp_path, iterations)
    processes.wait_for(tmp_path / "waits", started)
    time.sleep(0.5)
    os.kill(started[0][0].pid, signal.SIGINT)
    interrupted, other = processes.finish(started)
    message, same, others_weights = other.value
    assert "instance 0 was interrupted at call 2" in message and same
    assert interrupted.value == others_weights


def interrupted_while_it_writes(comes):
    """Instance 0 is interrupted, where it comes, when the update of a call that has no other has begun."""
    popdist.init()
    executor, model, optimizer = training.executor(iterations=1, rule=poptorch.optim.Adam)
    interrupts = []

    def interrupted(*_):
        if interrupts:
            interrupts.pop()
            run = executor._plans.state.commit
            os.kill(os.getpid(), signal.SIGINT)
            until = time.monotonic() + processes.LIMIT
            while not run.is_stopping and time.monotonic() < until:
                time.sleep(0.001)

    optimizer.register_step_pre_hook(interrupted)
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


def test_an_interrupt_that_comes_to_one_instance_while_it_writes_its_update_undoes_nothing():
    ended = processes.run(interrupted_while_it_writes, 2, True)
    assert [one.error for one in ended] == ["", ""]
    first, second = (one.value for one in ended)
    assert first[0] == ["done", "interrupted", "done"] and second[0] == ["done"] * 3
    assert first[1:] == second[1:]
    undisturbed, _ = processes.run(interrupted_while_it_writes, 2, False)
    assert undisturbed.value[1:] == first[1:]


def come_late(folder):
    popdist.init()
    connections.WARN_AFTER = 0.3
    warnings = []

    def warn(text, *values):
        warnings.append(text % values)
        (folder / "warned").touch()

    connections.logger.warning = warn
    while popdist.getInstanceIndex() and not (folder / "warned").exists():
        time.sleep(0.01)
    popdist.synchronize()
    return warnings


def test_whoever_waits_long_is_told_for_whom(tmp_path):
    early, late = processes.run(come_late, 2, tmp_path)
    assert early.value[0] == "instance 1 has not arrived at popdist.synchronize() for 0 s"
    assert not [text for text in late.value if "instance 1" in text]  # nobody waits for itself


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
    assert "instance 0 has not arrived at popdist.synchronize()" in warned.read_text()


# ---- the first meeting ---------------------------------------------------------------------------------------


def init():
    popdist.init()
    return torch.distributed.get_world_size()


def test_an_address_where_nobody_is_is_named_with_the_time_limit():
    environment = {**processes.launches(2)[1], "POPDIST_INIT_TIMEOUT": "1"}
    (ended,) = processes.finish(processes.start(init, [environment]))
    assert (
        "popdist.init(): instance 1 found no store at localhost:" in ended.error and " in 1 s" in ended.error
    )


def test_an_address_in_use_is_named_at_once():
    import socket

    with socket.socket() as used:
        used.bind(("", 0))
        used.listen()
        environment = {**processes.launches(2)[0], "MASTER_PORT": str(used.getsockname()[1])}
        (ended,) = processes.finish(processes.start(init, [environment]))
    assert "instance 0 can't use localhost:" in ended.error and "must be a free port" in ended.error


def test_instances_that_have_not_come_are_named():
    environments = [{**e, "POPDIST_INIT_TIMEOUT": "1"} for e in processes.launches(3)[:1]]
    (ended,) = processes.finish(processes.start(init, environments))
    assert "after 1 s instances 1, 2 of 3 had not come to localhost:" in ended.error


def test_without_an_address_the_variables_are_named():
    environments = [{**e, "MASTER_ADDR": ""} for e in processes.launches(2)[:1]]
    (ended,) = processes.finish(processes.start(init, environments))
    assert "MASTER_ADDR is ''" in ended.error


def without_init():
    executor, _, _ = training.executor()
    return caught(lambda: executor(*training.batch(0)))


@pytest.mark.parametrize("launcher", ["poprun", "torchrun", "srun"])
def test_processes_that_have_not_met_do_not_train_alone(launcher):
    """Under torchrun every process trained a model of its own, and nobody said so."""
    environment = {
        "poprun": Launch(2, 1, 1, 0, 0, 2, 0).variables(),
        "torchrun": {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"},
        "srun": {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    }[launcher]
    (ended,) = processes.finish(processes.start(without_init, [environment]))
    assert "trains in 2 processes, but they have not met" in ended.value


def calls_of_a_few():
    popdist.init()
    popdist.execute_on_instances({0, 1}, popdist.synchronize)
    popdist.synchronize()
    before = len(os.listdir("/proc/self/fd"))
    results = [
        popdist.execute_on_instances(
            {0, 1}, lambda: popdist.collectives.all_reduce(popdist.getInstanceIndex() + 1)
        )
        for _ in range(10)
    ]
    return results, len(os.listdir("/proc/self/fd")) - before


def test_functions_on_some_instances_leave_no_connections_behind():
    first, second, third = processes.run(calls_of_a_few, 3)
    assert [ended.value[0] for ended in (first, second, third)] == [[3.0] * 10, [3.0] * 10, [None] * 10]
    assert max(ended.value[1] for ended in (first, second, third)) <= 0
