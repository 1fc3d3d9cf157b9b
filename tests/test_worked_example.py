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
    """The number of lines of each function and class, by its name."""
    found = {}
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            name = prefix + child.name
            found[name] = child.end_lineno - child.lineno + 1
            found |= definitions(child, f"{name}.") if isinstance(child, ast.ClassDef) else {}
    return found


def test_the_newcomers_path_exists_and_is_at_most_1200_lines():
    section = (DOCS / "architecture.md").read_text().split("## The newcomer's path")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(pop\w+/[\w/]+\.py)` \|(.*?)\|", section, re.M)
    sizes = []
    for file, names in rows:
        known = definitions(ast.parse((DOCS.parent / "src" / file).read_text()))
        sizes += [known[name] for name in re.findall(r"`([\w.]+)`", names)]
    assert len(rows) == 13
    assert 1000 < sum(sizes) <= 1200
