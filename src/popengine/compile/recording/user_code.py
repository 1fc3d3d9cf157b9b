"""What is the user's code, and which names it has, for `noting.py`."""

import dis
import functools
import random
import sys
from itertools import pairwise
from types import CodeType
from typing import Any

PANDO = {"popengine", "poptorch", "popdist", "lightning_ipu"}
_STANDARD = sys.stdlib_module_names - {"__main__", "argparse", "collections", "types"}
OPAQUE = {*_STANDARD, *PANDO, "torch", "numpy", "torchmetrics"}  # packages whose objects are not looked into
_APPENDING = {"append", "appendleft", "extend", "add", "insert"}


def package_of(value: Any) -> str:
    """Return the package of a class or function, or of a value's class."""
    return (getattr(value, "__module__", None) or "").partition(".")[0]


def is_opaque(kind: type) -> bool:
    """Return whether objects of a class are not looked into."""
    return package_of(kind) in OPAQUE and not kind.__module__.startswith("torch.distributions")


def is_opaque_module(scope: dict[str, Any]) -> bool:
    """Return whether a module with these globals is of an opaque package."""
    return str(scope.get("__name__")).partition(".")[0] in OPAQUE


@functools.cache
def is_users(file: str) -> bool:
    """Return whether code of this file is the user's, or a library's that is not opaque."""
    folders = [path for name in OPAQUE for path in getattr(sys.modules.get(name), "__path__", ())]
    library = random.__file__.removesuffix("random.py")
    is_standard = file.startswith(library) and "-packages" not in file.removeprefix(library)
    return not (is_standard or file.startswith((*(f"{f}/" for f in folders), "<frozen")))


def users_line() -> str:
    """Return file and line of the innermost frame of the user's code."""
    frame: Any = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


@functools.cache
def names_in(code: CodeType) -> frozenset[str]:
    """Return the names in a function and the functions inside it, and texts that can be names (for `getattr`)."""
    inner = (names_in(value) for value in code.co_consts if isinstance(value, CodeType))
    texts = (value for value in code.co_consts if isinstance(value, str) and value.isidentifier())
    return frozenset(code.co_names).union(texts, *inner)


@functools.cache
def loaded_names(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that code only appends to (`self.name.append(...)`), and the names that it reads."""
    steps = pairwise(dis.get_instructions(code))
    pairs = [(step.argval, after.argval) for step, after in steps if step.opname.startswith("LOAD_")]
    read = {name for name, after in pairs if isinstance(name, str) and after not in _APPENDING}
    appended = {name for name, after in pairs if isinstance(name, str) and after in _APPENDING}
    return frozenset(appended - read), frozenset(read)
