"""A training of 8 replicas goes on with the instances that are there, to the bits of one process.

`elastic_scripts.py` does the same with random scripts.
"""

import os
import signal

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


@pytest.mark.parametrize("seed", range(10))
def test_a_random_script_of_kills_stops_and_returns_ends_in_the_undisturbed_state(
    poprun, tmp_path, undisturbed, seed
):
    done, instances = play(poprun, tmp_path, seed)
    assert difference(outcome(tmp_path, instances), undisturbed) == "", done
