"""A training of 8 replicas goes on with the instances that are there, to the bits of one process.

`elastic_scripts.py` does the same with random scripts.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("elastic_program.py")
sys.path.insert(0, str(PROGRAM.parents[1] / "popdist"))

from checkpoint_program import difference  # noqa: E402

CALLS = 12  # two epochs
ROWS = 192


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """What one process with 8 replicas ends with."""
    folder = tmp_path_factory.mktemp("one")
    subprocess.run([sys.executable, PROGRAM, folder, "2"], check=True, timeout=240)
    return outcome(folder, 1)


def outcome(folder, instances):
    """The state after a training, and the rows of each call and replica."""
    results = [torch.load(folder / f"result-{i}.pt") for i in range(instances)]
    assert all(difference(one["weights"], results[0]["weights"]) == "" for one in results)
    buffers = [buffer for one in results for buffer in one["buffers"]]
    state = {name: results[0][name] for name in ("weights", "optimizer", "rates", "random")}
    return {**state, "buffers": buffers, "rows": rows_of(folder)}


def rows_of(folder):
    """The rows of each call, ordered by replica; calls that were made again have to read the same."""
    found = {}
    for path in sorted((folder / "rows").iterdir()):
        call, instance, instances = map(int, path.name.split("-"))
        rows = torch.load(path).view(2, 8 // instances, 2).transpose(0, 1)  # [replica, accumulation, row]
        for replica, values in enumerate(rows, start=instance * (8 // instances)):
            assert found.setdefault((call, replica), values.tolist()) == values.tolist()
    calls = [[found[call, replica] for replica in range(8)] for call in range(CALLS)]
    for epoch in (calls[: CALLS // 2], calls[CALLS // 2 :]):
        assert sorted(torch.tensor(epoch).flatten().tolist()) == list(range(ROWS))
    return calls


def command(folder, *options, holds=(), instances="1:8"):
    words = ("--num-replicas=8", f"--num-instances={instances}", "--checkpoint-dir", folder / "checkpoints")
    return (*words, *options, sys.executable, PROGRAM, folder, 2, *holds)


def kill(run, word=""):
    """SIGKILL for a whole poprun, or for one of its instances."""
    os.kill(run.processes(word)[-1] if word else run.pid, signal.SIGKILL)


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
    kill(first)
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
