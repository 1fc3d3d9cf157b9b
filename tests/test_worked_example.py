"""The example that the architecture is explained by prints what stands there."""

import ast
import re
import runpy
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_the_excerpts_of_the_newcomers_path_are_what_the_worked_example_prints(capsys):
    runpy.run_path(str(DOCS / "worked_example.py"), run_name="__main__")
    printed = {line.strip() for line in capsys.readouterr().out.splitlines()}
    section = (DOCS / "architecture.md").read_text().split("## The newcomer's path")[1].split("\n## ")[0]
    excerpts = [
        line.strip()
        for block in re.findall("```text\n(.*?)```", section, re.S)
        for line in block.splitlines()
    ]
    assert len(excerpts) > 10
    assert not [line for line in excerpts if line not in printed]


def definitions(node, prefix=""):
    """Yield the name of each function, class and method."""
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            yield prefix + child.name
        if isinstance(child, ast.ClassDef):
            yield from definitions(child, f"{prefix}{child.name}.")


def test_the_newcomers_path_exists():
    section = (DOCS / "architecture.md").read_text().split("## The newcomer's path")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(pop\w+/[\w/]+\.py)` \|(.*?)\|", section, re.M)
    assert len(rows) == 15
    for file, names in rows:
        defined = set(definitions(ast.parse((DOCS.parent / "src" / file).read_text())))
        assert set(re.findall(r"`([\w.]+)`", names)) <= defined, file
