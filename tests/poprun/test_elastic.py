"""A training of 8 replicas goes on with the instances that are there, to the bits of one process.

`elastic_scripts.py` does the same with random scripts.
"""

import os
import re
import signal
import subprocess
import sys

import elastic_scripts
import pytest
from elastic_scripts import command, difference, outcome, play
from launching import ONE_EACH, elastic, nodes, until_changed


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


@pytest.mark.parametrize("each", [1, 2])
def test_nodes_are_lost_and_come_back_and_any_of_them_may_be_the_first(poprun, tmp_path, undisturbed, each):
    """Two nodes with `each` instances; the one that leads is killed, and comes back."""
    words = command(
        tmp_path,
        f"--instances-per-node={each}",
        holds=["1-0", "4-0", "7-0"],
        instances=f"{each}:{2 * each}",
    )
    first = poprun("-v", *words)
    first.until(f"holds 1-0 of {each}")
    second = poprun("-v", *words)
    first.until("a node has come")
    (tmp_path / "go-1-0").touch()  # the checkpoint of call 2 is the next: all go on from there
    first.until(f"holds 4-0 of {2 * each}")
    second.until(f"round 1 of {2 * each} instances begins")
    os.kill(first.pid, signal.SIGKILL)
    second.until(f"round 2 of {each} instances begins")
    second.until(f"holds 4-0 of {each}")
    third = poprun(*words)
    second.until("a node has come")
    (tmp_path / "go-4-0").touch()
    second.until(f"holds 7-0 of {2 * each}")
    (tmp_path / "go-7-0").touch()
    assert (second.wait(), third.wait()) == (0, 0), second.said() + third.said()
    assert difference(outcome(tmp_path, 2 * each), undisturbed) == ""
    assert first.nothing_left() and second.nothing_left() and third.nothing_left()


QUICK = 201  # one of two instances is killed between two epochs


@pytest.mark.kind("an elastic script")
@pytest.mark.parametrize("seed", [QUICK, *range(10)])
def test_a_random_script_of_kills_stops_and_returns_ends_in_the_undisturbed_state(
    poprun, tmp_path, undisturbed, seed
):
    done, instances = play(poprun, tmp_path, seed)
    assert difference(outcome(tmp_path, instances), undisturbed) == "", done


PYTHON = (sys.executable, "-S", "-c")
WAITS = (sys.executable, "-S", "-c", "import sys, time; print('runs', flush=True); time.sleep(1e4)")


def test_another_command_in_the_same_folder_is_refused(poprun, tmp_path):
    words = elastic(tmp_path)
    first = poprun(*words, *WAITS)
    first.until("runs")
    second = poprun(*words, sys.executable, "-c", "pass")
    assert second.wait() == 2
    assert f"{tmp_path} is in use by a run with another command" in second.said()


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
    words = elastic(tmp_path, "--max-restarts=2")
    run = poprun(*words, sys.executable, "-S", "-c", "import sys; sys.exit(7)")
    assert run.wait() == 7
    assert "round 2 of 2 instances begins" in run.said()
    assert "instances have failed 3 times without a new checkpoint (--max-restarts)" in run.said()


def test_after_the_end_nothing_is_left_in_the_shared_folder(poprun, tmp_path):
    words = elastic(tmp_path)
    assert poprun(*words, sys.executable, "-S", "-c", "pass").wait() == 0
    assert list((tmp_path / ".poprun").iterdir()) == []


