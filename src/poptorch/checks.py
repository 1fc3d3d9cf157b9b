"""`checked`: the check of an argument that a user passes, and the words of its error."""

import os
import re
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from popengine.errors import did_you_mean

WORDS: dict[Any, str] = {
    Callable: "a module or a function",
    bool: "a bool",
    int: "an int",
    float: "a float",
    int | float: "a number",
    str: "a string",
    str | os.PathLike: "a path",
    float | int | str: "a float, an int or a string",
    list: "a list",
    dict: "a dictionary",
    nn.Module: "a torch.nn.Module",
}


def meant_number(value: Any, least: int = 0) -> int:
    """Return the number that a value means, but at least `least`: 4 of 4.0 and "4", `least` of -4 and of a module."""
    number = re.fullmatch(r"(\d+)(\.\d*)?", str(value))
    return max(least, int(number[1]) if number else 0)


def checked(
    name: str,
    value: Any,
    allowed: Any,
    error: type[Exception] = AssertionError,
    least: int | None = None,
    fix: str = "",
) -> Any:
    """Return an argument of the function or setter `name`. Raises `error` unless it has the type `allowed` and is not
    less than `least` (if given, a bool is no int), or is in the tuple `allowed`. `fix`: an example of a right call, in
    which {} stands for the number that is meant."""
    fix = f"\n  fix: {fix.replace('{}', str(meant_number(value, least or 0)))}" if fix else ""
    if isinstance(allowed, tuple):
        if value in allowed and isinstance(value, type(allowed[0])):  # 4.0 is no 4
            return value
        meant = did_you_mean(str(value), map(str, allowed))
        choices = ", ".join(map(repr, allowed)) or "none"
        raise error(f"{name} takes one of {choices}; found {value!r}{meant}{fix}")
    if isinstance(value, allowed) and (least is None or (not isinstance(value, bool) and value >= least)):
        return value
    if (word := WORDS.get(allowed)) is None:
        is_public = allowed.__name__ in sys.modules["poptorch"].__all__
        word = f"a {'poptorch' if is_public else allowed.__module__}.{allowed.__name__}"
    limit = "" if least is None else f" from {least}"
    names = getattr(allowed, "__members__", ())  # of an enum
    meant = [name for name in names if name.lower() == str(value).lower()] or names
    fix = f"\n  fix: {' or '.join(f'{word[2:]}.{name}' for name in meant)}" if names else fix
    shown = f"{value!r:.80}" if "\n" not in repr(value) else f"a {type(value).__name__}"
    raise error(f"{name} takes {word}{limit}; found {shown}{fix}")
