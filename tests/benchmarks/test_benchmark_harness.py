"""What the benchmarks' figures are made of: calm rounds, and shares of the two-core limit."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def harness(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("harness")


@pytest.fixture
def comparison(harness):
    return importlib.import_module("comparison")


def test_a_median_is_of_the_rounds_in_which_nobody_else_used_the_cores(harness):
    measured = harness.Measurement("ours", 1.0, (2.0, 9.0, 3.0, 4.0), (0.0,) * 5, (0.0, 1.3, 0.02, -0.01))
    assert measured.calm == (2.0, 3.0, 4.0)
    assert measured.median == 3.0


def test_without_a_calm_round_the_median_is_of_all(harness, comparison):
    measured = harness.Measurement("ours", 1.0, (2.0, 9.0, 3.0), (0.0,) * 4, (0.5, 1.3, 0.7))
    assert measured.median == 3.0
    assert "no calm round" in comparison.calm([measured])


def test_time_that_a_process_spends_is_seen(harness):
    own, used = harness.used_by(None), harness.cores_used()
    assert own == 0.0  # no such process
    assert used > 0.0


def test_a_layout_is_held_against_half_the_time_of_its_pieces_in_a_row(harness, comparison):
    layouts = {"ours": comparison.Ours("2 ipus", ((0, "a"), (1, "b")))}
    measured = [
        harness.Measurement("Pando, 2 ipus", 5.0, (1.25,), (0.0, 0.0)),
        harness.Measurement(comparison.LIMIT, 5.0, (2.0,), (0.0, 0.0)),
    ]
    assert comparison.two_core_limit(measured, layouts) == ["two-core limit: 1.000 s; reached by 2 ipus 80%"]


def test_the_limit_is_of_the_first_layouts_pieces_on_one_core(comparison, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS / "resnet")
    task = importlib.import_module("resnet").TASK
    found = comparison.contenders(task, {"ours": comparison.Ours("2 ipus", ((0, "stem"), (1, "head")))})
    assert found["one"].setup.keywords["placement"] == ((0, "stem"), (1, "head"))
    assert found["one"].setup.keywords["threads"] == 1
    rivals = ["plain1", "plain2", "best2", "large2", "compile2", "gloo2", "ddp2", "ddpc2"]
    assert [*found] == ["ours", "one", *rivals]
