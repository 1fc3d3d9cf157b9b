"""Examples are programs of several files: a test imports them as Python does when it runs one of them."""

import importlib
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@contextmanager
def imported(folder: str, name: str):
    """The module of a program. What it imports from its folder is forgotten afterwards: others have such names too."""
    path, known = list(sys.path), dict(sys.modules)
    for file in (EXAMPLES / folder).glob("*.py"):  # somebody else's `model` may be there
        sys.modules.pop(file.stem, None)
    sys.path[:0] = [str(EXAMPLES / folder), str(EXAMPLES)]
    try:
        yield importlib.import_module(name)
    finally:
        sys.path[:] = path
        for module in set(sys.modules) - set(known):
            if str(EXAMPLES) in str(getattr(sys.modules[module], "__file__", None)):
                del sys.modules[module]
        sys.modules.update(known)


@pytest.fixture(scope="session")
def program():
    """`with program(folder, name) as module`."""
    return imported
