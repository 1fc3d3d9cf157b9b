"""One training over two hosts: two network namespaces of this machine, each with an address of its own."""

import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).parents[1] / "popdist" / "checkpoint_program.py"
LIMIT = 300  # seconds, on a machine that does much else


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20, check=False)


@pytest.fixture
def hosts():
    """Names of two namespaces that are joined by a cable; their addresses are 10.77.0.1 and 10.77.0.2."""
    if shutil.which("ip") is None:
        pytest.skip("needs the program ip, of Debian's package iproute2")
    names = [f"pando{number}-{uuid.uuid4().hex[:6]}" for number in range(2)]
    try:
        for name in names:
            if (made := ip("netns", "add", name)).returncode:
                pytest.skip(f"network namespaces are not allowed here: {made.stderr.strip()}")
        cable = ["link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable"]
        if (made := ip(*cable, "netns", names[1])).returncode:
            pytest.skip(f"there are no cables between namespaces here: {made.stderr.strip()}")
        for number, name in enumerate(names):
            assert ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "cable").returncode == 0
            for device in ("lo", "cable"):
                assert ip("-n", name, "link", "set", device, "up").returncode == 0
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


def test_a_training_over_two_hosts_has_equal_weights(hosts, tmp_path):
    common = {
        "POPRUN_NUM_NODES": "2",
        "MASTER_ADDR": "10.77.0.1",
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "cable",
        "POPRUN_NODE_TIMEOUT": str(LIMIT),
    }
    poprun = [sys.executable, "-m", "poprun", "--num-replicas=2", "--num-instances=2"]
    runs = [
        subprocess.Popen(
            ["ip", "netns", "exec", host, *poprun, sys.executable, PROGRAM, tmp_path, "3"],
            env={**os.environ, **common, "POPRUN_NODE_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, host in enumerate(hosts)
    ]
    try:
        said = [run.communicate(timeout=LIMIT)[0] for run in runs]
    finally:
        for run in runs:
            run.terminate()
            run.wait(30)
    assert [run.returncode for run in runs] == [0, 0], said
    first, second = (torch.load(tmp_path / f"result-{instance}.pt") for instance in range(2))
    assert [n for n, w in first["weights"].items() if not torch.equal(w, second["weights"][n])] == []
    assert not torch.equal(
        first["buffers"][0]["norm.running_mean"], second["buffers"][0]["norm.running_mean"]
    )
