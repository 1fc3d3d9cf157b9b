"""What is the user's code, which line of it runs, and which names it has."""

import dis
import functools
import random
import sys
import traceback
from collections import defaultdict
from itertools import chain
from pathlib import Path
from types import CodeType
from typing import Any

import torch

TORCH = str(Path(torch.__file__).parent)
PANDO = {"popengine", "poptorch", "popdist", "lightning_ipu", "lightning_graphcore"}
_STANDARD_MODULES = sys.stdlib_module_names - {"__main__", "argparse", "collections", "types"}
# Objects of these packages are not looked into. Pytest hooks imports, and so its code is called inside forward, too.
OPAQUE = {*_STANDARD_MODULES, *PANDO, "builtins", "torch", "numpy", "torchmetrics", "_pytest"}
_LOOKED_INTO = ("torch.distributions", "torch.optim", "torch.utils.data")
_LOADS_A_GLOBAL = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "IMPORT_NAME", "IMPORT_FROM"}
_APPENDING = {"append", "appendleft", "extend", "add", "insert"}
WHOLE = object()  # of a container: more is used than items with constant keys


def package_of(value: Any) -> str:
    """Return the package of a class or function, or of a value's class."""
    return (getattr(value, "__module__", None) or "").partition(".")[0]


def is_opaque(cls: type) -> bool:
    """Return whether objects of a class are not looked into."""
    return package_of(cls) in OPAQUE and not cls.__module__.startswith(_LOOKED_INTO)


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
def globals_in(code: CodeType) -> frozenset[str]:
    """Return the names that a function and the functions inside it load from the module's globals, or import. An
    attribute of such a name is another thing."""
    inner = (globals_in(value) for value in code.co_consts if isinstance(value, CodeType))
    loads = (step.argval for step in dis.get_instructions(code) if step.opname in _LOADS_A_GLOBAL)
    return frozenset(loads).union(*inner)


@functools.cache
def uses_in(code: CodeType) -> dict[str, set[Any]]:
    """Return, for each name that a function loads, the constant keys of items (`self.name["key"]`, `name.get("key")`)
    and attributes that it uses of such a value; with WHOLE among them if it uses the value otherwise than by these and
    by appending."""
    uses: defaultdict[str, set[Any]] = defaultdict(set)
    unused = ("CACHE", "PRECALL", "PUSH_NULL")
    steps = [step for step in dis.get_instructions(code) if step.opname not in unused]
    for step, after, last in zip(steps, steps[1:], [*steps[2:], steps[-1]], strict=False):
        if not step.opname.startswith("LOAD_") or not isinstance(step.argval, str):
            continue
        if after.opname == "LOAD_CONST" and last.opname in _SUBSCRIPTS and last.argrepr in ("", "[]"):
            used = after.argval
        elif after.argval == "get" and last.opname == "LOAD_CONST":
            used = last.argval
        elif after.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            used = after.argval
        else:
            used = WHOLE
        uses[step.argval] |= set() if used in _APPENDING else {WHOLE if used in _METHODS else used}
    return uses


_SUBSCRIPTS = ("BINARY_SUBSCR", "STORE_SUBSCR", "BINARY_OP")
_METHODS = {name for cls in (dict, list, set) for name in dir(cls)} - _APPENDING
