"""Each benchmark runs, and the ways to train a task make the same losses."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(benchmark: str, *flags: str) -> str:
    command = [sys.executable, BENCHMARKS / benchmark / "main.py", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "command: python" in done.stdout
    return done.stdout


def assert_losses_agree(output: str) -> None:
    found = re.search(r"losses of the contenders differ by at most (\S+)", output)
    assert found and float(found[1]) < 1e-3


def test_replicas_of_resnet_and_distributed_data_parallel_train_alike():
    output = run("resnet", "--rounds", "1", "--updates", "1", "--only", "replicas2", "ddp2")
    assert re.search(r"^\| Pando, 2 replicas ", output, re.MULTILINE)
    assert_losses_agree(output)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_bert_in_a_pipeline_and_in_that_of_torch_train_alike():
    output = run("bert", "--rounds", "1", "--only", "line4", "gloo2")
    assert_losses_agree(output)


def test_the_engines_overhead_is_measured():
    output = run("overhead", "--quick", "--rounds", "1")
    assert re.search(r"^\| 4 +\| +4 \| +64 \| +[\d.]+ \|", output, re.MULTILINE)


def test_a_plan_for_64_ipus_and_1024_micro_batches_is_built():
    output = run("start", "--only", "passes", "--repeats", "1")
    assert re.search(r"^\| 64 +\| +1024 \| +131,072 \|", output, re.MULTILINE)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_the_memory_of_each_layout_is_measured():
    output = run("memory", "--micro-batches", "8")
    rows = dict(re.findall(r"^\| (\w[\w, ]*\w) +\|.* ([\d.]+) \|$", output, re.MULTILINE))
    assert float(rows["sharded"]) < float(rows["pipelined"])
