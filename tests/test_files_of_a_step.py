"""A step of AdamW passes through few files, and `docs/architecture.md` lists them."""

import re
import sys
import threading
from pathlib import Path

import processes
import torch
from torch import nn

import popdist
import popengine
import poptorch
from popengine.run.engine import Engine

FOLDER = Path(popengine.__file__).parent
SECTION = "## The files of a step"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x, label):
        with poptorch.Block("a"):
            x = self.norm(self.first(x)).relu()
        with poptorch.Block("b"):
            return nn.functional.cross_entropy(self.last(x), label)


def files_of_a_step(several=False):
    """The files of the engine, in which a function is called while the second call of an executor runs."""
    if several:
        popdist.init()
    found, is_running = set(), False

    def note(frame, event, argument):
        if is_running and frame.f_code.co_filename.startswith(str(FOLDER)):
            found.add(Path(frame.f_code.co_filename).relative_to(FOLDER).as_posix())

    threading.setprofile(note)  # of threads that are started from now on
    try:
        opts = popdist.poptorch.Options() if several else poptorch.Options()
        opts.showCompilationProgressBar(False).Training.gradientAccumulation(4)
        opts.setExecutionStrategy(poptorch.PipelinedExecution("a", "b"))
        model = Net()
        executor = poptorch.trainingModel(model, opts, torch.optim.AdamW(model.parameters()))
        batch = torch.randn(8, 8), torch.arange(8) % 4
        executor(*batch)
        engine = executor._plans.engine
        assert isinstance(engine, Engine)
        run = engine.run

        def running(*arguments):
            nonlocal is_running
            is_running = True
            sys.setprofile(note)
            try:
                return run(*arguments)
            finally:
                sys.setprofile(None)
                is_running = False

        engine.run = running
        executor(*batch)
        executor.destroy()
    finally:
        threading.setprofile(None)
    return found


def listed():
    """The files in the document, and those that only a step of several processes passes through."""
    text = (FOLDER.parents[1] / "docs" / "architecture.md").read_text()
    section = text.split(SECTION)[1].split("\n## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    files = [(re.findall(r"`([\w/]+\.py)`", name), "several processes" in what) for name, what in rows]
    return ({f for names, apart in files if apart is several for f in names} for several in (False, True))


def test_a_step_in_one_process_passes_through_the_listed_files():
    always, _ = listed()
    assert files_of_a_step() == always
    assert len(always) <= 18


def test_a_step_in_two_processes_passes_through_few_more():
    always, several = listed()
    ended = processes.run(files_of_a_step, 2, True)
    assert [one.error for one in ended] == ["", ""]
    assert ended[0].value == always | several
    assert len(always | several) <= 22
