"""The benchmarks of the engine alone run; those against rivals take minutes, and are run by hand."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import quick_python

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(benchmark: str, *flags: str) -> str:
    command = [*quick_python.words(), BENCHMARKS / benchmark / "main.py", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "command: python" in done.stdout
    return done.stdout


def test_the_engines_overhead_is_measured():
    output = run("overhead", "--quick", "--rounds", "1")
    assert re.search(r"^\| 4 +\| +4 \| +64 \| +[\d.]+ \|", output, re.MULTILINE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_benchmark_of_gpus_says_that_there_is_none():
    program = [*quick_python.words(), BENCHMARKS / "gpu" / "main.py"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=240, check=True)
    assert re.search("finds no GPU: nothing is measured", done.stdout)


def test_the_ways_to_train_of_the_benchmark_of_gpus_run_on_the_cpu():
    program = [sys.executable, BENCHMARKS / "gpu" / "main.py", "--tiny"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=600, check=True)
    rows = re.findall(r"^\| (.+) \| (plain|Pando) \| [\d.]+ \| [\d.]+ \|", done.stdout, re.MULTILINE)
    assert len(rows) == 8, done.stdout
    assert "a CPU has no CUDA graphs" in done.stdout


def test_a_plan_for_64_ipus_and_1024_micro_batches_is_built():
    output = run("start", "--only", "passes", "--repeats", "1")
    assert re.search(r"^\| 64 +\| +1024 \| +131,072 \|", output, re.MULTILINE)


def test_two_processes_are_measured_against_ddp_and_their_sum_of_gradients_against_all_reduce():
    flags = ("--accumulation", "1", "--processes", "2", "--megabytes", "1", "--rounds", "1")
    output = run("instances", "--cases", "bert", *flags)
    assert re.search(r"^\| DDP, shared state\b.*\|$|^\| .*Zero.*\|$", output, re.MULTILINE)
    assert re.search(r"the sum of 1 MB in 2 processes: [\d.]+ ms, all_reduce [\d.]+ ms", output)


def test_the_memory_of_four_processes_is_measured_against_one():
    output = run("parts", "--rounds", "0", "--layers", "4")
    assert re.search(r"^\| 4, made on meta +\| .* 0\.25 \|$", output, re.MULTILINE)


@pytest.mark.skipif(find_spec("lightning") is None, reason="Lightning is not installed")
def test_lightnings_trainers_make_the_same_updates():
    output = run("lightning", "--rounds", "1", "--calls", "1", "--only", "ipu2", "loop2")
    assert re.search(r"^\| Trainer, CPU, 2 threads .* 1\.00× \|", output, re.MULTILINE)
    found = re.search(r"losses of the contenders differ by at most (\S+)", output)
    assert found and float(found[1]) < 1e-3
