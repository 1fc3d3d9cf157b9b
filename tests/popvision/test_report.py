"""`poptorch.Report`: a notebook shows it, and its rows are plain values."""

import json

import pytest
from simulated import MS, simulated

import poptorch


@pytest.fixture
def report(tmp_path):
    simulated(2, 8, cost=lambda phase, stage: MS, gap=MS).save(tmp_path / "training" / "profile.pop")
    simulated(2, 3, training=False).save(tmp_path / "inference" / "profile.pop")
    return poptorch.Report(tmp_path)


def test_figures_are_a_row_for_each_profile_of_plain_values(report):
    rows = report.figures()
    assert [row["profile"] for row in rows] == ["training", "inference"]
    assert rows[0]["step_apart"] == pytest.approx(18e-3)
    assert rows[0]["bubble_ideal"] == pytest.approx(1 / 9)
    assert json.loads(json.dumps(rows)) == rows


def test_the_trace_is_a_row_for_each_run_of_a_task(report):
    rows = [row for row in report.trace() if row["profile"] == "training"]
    assert len(rows) == 3 * 2 * 2 * 8  # steps, ipus, phases, micro-batches
    assert {row["cost"] for row in rows} == {MS}
    first = {name: rows[0][name] for name in ("ipu", "phase", "stage", "micro_batch", "step", "start", "end")}
    assert first == {"ipu": 0, "phase": "F", "stage": 0, "micro_batch": 0, "step": 0, "start": 0, "end": MS}


def test_it_prints_its_headline_and_says_what_is_missing(report, tmp_path):
    assert repr(report).startswith("training: 1f1b training, 2 stages on 2 ipus")
    with pytest.raises(ValueError, match="there is no file or folder"):
        poptorch.Report(tmp_path / "elsewhere").figures()


def test_a_notebooks_cell_shows_the_page(chromium, report, tmp_path):
    cell = tmp_path / "cell.html"
    cell.write_text(f"<!doctype html><body>{report._repr_html_()}")
    chromium.faults.clear()
    chromium.open(cell)
    page = "document.querySelector('iframe').contentDocument.getElementById('main').innerText"
    text = chromium.value(page)
    assert "Throughput" in text and "A step on separate devices" in text
    assert chromium.faults == []
