import json

import browser
import pytest
import test_runs

from popengine.profile import load
from popvision.analysis import Figures
from popvision.times import with_stage_costs


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

    tables = ("calls", "tracks", "parts", "pieces", "operations", "memory", "passes", "blocks", "tensors")
    found = {**data, **{name: table(name) for name in tables}}
    # An operation's share was measured, and what it is a share of is the stage's cost.
    profile = load(folder / "training" / "profile.pop")
    scaled = with_stage_costs(profile, Figures(profile).stages).operations
    return {**found, "operations": [row._asdict() for row in scaled]}
