"""The budget of `make test`: what it allows, and that the table of measured seconds keeps within it."""

import re
from pathlib import Path

import budget

ROOT = Path(__file__).parents[1]
NODES = [f"f.py::test[{layout}-{size}]" for layout in ("one", "two", "three") for size in (1, 2)]


def chosen(seconds, nodes=NODES, fixtures=(), always=False, **rows):
    return budget.chosen("f.py::test", nodes, fixtures, always, {"f.py::test": (seconds, len(nodes)), **rows})


def test_all_items_of_a_cheap_function_run_and_none_of_a_dear_one():
    assert chosen(0.05) == set(NODES)
    assert len(chosen(0.2)) == 4
    assert len(chosen(0.45)) == 2
    assert chosen(2.5) == set()
    assert len(chosen(2.5, always=True)) == 1


def test_a_function_whose_shared_fixture_is_dear_does_not_run():
    fixture = {"f.py::fixture reference": (9.0, 1)}
    assert chosen(0.05, fixtures=["tmp_path", "reference"], **fixture) == set()
    assert chosen(0.05, fixtures=["tmp_path"], **fixture) == set(NODES)


def test_each_value_of_each_parameter_comes_before_a_second_combination():
    three = budget.by_kind(NODES, 3)
    assert {node.partition("[")[2].partition("-")[0] for node in three} == {"one", "two", "three"}
    assert {node[-2] for node in three} == {"1", "2"}


def test_a_table_that_was_saved_is_loaded(tmp_path):
    table = {"a.py::test_x": (0.5, 3), "a.py::fixture y": (1.0, 1), "b.py::test_z": (0.25, 1)}
    budget.save(table, tmp_path / "table.json")
    assert budget.load(tmp_path / "table.json") == table


def written():
    """Return the functions of all test files, and those with the mark `kind`."""
    functions, always = set(), set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for mark, name in re.findall(
            r"((?:^@.*\n|^[ )].*\n)*)^def (test_\w+)", path.read_text(), re.MULTILINE
        ):
            functions.add(f"{path.relative_to(ROOT).as_posix()}::{name}")
            if "@pytest.mark.kind(" in mark:
                always.add(f"{path.relative_to(ROOT).as_posix()}::{name}")
    return functions, always


def test_what_runs_costs_no_more_than_the_budget():
    table, (functions, always) = budget.load(), written()
    cost = 0.0
    for function in functions:
        seconds, items = table.get(function, (budget.UNMEASURED, 1))
        nodes = [f"{function}[{item}]" for item in range(items)]
        cost += seconds * len(budget.chosen(function, nodes, (), function in always, table))
    assert cost <= budget.ALL, "move the dearest functions of tests/durations.json below a second"
    assert len(always) > 12


def test_nearly_all_functions_are_in_the_table():
    functions, _ = written()
    missing = sorted(functions - budget.load().keys())
    assert len(missing) < len(functions) / 5, f"make durations FILES=...: {missing[:20]}"
