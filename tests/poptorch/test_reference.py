"""The tables of docs/reference, held against the package, both ways: neither can drift from the other."""

import importlib
import inspect
import re
import runpy
import types
from pathlib import Path

import pytest
import torch

import lightning_graphcore
import popdist
import popdist.collectives
import popdist.poptorch
import popengine.environment
import poptorch
import poptorch.logs
from poptorch.compiling.compilation_log import HARDWARE_RULES
from poptorch.logs import RECORDED

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
HEADING = re.compile(r"^## `([\w.]+)`( arguments| members)?$")
ROW = re.compile(r"^\| `?(\w+)(?:\(.*?\)`)? \| ([\w ]+) \| .*\|$")


def tables():
    """{(what, kind): [(name, answer), ...]}"""
    found, here = {}, None
    for path in sorted(set(FOLDER.glob("*.md")) - {FOLDER / "options.md"}):  # made of docstrings
        for line in path.read_text().splitlines():
            if line.startswith(("# ", "## ")):  # a ### is a task inside a module
                heading = HEADING.match(line)
                here = (heading[1], (heading[2] or "").strip()) if heading else (path.stem, "")
            elif (row := ROW.match(line)) and row[1] != "name":
                found.setdefault(here, []).append((row[1], row[2]))
    return found


TABLES = tables()
LAZY = {"popdist": {"Checkpoint", "resumable"}}  # imported at their first use


def resolved(path):
    """The object with a dotted name."""
    parts = path.split(".")
    value = importlib.import_module(parts[0])
    for part in parts[1:]:
        value = getattr(value, part)
    return value


def exported(what, kind):
    """The public names of a module or class, the parameters of a constructor, the members of an enum."""
    if what.startswith("lightning"):
        pytest.importorskip("lightning")
    if what == "lightning_graphcore":
        return set(lightning_graphcore._NAMES)
    if kind == "members":
        return set(resolved(what).__members__)
    if kind == "arguments":
        return set(inspect.signature(resolved(what).__init__).parameters) - {"self"}
    value = resolved(what)
    if what == "poptorch":
        return {n for n in dir(value) if not isinstance(getattr(value, n), types.ModuleType)} - {
            "__version__"
        }
    if isinstance(value, types.ModuleType):
        return set(value.__all__) | LAZY.get(what, set())
    return _names_of(value)


def _names_of(kind):
    """Public methods, properties and declared fields, of its bases too."""
    bases = [kind] if kind is popdist.poptorch.Options else kind.__mro__  # the others are in options.md
    return {
        name
        for base in bases
        if base.__module__.startswith(("poptorch", "popdist", "popvision"))
        for name in {**vars(base), **vars(base).get("__annotations__", {})}
        if not name.startswith("_")
    }


WITHOUT_EXPORTS = ("environment", "optimizers")  # variables; the arguments of all optimizers together


@pytest.mark.parametrize(("what", "kind"), [key for key in TABLES if key[0] not in WITHOUT_EXPORTS])
def test_a_table_lists_what_is_exported(what, kind):
    assert sorted(name for name, _ in TABLES[what, kind]) == sorted(exported(what, kind))


def test_the_operations_of_torch_ops_are_named():
    _ = torch.ops.poptorch.nop  # the first use registers them
    schemas = [s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("poptorch::")]
    section = (FOLDER / "names.md").read_text().partition("## `torch.ops.poptorch`")[2]
    named = set(re.findall(r"`(\w+)`", section)) - {"poptorch", "CPU", "custom_op"}
    assert named == {name.removeprefix("poptorch::") for name in schemas}


@pytest.mark.parametrize(("what", "kind"), TABLES)
def test_every_name_has_one_of_three_answers(what, kind):
    assert {answer for _, answer in TABLES[what, kind]} <= {"real", "no effect", "refused"}


def test_every_enum_has_a_table():
    enums = {n for n in poptorch.enums.__all__ if getattr(poptorch.enums, n).__name__ == n}
    assert {what for what, kind in TABLES if kind == "members"} == {f"poptorch.{name}" for name in enums}


def test_every_optimizer_has_a_column_with_its_arguments():
    section = (FOLDER / "optimizers.md").read_text().partition("## Arguments\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    head, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    listed = {title: {row[0] for row in rows if row[index]} for index, title in enumerate(head)}
    optimizers = set(poptorch.optim.__all__) - {"Optimizer", "VariableAttributes"}
    assert {name: listed[name] for name in optimizers} == {
        name: set(inspect.signature(getattr(poptorch.optim, name)).parameters) for name in optimizers
    }


def test_signatures_do_not_show_the_environment():
    # A default `environment=os.environ` prints all variables, secrets too, in help() and in signature tools.
    functions = [value for value in vars(popengine.environment).values() if inspect.isfunction(value)]
    functions.append(poptorch.logs.log_ignored_variables)
    assert [f.__name__ for f in functions if "environ(" in str(inspect.signature(f))] == []


def test_the_page_of_options_is_made_of_their_docstrings():
    # They were two texts, and contradicted each other: stochastic rounding was real in one only.
    made = runpy.run_path(str(FOLDER.parent / "options_reference.py"))["page"]()
    assert (FOLDER / "options.md").read_text() == made, "make reference"


@pytest.mark.parametrize("name", ["names", "executor", "../profile-format"])
def test_the_signatures_and_figures_of_a_page_are_made_from_the_code(name):
    page = FOLDER / f"{name}.md"
    made = runpy.run_path(str(FOLDER.parent / "names_reference.py"))["page"](page)
    assert page.read_text() == made, "make reference"


def test_the_page_of_optimizers_is_made_of_their_signatures():
    made = runpy.run_path(str(FOLDER.parent / "optimizers_reference.py"))["page"]()
    assert (FOLDER / "optimizers.md").read_text() == made, "make reference"


def test_the_environment_has_all_variables_without_effect():
    listed = dict(TABLES["environment", ""])
    assert {name for name in RECORDED if listed[name] != "no effect"} == set()
    assert listed[HARDWARE_RULES] == "real"
