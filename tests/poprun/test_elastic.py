"""A training of 8 replicas goes on with the instances that are there, to the bits of one process.

`elastic_scripts.py` does the same with random scripts.
"""

import json
import os
import signal
import sys

import elastic_scripts
import pytest
from elastic_scripts import command, difference, outcome, play


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    return elastic_scripts.undisturbed(tmp_path_factory.mktemp("one"))


def instance(run, hold):
    """The process that holds at this call."""
    (line,) = [line for line in run.said().splitlines() if line.startswith(f"holds {hold} ")]
    return int(line.split()[-1])


def test_an_instance_that_was_killed_is_replaced(poprun, tmp_path, undisturbed):
    run = poprun(*command(tmp_path, holds=["5-1"], instances="2:4"))
    run.until("holds 5-1 of 4")
    os.kill(instance(run, "5-1"), signal.SIGKILL)
    (tmp_path / "go-5-1").touch()
    run.until("round 1 of 4 instances begins")
    assert run.wait() == 0, run.said()
    assert difference(outcome(tmp_path, 4), undisturbed) == ""


def test_nodes_are_lost_and_come_back_and_any_of_them_may_be_the_first(poprun, tmp_path, undisturbed):
    """Two nodes with 2 instances each; the one that leads is killed, and comes back."""
    words = command(tmp_path, "--instances-per-node=2", holds=["1-0", "4-0", "7-0"], instances="2:4")
    first = poprun("-v", *words)
    first.until("holds 1-0 of 2")
    second = poprun("-v", *words)
    first.until("a node has come")
    (tmp_path / "go-1-0").touch()  # the checkpoint of call 2 is the next: four go on from there
    first.until("holds 4-0 of 4")
    second.until("round 1 of 4 instances begins")
    os.kill(first.pid, signal.SIGKILL)
    second.until("round 2 of 2 instances begins")
    second.until("leads the training")
    second.until("holds 4-0 of 2")
    third = poprun(*words)
    second.until("a node has come")
    (tmp_path / "go-4-0").touch()
    second.until("holds 7-0 of 4")
    (tmp_path / "go-7-0").touch()
    assert (second.wait(), third.wait()) == (0, 0), second.said() + third.said()
    assert difference(outcome(tmp_path, 4), undisturbed) == ""
    assert first.nothing_left() and second.nothing_left() and third.nothing_left()


QUICK = (0, 3, 9)


@pytest.mark.parametrize(
    "seed", [seed if seed in QUICK else pytest.param(seed, marks=pytest.mark.slow) for seed in range(10)]
)
def test_a_random_script_of_kills_stops_and_returns_ends_in_the_undisturbed_state(
    poprun, tmp_path, undisturbed, seed
):
    done, instances = play(poprun, tmp_path, seed)
    assert difference(outcome(tmp_path, instances), undisturbed) == "", done


WAITS = (sys.executable, "-S", "-c", "import sys, time; print('runs', flush=True); time.sleep(1e4)")


def test_another_command_in_the_same_folder_is_refused(poprun, tmp_path):
    words = ("--num-replicas=2", "--num-instances=1:2", "--checkpoint-dir", tmp_path)
    first = poprun(*words, *WAITS)
    first.until("runs")
    second = poprun(*words, sys.executable, "-c", "pass")
    assert second.wait() == 2
    assert f"{tmp_path} is in use by a training with another command" in second.said()


def test_a_training_that_other_hosts_can_not_reach_is_refused_there_and_the_fix_is_named(poprun, tmp_path):
    words = ("--num-replicas=2", "--num-instances=1:2", "--checkpoint-dir", tmp_path, *WAITS)
    first = poprun(*words)
    first.until("runs")
    (leader,) = (tmp_path / ".poprun").glob("leader-*")
    there = {**json.loads(leader.read_text()), "host": "elsewhere"}
    leader.write_text(json.dumps(there))
    second = poprun(*words)
    assert second.wait() == 2
    assert "runs on elsewhere, and can't be reached from other hosts\n  fix: set MASTER_ADDR" in second.said()


