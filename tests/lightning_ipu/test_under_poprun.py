"""Two processes that poprun starts train one module: equal weights, and logged values of all rows."""

import json
import sys
from pathlib import Path

import program_of_instances
import pytest

import quick_python

sys.path.insert(0, str(Path(__file__).parents[1] / "poprun"))

from launching import Poprun


def test_two_instances_train_as_one_process_with_two_replicas(tmp_path):
    alone, together = tmp_path / "alone", tmp_path / "together"
    alone.mkdir()
    together.mkdir()
    program_of_instances.main(alone)
    words = ("--num-replicas", 2, "--num-instances", 2)
    poprun = Poprun(tmp_path, (*words, *quick_python.words(), program_of_instances.__file__, together))
    assert poprun.wait() == 0, poprun.said()
    assert "left out" not in poprun.said()  # each reads its half, and nothing is missing
    expected = json.loads((alone / "0.json").read_text())
    first, second = (json.loads((together / f"{rank}.json").read_text()) for rank in range(2))
    assert first["own"] != second["own"]
    assert (first["own"] + second["own"]) / 2 == pytest.approx(first["mean"])
    for found in (first, second):
        assert found.pop("world_size") == 2
        found.pop("own")
    assert first == second
    assert expected.pop("world_size") == 1
    expected.pop("own")
    flat = {name: value for name, value in first.items() if isinstance(value, (int, float))}
    assert flat == pytest.approx({name: expected[name] for name in flat})
    assert first["last.weight"] == [pytest.approx(row) for row in expected["last.weight"]]
    assert (together / "best.ckpt").exists()
