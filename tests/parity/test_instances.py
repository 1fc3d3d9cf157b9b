"""Instances: processes that train together compute what one process with all their replicas computes."""

import os
import subprocess
import sys
from pathlib import Path

import parity_instance
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "popdist"))

from ports import free_port

import poptorch
from popengine.environment import Launch

PROGRAM = Path(parity_instance.__file__)


def run(tmp_path, instances, replicas, *how):
    """Start the instances as a launcher would, and collect what they leave."""
    port = free_port()
    launches = [
        Launch(instances * replicas, replicas, 2, i * replicas, i, instances, i) for i in range(instances)
    ]
    processes = [
        subprocess.Popen(
            [sys.executable, PROGRAM, tmp_path / f"{launch.instance}.pt", *how],
            env={
                **os.environ,
                **launch.variables(),
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": str(port),
            },
        )
        for launch in launches
    ]
    try:
        assert [process.wait(timeout=300) for process in processes] == [0] * instances
    finally:
        for process in processes:
            process.kill()
    return [torch.load(tmp_path / f"{i}.pt") for i in range(instances)]


@pytest.mark.parametrize("replicas", [1, 2], ids=["one replica each", "two replicas each"])
def test_two_instances_train_to_the_bits_of_one_with_all_replicas(tmp_path, replicas):
    first, second = run(tmp_path, 2, replicas)
    losses, weights = parity_instance.trained(poptorch.Options().replicationFactor(2 * replicas), 1, 0)
    for _, mine in (first, second):
        assert [name for name in weights if not torch.equal(mine[name], weights[name])] == []
    for call, expected in enumerate(losses):
        halves = torch.stack([result[0][call].reshape(-1, replicas) for result in (first, second)], dim=1)
        assert torch.equal(halves.flatten(), expected)


def test_an_instance_that_others_have_left_says_so(tmp_path):
    left, early = run(tmp_path, 2, 1, "second leaves early")
    assert early is None
    assert "another instance has left the run" in left and "same number of calls" in left
