"""Instances and poprun itself are killed, and the training ends in the bits of one that nobody killed."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from launching import nodes

import poptorch

PROGRAM = Path(__file__).parents[1] / "popdist" / "checkpoint_program.py"
sys.path.insert(0, str(PROGRAM.parent))

import processes  # noqa: E402
from checkpoint_program import Training, difference, main  # noqa: E402

TWO = ("--num-replicas", 2, "--num-instances", 2, "--max-restarts", 3)
CALLS = 6
LIMIT = 240  # seconds, on a machine that does much else


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("killed")


def test_a_training_of_which_everything_was_killed_ends_in_the_bits_of_one_process(poprun, folder):
    run = poprun(*TWO, sys.executable, PROGRAM, folder, CALLS, "--hold", 3)
    run.until("held in ", LIMIT, times=2)  # after call 3, and the checkpoint of call 2 is complete
    os.kill(run.processes("checkpoint_program")[-1], signal.SIGKILL)
    run.until("all instances start again, 1 of at most 3 times", LIMIT)
    run.until("begins at call 2\n", LIMIT, times=2)
    os.kill(run.pid, signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    assert run.nothing_left(20)
    assert begun_at(processes.run(main, 2, [folder, CALLS])) >= 2
    assert_equal_to_one_process(folder, 2, 2)


def begun_at(ended):
    """Return the number of calls from which all instances have gone on."""
    assert [each.error for each in ended] == [""] * len(ended)
    (begun,) = {each.value for each in ended}
    return begun


def of_replicas(count):
    opts = poptorch.Options().replicationFactor(count)
    opts.Distributed.rowsByReplica(True)
    return opts


@pytest.mark.kind("a checkpoint is resumed")
def test_one_process_goes_on_from_two_with_all_their_replicas(folder):
    """Of what the test before has left, if it ran."""
    if not (folder / "result-0.pt").exists():
        begun_at(processes.run(main, 2, [folder, CALLS]))
    training = Training(of_replicas(2), folder)
    assert training.restore() == CALLS
    training.trainer.compile(*next(iter(training.loader)))
    one, (first, second) = training.result(), results(folder, 2)
    assert difference(one["weights"], first["weights"]) == ""
    assert not first["optimizer"].keys() & second["optimizer"].keys() - {
        "b.bias"
    }  # of 3 elements: each has it
    assert difference(one["optimizer"], {**first["optimizer"], **second["optimizer"]}) == ""
    assert difference(one["buffers"], [first["buffers"][0], second["buffers"][0]]) == ""
    assert difference(one["buffers"][0], one["buffers"][1]) != ""


def results(folder, instances):
    return [torch.load(folder / f"result-{instance}.pt") for instance in range(instances)]


def assert_equal_to_one_process(folder, replicas, instances):
    """Compare what the instances have of weights, running statistics and the optimizer's state with one process."""
    one = Training(of_replicas(replicas), folder, every=0).train(CALLS).result()
    found, parts = results(folder, instances), instances // replicas
    assert difference(merged(found, "optimizer"), one["optimizer"]) == ""
    for name in one.keys() - {"weights", "buffers", "optimizer", "losses"}:
        assert all(difference(each[name], one[name]) == "" for each in found), name
    for replica in range(replicas):
        those = found[replica * parts :][:parts]
        assert difference(merged(those, "weights"), one["weights"]) == ""
        buffers = {name: value for each in those for name, value in each["buffers"][0].items()}
        assert difference(buffers, one["buffers"][replica]) == ""


def merged(results, kind):
    return {name: value for each in results for name, value in each[kind].items()}


def test_two_replicas_of_two_processes_of_which_one_was_killed_end_in_the_bits_of_one(poprun, tmp_path):
    words = ("--num-replicas", 2, "--num-instances", 4, "--ipus-per-replica", 2)
    run = poprun(*words, "--max-restarts", 1, sys.executable, PROGRAM, tmp_path, CALLS, "--hold", 3)
    run.until("held in ", LIMIT, times=4)
    os.kill(run.processes("checkpoint_program")[-1], signal.SIGKILL)
    (tmp_path / "go").touch()
    assert run.wait(LIMIT) == 0, run.said()
    assert run.said().count("begins at call 2\n") == 4
    assert_equal_to_one_process(tmp_path, 2, 4)


def test_an_elastic_run_goes_on_with_other_divisions_of_a_replica_over_processes(poprun, tmp_path):
    """Two nodes with one of two ipus each; one is killed: the other goes on with both ipus."""
    words = (
        *("--num-replicas", 1, "--num-instances", "1:2", "--ipus-per-replica", 2),
        *("--instances-per-node", 1, "--checkpoint-dir", tmp_path, sys.executable, PROGRAM, tmp_path),
        *(CALLS, "--hold", 3),
    )
    first, second = nodes(poprun, *words)
    first.until("held in ", LIMIT)
    second.until("held in ", LIMIT)
    for process in (second.pid, *second.processes("checkpoint_program")):
        os.kill(process, signal.SIGKILL)
    (tmp_path / "go").touch()
    assert first.wait(LIMIT) == 0, first.said()
    assert "instance 0 begins at call 2\n" in first.said()
    assert_equal_to_one_process(tmp_path, 1, 1)
    assert second.nothing_left(20)


@pytest.mark.parametrize("mode", poptorch.DataLoaderMode, ids=lambda mode: mode.name)
def test_two_instances_go_on_from_four_in_the_middle_of_an_epoch_to_the_bits_of_one(tmp_path, mode):
    words = ["--loader", mode.name]
    assert begun_at(processes.run(main, 4, [tmp_path, 3, "--every", 1, *words])) == 0
    assert begun_at(processes.run(main, 2, [tmp_path, CALLS, *words], replicas=2)) == 3  # of two an epoch
    first, second = results(tmp_path, 2)
    training = Training(of_replicas(4), tmp_path / "one")
    training.restore()
    one = training.train(CALLS).result()
    assert difference(first["weights"], one["weights"]) == ""
    assert difference(first["buffers"] + second["buffers"], one["buffers"]) == ""
