"""The code of docs/guide runs, page by page."""

import re
import sys
import types
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "docs" / "guide"
PAGES = [path for path in sorted(FOLDER.glob("*.md")) if path.stem != "README"]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Each snippet stays on its lines, so that a failure names the line of the page.
    pieces = re.split(r"^```python$(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    code = "".join(piece if i % 2 else "\n" * piece.count("\n") for i, piece in enumerate(pieces))
    assert code.strip(), "a page without code"
    module = types.ModuleType("guide")  # a real one, so that its classes can be pickled
    monkeypatch.setitem(sys.modules, "guide", module)
    torch.manual_seed(0)
    exec(compile(code, str(page), "exec"), vars(module))


def test_the_contents_list_every_page():
    contents = (FOLDER / "README.md").read_text()
    assert [page.name for page in PAGES if f"({page.name})" not in contents] == []
