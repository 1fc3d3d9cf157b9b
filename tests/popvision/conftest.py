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

    def table(columns, rows):
        return [dict(zip(columns, row, strict=True)) for row in rows]

    names = ("calls", "tasks", "blocks", "tensors")
    found = {**data, **{name: table(data[name]["columns"], data[name]["rows"]) for name in names}}
    moves = [
        {**task, "task": i, **part}
        for i, task in enumerate(found["tasks"])
        for part in table(Instruction._fields, task["instructions"])
    ]
    # An operation's share was measured, and what it is a share of is the cost of its row in the table.
    figures = Figures(load(folder / "training" / "profile.pop"))
    operations, runs = figures.timed.operations, figures.devices.runs
    rows = {"operations": [row._asdict() for row in operations], "devices": [run._asdict() for run in runs]}
    return {**found, "moves": moves, **rows}
