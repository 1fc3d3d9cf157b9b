"""docs/reference/options.md, made of the options' own docstrings: `make reference` writes the page."""

from __future__ import annotations

import inspect
import re
from enum import Enum
from pathlib import Path
from typing import Any

from poptorch.options import (
    Distributed,
    Jit,
    Options,
    OptionsDict,
    Popart,
    Precision,
    TensorLocations,
    TensorLocationSettings,
    Training,
)
from poptorch.options.option_base import sorted_repr

PAGE = Path(__file__).parent / "reference" / "options.md"
_PLACES: dict[str, type[OptionsDict]] = {
    "poptorch.options.OptionsDict": OptionsDict,
    "poptorch.Options": Options,
    "poptorch.options.Training": Training,
    "poptorch.options.Precision": Precision,
    "poptorch.options.Jit": Jit,
    "poptorch.options.Distributed": Distributed,
    "poptorch.options.TensorLocations": TensorLocations,
    "poptorch.TensorLocationSettings": TensorLocationSettings,
    "poptorch.options.Popart": Popart,
}
_HEAD = """# Options

<!-- Made by `make reference`; change the docstrings in src/poptorch/options instead. -->

For each part of the options, this page lists the methods, with one of the three answers of [README.md](README.md), and
the values that you can read, with their defaults and the setters that change them. Values that are "not set" exist only
after their setter was called ([glossary](../glossary.md)).
"""


def page() -> str:
    """The text of the page."""
    return "\n".join([_HEAD, *(_section(path, kind) for path, kind in _PLACES.items())])


def _section(path: str, kind: type[OptionsDict]) -> str:
    inherited = {name for name in _members(OptionsDict) if name not in vars(kind)}
    parts = {n: t for n, t in inspect.get_annotations(kind).items() if kind is Options and n == t.__name__}
    annotated = sorted(name for base in kind.__mro__ for name in inspect.get_annotations(base))
    declared = [name for name in annotated if not name.startswith("_") and name not in parts]
    own = {n: m for n, m in _members(kind).items() if n not in {*inherited, *declared}}
    members = {**parts, **own}
    rows = [_row(name, member) for name, member in sorted(members.items())]
    setters = {n: m for n, m in own.items() if inspect.isfunction(m) and n != "toDict"}
    values = [f"| {name} | {_default(kind, name, setters)} |" for name in declared]
    text = f"## `{path}`\n\n{_first_paragraph(kind)}.\n\n| name | answer | here |\n|---|---|---|\n"
    text += "\n".join(rows) + "\n"
    return text + (
        "\n| value | default | set by |\n|---|---|---|\n" + "\n".join(values) + "\n" if values else ""
    )


def _members(kind: type) -> dict[str, Any]:
    """The public methods, properties and defaults of a class, those of its bases in this package too."""
    return {
        name: member
        for base in reversed(kind.__mro__)
        if base.__module__.startswith("poptorch")
        for name, member in vars(base).items()
        if not name.startswith("_")
    }


def _default(kind: type[OptionsDict], name: str, setters: dict[str, Any]) -> str:
    """Return the default of a value and the setters that name it; an int of an enum as the enum's member."""
    writes = re.compile(rf"\b{name}(=|\[| = )")
    by = {n: m for n, m in setters.items() if writes.search(inspect.getsource(m).partition(":\n")[2])}
    default = getattr(kind, name, None)
    shown = f"{type(default).__name__}.{default.name}" if isinstance(default, Enum) else sorted_repr(default)
    source = "".join(
        inspect.getsource(base) for base in kind.__mro__ if base.__module__.startswith("poptorch")
    )
    if member := re.search(rf"^    {name}: int = ([\w.]+)\.value", source, re.MULTILINE):
        shown = member[1]  # values are stored as ints
    return f"{f'`{shown}`' if hasattr(kind, name) else 'not set'} | {', '.join(by)}"


def _row(name: str, member: Any) -> str:
    text = _first_paragraph(member)
    answer, _, why = text.partition(": ")
    answers = {"Has no effect; kept for compatibility": "no effect", "Refused": "refused"}
    why = why if answer in answers else text
    return f"| {_call(name, member)} | {answers.get(answer, 'real')} | {why} |"


def _call(name: str, member: Any) -> str:
    """Return the name; for a method with its parameters and their defaults."""
    if not inspect.isfunction(member):
        return name
    signature = inspect.signature(member)
    plain = [p.replace(annotation=p.empty) for n, p in signature.parameters.items() if n != "self"]
    words = re.sub(r"<(\w+\.\w+): [^>]*>", r"\1", str(inspect.Signature(plain)))
    return f"`{name}{words}`"


def _first_paragraph(thing: Any) -> str:
    lines = (thing.__doc__ or "").strip().split("\n\n")[0].splitlines()
    assert lines, f"{thing} has no docstring, and the reference is made of it"
    return " ".join(map(str.strip, lines)).removesuffix(".").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
