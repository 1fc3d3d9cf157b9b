"""The benchmark for GPUs can be tried without one, on small models."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"


def run(*flags):
    return subprocess.run(
        [sys.executable, GPU / "main.py", *flags], capture_output=True, text=True, timeout=600, check=False
    )


@pytest.fixture
def program(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(GPU), *sys.path])
    monkeypatch.delitem(sys.modules, "main", raising=False)
    yield importlib.import_module("main")
    sys.modules.pop("main")


def test_it_measures_small_models_on_the_cpu():
    some = ("--cases", "resnet", "--only", "unsplit", "four")
    done = run("--device", "cpu", "--tiny", "--rounds", "1", *some)
    assert done.returncode == 0, done.stderr[-4000:]
    for name in ("Pando, 1 ipu", "Pando, 4 ipus"):
        assert re.search(rf"^\| {name} +\| +[\d.]+ \|", done.stdout, re.MULTILINE)
    assert re.search(r"^four stages / unsplit: [\d.]+ ", done.stdout, re.MULTILINE)
    (difference,) = re.findall(r"losses differ by at most (\S+)", done.stdout)
    assert float(difference) < 1e-3
    assert "command: python" in done.stdout


def test_without_a_gpu_it_says_what_is_missing():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    done = run()
    assert done.returncode == 2
    assert "no NVIDIA GPU" in done.stderr
    assert "--device cpu --tiny" in done.stderr


def test_rivals_make_the_losses_that_plain_pytorch_makes(program, monkeypatch):
    ways = importlib.import_module("ways")
    monkeypatch.setattr(torch, "compile", lambda function, mode=None: function)  # minutes, and not ours
    _, task = program.CASES["mnist"].tasks()
    threads = torch.get_num_threads()
    plain = ways.plain(0, task, threads=1)
    rival = ways.compiled(0, task, threads=1, mode="reduce-overhead")
    assert [plain(), plain()] == [rival(), rival()]
    torch.set_num_threads(threads)


def test_figures_are_held_against_the_aims(program):
    median = {program.UNSPLIT: 1.0, program.FOUR: 1.02, program.INDUCTOR: 0.8, program.COMPILED: 0.76}
    assert program.aims(program.CASES["bert"], median) == [
        "four stages / unsplit: 1.020 (aim: at most 1.03): reached",
        "speed over torch.compile, reduce-overhead: 0.95 (aim: 1.0 or more): missed",
    ]
    assert program.aims(program.CASES["mnist"], {program.EAGER: 1.0}) == []


def test_the_stages_of_a_case_are_all_its_blocks(program):
    for case in program.CASES.values():
        _, tiny = case.tasks()
        blocks = tiny.blocks(tiny.model())
        assert " ".join(case.stages).split() == [*blocks]


def test_a_contender_that_fails_is_left_out_where_others_can_go_on(program):
    harness = importlib.import_module("harness")
    good = harness.Contender("good", works)
    bad = harness.Contender("bad", fails)
    told = []
    (measured,) = harness.measure([bad, good], 2, told.append, warm=3, lenient=True)
    assert (measured.name, len(measured.rounds), measured.numbers) == ("good", 2, (1.0,) * 5)
    assert measured.memory > 2**20
    assert "no luck" in told[0]
    with pytest.raises(RuntimeError, match="no luck"):
        harness.measure([bad], 1, told.append)


def works(rank):
    return lambda: 1.0


def fails(rank):
    raise ValueError("no luck")
