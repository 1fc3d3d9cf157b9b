"""What is the user's code, which line of it runs, and which names it has."""

import dis
import functools
import random
import sys
import traceback
from itertools import chain, pairwise
from pathlib import Path
from types import CodeType
from typing import Any

import torch

TORCH = str(Path(torch.__file__).parent)
PANDO = {"popengine", "poptorch", "popdist", "lightning_ipu"}
_STANDARD = sys.stdlib_module_names - {"__main__", "argparse", "collections", "types"}
# Objects of these packages are not looked into. Pytest hooks imports, and so its code is called inside forward, too.
OPAQUE = {*_STANDARD, *PANDO, "torch", "numpy", "torchmetrics", "_pytest"}
_LOOKED_INTO = ("torch.distributions", "torch.optim", "torch.utils.data")
_APPENDING = {"append", "appendleft", "extend", "add", "insert"}
_LOADS_A_GLOBAL = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "IMPORT_NAME", "IMPORT_FROM"}
# Code with one of these names may look up a global by a text, which this code or its caller has.
LOOKUPS = {
    "globals",
    "vars",
    "eval",
    "exec",
    "__dict__",
    "__globals__",
    "f_globals",
    "modules",
    "import_module",
}


def package_of(value: Any) -> str:
    """Return the package of a class or function, or of a value's class."""
    return (getattr(value, "__module__", None) or "").partition(".")[0]


def is_opaque(kind: type) -> bool:
    """Return whether objects of a class are not looked into."""
    return package_of(kind) in OPAQUE and not kind.__module__.startswith(_LOOKED_INTO)


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


def user_line(error: BaseException | None = None) -> str:
    """Return `file:line` of the innermost frame (first in `error`'s traceback) of the user's code; or "?"."""
    raised = [*traceback.walk_tb(error.__traceback__)] if error is not None else []
    for frame, line in chain(reversed(raised), traceback.walk_stack(sys._getframe(1))):
        if is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{line}"
    return "?"


@functools.cache
def names_in(code: CodeType) -> frozenset[str]:
    """Return the names in a function and the functions inside it, and texts that can be names (for `getattr`)."""
    inner = (names_in(value) for value in code.co_consts if isinstance(value, CodeType))
    texts = (value for value in code.co_consts if isinstance(value, str) and value.isidentifier())
    return frozenset(code.co_names).union(texts, *inner)


@functools.cache
def _instructions(code: CodeType) -> tuple[dis.Instruction, ...]:
    return tuple(dis.get_instructions(code))


@functools.cache
def globals_in(code: CodeType) -> frozenset[str]:
    """Return the names that a function and the functions inside it load from the module's globals, or import. An
    attribute of such a name is another thing."""
    inner = (globals_in(value) for value in code.co_consts if isinstance(value, CodeType))
    loads = (step.argval for step in _instructions(code) if step.opname in _LOADS_A_GLOBAL)
    return frozenset(loads).union(*inner)


@functools.cache
def loaded_names(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that code only appends to (`self.name.append(...)`), and the names that it reads."""
    steps = pairwise(_instructions(code))
    pairs = [(step.argval, after.argval) for step, after in steps if step.opname.startswith("LOAD_")]
    read = {name for name, after in pairs if isinstance(name, str) and after not in _APPENDING}
    appended = {name for name, after in pairs if isinstance(name, str) and after in _APPENDING}
    return frozenset(appended - read), frozenset(read)
