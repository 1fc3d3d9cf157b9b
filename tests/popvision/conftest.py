import json

import browser
import pytest
import test_runs

from popengine.profile import load
from popengine.table import Instruction
from popvision.analysis import Figures


@pytest.fixture(scope="module")
def chromium():
    if browser.PROGRAM is None:
        pytest.skip("no Chromium here: apt-get install chromium (.ci/run does)")
    page = browser.Browser()
    yield page
    page.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Stage 1 sleeps, so shares of time are far from zero and one."""
    found = tmp_path_factory.mktemp("report")
    test_runs.train(found, calls=4, slow_block=1)
    return found


@pytest.fixture(scope="session")
def raw(folder):
    data = json.loads((folder / "training" / "profile.pop").read_text())

    def table(name):
        return [dict(zip(data[name]["columns"], row, strict=True)) for row in data[name]["rows"]]

    tables = (
        "calls",
        "runs",
        "tasks",
        "operations",
        "memory",
        "passes",
        "blocks",
        "tensors",
    )
    found = {**data, **{name: table(name) for name in tables}}
    # An operation's share was measured, and what it is a share of is the cost of its row in the table.
    figures = Figures(load(folder / "training" / "profile.pop"))

    def parts(task):
        return [dict(zip(Instruction._fields, part, strict=True)) for part in task["instructions"]]

    simulated = [run._asdict() for run in figures.devices.runs]
    moves = [{**row, "task": i, **part} for i, row in enumerate(found["tasks"]) for part in parts(row)]
    return {
        **found,
        "moves": moves,
        "operations": [row._asdict() for row in figures.timed.operations],
        "devices": simulated,
    }