def test_a_host_that_was_reached_by_ssh_is_lost_and_the_other_goes_on(poprun, tmp_path):
    """A stand-in for ssh runs here what it is told to run there; instance 1 kills the agent of its host."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nsh -c "$5"\n')
    ssh.chmod(0o755)
    program = (
        "import os, signal, time\n"
        "print('instance', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], flush=True)\n"
        "if os.environ['RANK'] == '1': os.kill(os.getppid(), signal.SIGKILL)\n"
        "while os.environ['WORLD_SIZE'] == '2': time.sleep(0.1)"
    )
    words = elastic(tmp_path / "c", "-H", "one,two")
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MASTER_ADDR": "127.0.0.1"}
    run = poprun(*words, sys.executable, "-S", "-c", program, **variables)
    assert run.wait() == 0, run.said()
    assert "ended with exit code 137: the others go on" in run.said()
    assert "instance 1 of 2" in run.said() and "instance 0 of 1" in run.said()
    assert run.nothing_left()


def test_a_node_that_stops_is_lost_and_takes_part_again_when_it_continues(poprun, tmp_path, undisturbed):
    """Two nodes with 2 instances each; the agent of the first gets SIGSTOP, and later SIGCONT."""
    words = command(tmp_path, "--instances-per-node=2", holds=["1-0", "4-0", "7-0"], instances="2:4")
    first = poprun("-v", *words)
    first.until("holds 1-0 of 2")
    second = poprun("-v", *words)
    first.until("a node has come")
    (tmp_path / "go-1-0").touch()
    first.until("holds 4-0 of 4")
    agent = first.agent()
    os.kill(agent, signal.SIGSTOP)
    second.until("lost: poprun has ended there, it is stopped, or the host does not answer")
    second.until("holds 4-0 of 2")
    os.kill(agent, signal.SIGCONT)
    second.until("a node has come")
    (tmp_path / "go-4-0").touch()
    second.until("holds 7-0 of 4")
    (tmp_path / "go-7-0").touch()
    assert (first.wait(), second.wait()) == (0, 0), first.said() + second.said()
    assert difference(outcome(tmp_path, 4), undisturbed) == ""
    assert first.nothing_left() and second.nothing_left()


def test_a_stopped_node_is_named_and_left_out_when_an_instance_of_another_node_fails(poprun, tmp_path):
    """All waited for its record for ever, in silence."""
    program = (
        "import os, time\n"
        "print(os.environ['PANDO_RESTARTS'], 'runs', os.environ['WORLD_SIZE'] + '.', os.getpid(), flush=True)\n"
        "while os.environ['WORLD_SIZE'] == '2': time.sleep(0.1)"
    )
    words = elastic(tmp_path, ONE_EACH)
    runs = nodes(poprun, *words, *PYTHON, program)
    for run in runs:
        run.until("0 runs 2.")
    (line,) = [line for line in runs[0].said().splitlines() if "runs 2." in line]
    os.kill(runs[1].agent(), signal.SIGSTOP)
    os.kill(int(line.split()[-1]), signal.SIGKILL)
    runs[0].until("runs 1.")
    assert runs[0].wait() == 0, runs[0].said()
    names = re.search(r"round 0 of 2 instances begins: 1 on (\S+), 1 on (\S+)\n", runs[0].said())
    assert names is not None
    assert f"node {names[2]} lost: poprun has ended there, it is stopped" in runs[0].said()


STAYS = (
    "import os, sys, time\n"
    "print('attempt', os.environ['PANDO_RESTARTS'], flush=True)\n"
    "while not os.path.exists(sys.argv[1]): time.sleep(0.02)"
)


def test_a_folder_that_can_not_be_made_is_an_error_with_its_fix(poprun, tmp_path):
    (tmp_path / ".poprun").touch()
    words = elastic(tmp_path)
    run = poprun(*words, *PYTHON, "print('here')")
    assert run.wait() == 2 and run.out.read_text() == "", run.said()
    assert "\n  fix: " in run.said() and "Traceback" not in run.said()


@pytest.mark.parametrize("content", ["", "{", "[" * 100_000, '{"number": 7}', '{"what": 1}'])
def test_a_damaged_state_is_replaced_by_the_next_round(poprun, tmp_path, content):
    words = elastic(tmp_path, *PYTHON, STAYS)
    run = poprun(*words, tmp_path / "end")
    run.until("attempt 0")
    (tmp_path / ".poprun" / "node-of-nobody-1").write_text(content)
    (tmp_path / ".poprun" / "state-70").write_text(content)
    run.until("attempt ", times=3)  # two instances of the first round, and one of the next
    (tmp_path / "end").touch()
    assert run.wait() == 0, run.said()
    assert "Traceback" not in run.said()
    assert run.said().count("begins") == 2


@pytest.fixture
def small_disk(tmp_path):
    """A folder with a file system of 512 KB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "pando", str(folder)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip(f"file systems can not be mounted here: {made.stderr}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=240)


def test_on_a_full_disk_the_survivor_of_two_nodes_waits_for_space(poprun, tmp_path, small_disk):
    """It ended with a traceback."""
    words = elastic(small_disk, ONE_EACH)
    runs = nodes(poprun, *words, *PYTHON, STAYS, tmp_path / "end")
    for run in runs:
        run.until("attempt 0")
    with (
        open(small_disk / "another program's", "wb", buffering=0) as file,
        pytest.raises(OSError, match="No space"),
    ):
        while True:
            file.write(bytes(512))
    for record in (small_disk / ".poprun").glob("node-*"):
        until_changed(record)  # renewing needs no space
    os.kill(runs[0].pid, signal.SIGKILL)
    runs[1].until("No space left on device; this node tries again")
    (small_disk / "another program's").unlink()
    runs[1].until("attempt 1")
    (tmp_path / "end").touch()
    assert runs[1].wait() == 0, runs[1].said()
