"""`checked`: the check of an argument that a user passes, and the words of its error."""

import os
import sys
from types import UnionType
from typing import Any, TypeVar

from torch import nn

from popengine.errors import did_you_mean

T = TypeVar("T")
_WORDS: dict[Any, str] = {
    bool: "a bool",
    int: "an int",
    float: "a float",
    int | float: "a number",
    str: "a string",
    str | os.PathLike: "a path",
    float | int | str: "a float, an int or a string",
    list: "a list of strings",
    dict: "a dictionary",
    nn.Module: "a torch.nn.Module",
}


def checked(
    name: str,
    value: T,
    kind: type | UnionType | tuple,
    error: type[Exception] = AssertionError,
    least: int | None = None,
    fix: str = "",
) -> T:
    """Return an argument of the function or setter `name`. Raises `error` unless it has the type `kind` and is not less
    than `least` (if given, a bool is no int), or is in the tuple `kind`. `fix`: an example of a right call."""
    fix = f"\n  fix: {fix}" if fix else ""
    if isinstance(kind, tuple):
        if value in kind:
            return value
        meant = did_you_mean(str(value), map(str, kind))
        raise error(f"{name} takes one of {', '.join(map(repr, kind))}; found {value!r}{meant}{fix}")
    if isinstance(value, kind) and (least is None or (not isinstance(value, bool) and value >= least)):  # type: ignore[operator]
        return value
    if (word := _WORDS.get(kind)) is None:
        is_public = kind.__name__ in sys.modules["poptorch"].__all__  # type: ignore[union-attr]
        word = f"a {'poptorch' if is_public else kind.__module__}.{kind.__name__}"  # type: ignore[union-attr]
    limit = "" if least is None else f" from {least}"
    names = getattr(kind, "__members__", ())  # of an enum
    meant = [name for name in names if name.lower() == str(value).lower()] or names
    fix = f"\n  fix: {' or '.join(f'{word[2:]}.{name}' for name in meant)}" if names else fix
    raise error(f"{name} takes {word}{limit}; found {value!r:.80}{fix}")
