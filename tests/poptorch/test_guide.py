"""The documents hold: their code runs, page by page, and prints what stands below it.

A page's blocks run from top to bottom in one folder:

- ```` ```python ```` runs, and with `title="train.py"` becomes that file;
- ```` ```sh ```` runs where a text block follows, and is for reading elsewhere;
- ```` ```text ```` right after one of these is what it prints; `...` stands for anything, also for lines.
"""

import ast
import contextlib
import io
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import quick_python

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GUIDE = [path for path in sorted((DOCS / "guide").glob("*.md")) if path.stem != "README"]
FOLDERS = ("guide", "concepts", "coming_from")
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
PAGES += [path for folder in FOLDERS for path in sorted((DOCS / folder).glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page):
    """(kind, title, text, first line, what it has to print or None) of each python and sh block."""
    text, found = page.read_text(), []
    for match in BLOCK.finditer(text):
        kind, rest, code = match.groups()
        if kind == "text" and found and not text[found[-1]["end"] : match.start()].strip():
            found[-1]["prints"] = code
        title = re.search(r'title="([^"]+)"', rest)
        line = text[: match.start(3)].count("\n")
        found.append(
            {"kind": kind, "title": title and title[1], "code": code, "line": line, "end": match.end()}
        )
    return [block for block in found if block["kind"] in ("python", "sh")]


RUN = [page for page in PAGES if any(block["kind"] == "python" for block in blocks(page))]


def printed(pattern, output):
    """Return whether an output is what a page shows, where `...` stands for anything."""
    parts = [re.escape(part) for part in pattern.strip().split("...")]
    return re.fullmatch(".*".join(parts), output.strip(), re.DOTALL) is not None


@pytest.fixture(scope="session")
def path(tmp_path_factory):
    """The variable PATH, with this Python's programs first."""
    return quick_python.put_on_path(tmp_path_factory.mktemp("bin"))


def run_in_shell(commands, path):
    """Return what the commands print."""
    environment = {**os.environ, "PATH": path}
    done = subprocess.run(
        ["bash", "-e"], input=commands, capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_as_python(block, page, module):
    """Return what the block prints. It stays on its lines, so that a failure names the line of the page."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile("\n" * block["line"] + block["code"], str(page), "exec"), vars(module))
    return output.getvalue()


@pytest.fixture
def same_process_after():
    threads, environment = torch.get_num_threads(), dict(os.environ)
    yield
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(environment)


@pytest.mark.kind("a guide page")
@pytest.mark.usefixtures("same_process_after")
@pytest.mark.parametrize("page", RUN, ids=lambda path: path.stem)
def test_a_page_runs_and_prints_what_it_shows(page, tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("guide")  # a real one, so that its classes can be pickled
    monkeypatch.setitem(sys.modules, "guide", module)
    torch.manual_seed(0)
    for block in blocks(page):
        expected = block.get("prints")
        if block["title"]:
            Path(block["title"]).write_text(block["code"])
        elif block["kind"] == "python":
            output = run_as_python(block, page, module)
            assert expected is None or printed(expected, output), f"line {block['line']}: {output}"
        elif expected is not None:
            output = run_in_shell(block["code"], path)
            assert printed(expected, output), f"line {block['line']}: {output}"


def test_every_page_of_the_guide_has_code_that_runs():
    assert [page.name for page in GUIDE if page not in RUN] == []


def test_the_errors_of_the_page_of_errors_are_in_the_code():
    trees = [ast.parse(path.read_text()) for path in (ROOT / "src").rglob("*.py")]
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    texts = "\n".join({node.value for node in nodes if isinstance(node.value, str)})
    headings = re.findall(r"^### (.*)$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(headings) > 10
    assert [part for heading in headings for part in heading.split(" ... ") if part not in texts] == []


@pytest.mark.parametrize("program", ["poprun", "popvision", "ipujob"])
def test_the_flags_of_commands_are_in_the_program(program):
    source = "".join(path.read_text() for path in (ROOT / "src" / program).rglob("*.py"))
    commands = "\n".join(block["code"] for page in PAGES for block in blocks(page) if block["kind"] == "sh")
    commands = re.findall(rf"\b{program} [^|#\n]*", commands.replace("\\\n", " "))
    flags = {
        flag for command in commands for flag in re.findall(r"(?<= )--[\w-]+", command.split("python")[0])
    }
    assert flags and [flag for flag in flags if f'"{flag}"' not in source] == []


def test_the_contents_list_every_page():
    contents = (DOCS / "guide" / "README.md").read_text()
    assert [page.name for page in GUIDE if f"({page.name})" not in contents] == []


def test_the_drawings_of_schedules_are_what_describe_prints(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import pictures

    for name, svg in pictures.drawings().items():
        assert (DOCS / "images" / name).read_text() == svg, "python scripts/pictures.py"
