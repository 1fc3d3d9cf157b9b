"""A plan before anything has run: what it says is what the run then does."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from simulated import MS, simulated
from test_page import wide
from test_runs import ROWS, WIDTH, Model

import poptorch
from popvision import plan
from popvision.cli import main

PROGRAM = """
import poptorch, sys, torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = poptorch.BeginBlock(torch.nn.Linear(8, 8), "first", ipu_id=0)
        self.last = poptorch.BeginBlock(torch.nn.Linear(8, 8), "last", ipu_id=1)

    def forward(self, x):
        return poptorch.identity_loss(self.last(self.first(x)), "mean")

options = poptorch.Options()
options.Training.gradientAccumulation(int(sys.argv[1]))
try:
    poptorch.trainingModel(Model(), options)(torch.randn(4 * 2, 8))
finally:
    print("the end")
print("something was computed")
"""


def planned(**more):
    options = poptorch.Options().deviceIterations(2)
    options.Training.gradientAccumulation(5)
    model = Model()
    trainer = poptorch.trainingModel(model, options, poptorch.optim.AdamW(model.parameters(), lr=0.01))
    return poptorch.describe(trainer, batch=torch.randn(2 * 5 * ROWS, WIDTH))


def test_the_page_shows_stages_the_timeline_and_what_bounds_it(tmp_path):
    found = planned()
    found.save(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert "<title>Plan: pipelined training, 3 stage(s) on 3 ipu(s), 1 replica(s)</title>" in page
    assert page.count("<rect") == 2 * 3 * 5  # forward and backward of three stages for five micro-batches
    assert "backward of stage 2, micro-batch 4" in page
    linear = 2 * ROWS * WIDTH * WIDTH
    assert f"<td>{linear:,}</td>" in page
    assert "of 3 ipu" not in page and "http" not in page


def test_the_page_is_no_wider_than_a_narrow_window(chromium, tmp_path):
    planned().save(tmp_path / "plan.html")
    chromium.open(tmp_path / "plan.html")
    wide(chromium, 420)
    try:
        assert chromium.value("document.documentElement.scrollWidth") <= 420
    finally:
        wide(chromium, 1400)


def test_the_bottleneck_is_the_ipu_with_the_most_to_do():
    profile = simulated(3, 60, blocks=("A", "B, C, D, E", "F"))
    profile = plan.estimated(profile)  # each operation has the same FLOPs
    say = plan.bottleneck(profile)
    assert say[0].startswith("ipu 1 has the most to do: 2.00 times the average ipu.")
    few = plan.bottleneck(plan.estimated(simulated(3, 5)))
    assert few[1].startswith(
        "options.Training.gradientAccumulation(20) would make it 1.27 times as fast there."
    )


def test_a_program_is_run_until_its_first_model_is_compiled(tmp_path, monkeypatch, capfd):
    (tmp_path / "train.py").write_text(textwrap.dedent(PROGRAM))
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "train.py", "4"]) == 0
    out = capfd.readouterr().out
    assert "the end" in out and "something was computed" not in out
    assert "options.Training.gradientAccumulation(" in out
    assert "first" in (tmp_path / "plan.html").read_text()
    (tmp_path / "empty.py").write_text("print('hello')")
    assert main(["plan", "empty.py"]) == 1
    assert "empty.py compiled no model (it ended with 0)" in capfd.readouterr().err


def test_a_reader_that_has_seen_enough_ends_the_program_quietly(tmp_path):
    simulated(3, 4, cost=lambda phase, stage: MS).save(tmp_path / "training" / "profile.pop")
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "popvision", "summary", tmp_path],
        stdout=write,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("training", [True, False])
def test_a_plan_of_an_executable_without_its_graph_has_a_page_too(tmp_path, training):
    profile = simulated(2, 3, training=training)
    bare = [operation._replace(flops=0, bytes=0) for operation in profile.operations]
    plan.write(
        profile.__class__(**{**vars(profile), "operations": tuple(bare), "tracks": ()}), tmp_path / "p.html"
    )
    assert (tmp_path / "p.html").read_text().count("<rect") == 3 * 2 * (1 + training)
