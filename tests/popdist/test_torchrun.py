"""torchrun starts instances, too, which share the replicas that the program asks for."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import processes
import pytest
import torch
from checkpoint_program import difference
from ports import free_port

PROGRAM = Path(__file__).with_name("checkpoint_program.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--monitor-interval", "0.1")
CALLS = 4


def torchrun(folder, *options, flags=()):
    """Start torchrun with a program of two replicas, which writes its output to a file; return both."""
    folder.mkdir(exist_ok=True)
    log = folder / f"log-{len(list(folder.iterdir()))}"
    with log.open("w") as file:
        program = (PROGRAM, folder, CALLS, "--replicas", 2, *flags)
        words = [str(word) for word in (*TORCHRUN, *options, *program)]
        return subprocess.Popen(
            words, stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"}
        ), log


def outcome(folder, instances):
    """What the instances have at the end, together."""
    results = [torch.load(folder / f"result-{instance}.pt") for instance in range(instances)]
    whole = {
        kind: {k: v for one in results for k, v in one[kind].items()} for kind in ("weights", "optimizer")
    }
    buffers = [buffers for one in results for buffers in one["buffers"]]
    return {**{name: results[0][name] for name in ("rates", "random")}, **whole, "buffers": buffers}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    run, log = torchrun(folder, "--standalone", "--nproc-per-node", "1")
    assert run.wait(processes.LIMIT) == 0, log.read_text()
    return outcome(folder, 1)


def test_one_and_two_processes_end_in_the_same_bits(tmp_path, undisturbed):
    run, log = torchrun(tmp_path, "--standalone", "--nproc-per-node", "2")
    assert run.wait(processes.LIMIT) == 0, log.read_text()
    assert difference(outcome(tmp_path, 2), undisturbed) == ""


def test_an_elastic_run_of_torchrun_of_which_a_process_was_killed_ends_in_the_same_bits(
    tmp_path, undisturbed
):
    """Two nodes, which are processes of this machine; all restart, and resume from the newest checkpoint."""
    words = ("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d")
    meeting = ("--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-conf", "last_call_timeout=20")
    nodes = [torchrun(tmp_path, *words, *meeting, flags=("--hold", 3)) for _ in range(2)]

    def said():
        return "".join(log.read_text() for _, log in nodes)

    try:
        until = time.monotonic() + processes.LIMIT
        while said().count("held in ") < 2:
            assert time.monotonic() < until and all(run.poll() is None for run, _ in nodes), said()
            time.sleep(0.05)
        os.kill(int(re.findall(r"held in (\d+)", said())[0]), signal.SIGKILL)
        (tmp_path / "go").touch()
        assert [run.wait(processes.LIMIT) for run, _ in nodes] == [0, 0], said()
    finally:
        for run, _ in nodes:
            run.terminate()
    assert "begins at call 2" in said()
    instances = len(list(tmp_path.glob("result-*.pt")))
    assert difference(outcome(tmp_path, instances), undisturbed) == ""