def test_too_few_places_for_the_fewest_instances_are_an_error_after_a_while(poprun, tmp_path):
    words = (
        "--num-replicas=4",
        "--num-instances=2:4",
        "--instances-per-node=1",
        "--checkpoint-dir",
        tmp_path,
    )
    run = poprun(*words, *WAITS, POPRUN_NODE_TIMEOUT="2")
    assert run.wait() == 1
    assert "there is room for 1 instances, and 2 are the fewest" in run.said()


def test_instances_that_fail_again_and_again_without_a_checkpoint_end_the_training(poprun, tmp_path):
    words = ("--num-replicas=2", "--num-instances=1:2", "--max-restarts=2", "--checkpoint-dir", tmp_path)
    run = poprun(*words, sys.executable, "-S", "-c", "import sys; sys.exit(7)")
    assert run.wait() == 7
    assert "round 2 of 2 instances begins" in run.said()
    assert "instances have failed 3 times without a new checkpoint (--max-restarts)" in run.said()


def test_the_secret_is_readable_by_its_owner_only(poprun, tmp_path):
    words = ("--num-replicas=2", "--num-instances=1:2", "--checkpoint-dir", tmp_path)
    assert poprun(*words, sys.executable, "-S", "-c", "pass").wait() == 0
    assert [path.name for path in (tmp_path / ".poprun").iterdir()] == ["secret"]
    assert (tmp_path / ".poprun" / "secret").stat().st_mode & 0o777 == 0o600


def test_a_host_that_was_reached_by_ssh_is_lost_and_the_other_goes_on(poprun, tmp_path):
    """A stand-in for ssh runs here what it is told to run there; instance 1 kills the agent of its host."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nsh -c "$4"\n')
    ssh.chmod(0o755)
    program = (
        "import os, signal, time\n"
        "print('instance', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], flush=True)\n"
        "if os.environ['RANK'] == '1': os.kill(os.getppid(), signal.SIGKILL)\n"
        "while os.environ['WORLD_SIZE'] == '2': time.sleep(0.1)"
    )
    words = ("-H", "one,two", "--num-replicas=2", "--num-instances=1:2", "--checkpoint-dir", tmp_path / "c")
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MASTER_ADDR": "127.0.0.1"}
    run = poprun(*words, sys.executable, "-S", "-c", program, **variables)
    assert run.wait() == 0, run.said()
    assert "ended with exit code 137: the others go on" in run.said()
    assert "instance 1 of 2" in run.said() and "instance 0 of 1" in run.said()
    assert run.nothing_left()


@pytest.mark.slow
def test_a_leader_that_stops_is_replaced_and_takes_part_again_when_it_continues(
    poprun, tmp_path, undisturbed
):
    """Two nodes with 2 instances each; the agent of the first gets SIGSTOP, and later SIGCONT."""
    words = command(
        tmp_path, "--instances-per-node=2", "--hang-timeout=30", holds=["1-0", "4-0", "7-0"], instances="2:4"
    )
    first = poprun("-v", *words)
    first.until("holds 1-0 of 2")
    second = poprun("-v", *words)
    first.until("a node has come")
    (tmp_path / "go-1-0").touch()
    first.until("holds 4-0 of 4")
    agent = first.agent()
    os.kill(agent, signal.SIGSTOP)
    second.until("leads the training")
    second.until("holds 4-0 of 2")
    os.kill(agent, signal.SIGCONT)
    second.until("a node has come")
    (tmp_path / "go-4-0").touch()
    second.until("holds 7-0 of 4")
    (tmp_path / "go-7-0").touch()
    assert (first.wait(), second.wait()) == (0, 0), first.said() + second.said()
    assert difference(outcome(tmp_path, 4), undisturbed) == ""
    assert first.nothing_left() and second.nothing_left()
