"""English text that needs no network: Python's own documentation, or text files of the user's."""

from __future__ import annotations

import ast
import glob
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

Document = list[str]  # its sentences

_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(`])")
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


def documents(patterns: list[str]) -> list[Document]:
    """The documents of text files, with a sentence a line and an empty line between documents; without files those
    of Python. Ends the program, if a pattern matches nothing."""
    if not patterns:
        return python_documentation()
    found: list[Document] = []
    for pattern in patterns:
        files = sorted(glob.glob(pattern))
        if not files:
            raise SystemExit(f"--input-files {pattern}: no file matches")
        for file in files:
            for block in re.split(r"\n\s*\n", Path(file).read_text(encoding="utf-8")):
                found.append([line.strip() for line in block.splitlines() if line.strip()])
    return [document for document in found if document]


def python_documentation() -> list[Document]:
    """The topics of `help()`, and for each module of the standard library all its docstrings."""
    from pydoc_data.topics import topics

    found = [sentences(text) for _, text in sorted(topics.items())]
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        if not _SKIPPED & set(file.relative_to(root).parts):
            found.append([sentence for text in _docstrings(file) for sentence in sentences(text)])
    return [document for document in found if document]


def source(patterns: list[str]) -> str:
    """Where the text comes from, for the notes beside it: Python's documentation is another one in each version."""
    return " ".join(patterns) or f"the documentation of Python {platform.python_version()}"


def sentences(text: str) -> Document:
    """Paragraphs cut into sentences; lines that hold fewer than two words are left out."""
    paragraphs = (" ".join(block.split()) for block in re.split(r"\n\s*\n", text))
    return [
        one for block in paragraphs for one in _END.split(block) if len(re.findall(r"[A-Za-z]{2,}", one)) > 1
    ]


def _docstrings(file: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return  # some are wrong on purpose
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield cleandoc(text)
