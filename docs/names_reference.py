"""The signatures in docs/reference/names.md and executor.md, and the figures in docs/profile-format.md, made from the
code: `make reference` writes them again.

The other texts of these pages are written by hand.
"""

from __future__ import annotations

import enum
import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any

from popvision import units
from popvision.analysis import FIGURES

PAGES = [
    Path(__file__).parent / name
    for name in ("reference/names.md", "reference/executor.md", "profile-format.md")
]
_UNITS = {
    units.share_text: "fraction",
    units.seconds_text: "seconds",
    units.rate_text: "rows per second",
    units.size_text: "bytes",
}
_FIGURES = re.compile(r"(?<=\| key \| unit \| label \|\n\|---\|---\|---\|\n)(\|.*\n)+")
_LONGEST = 90  # characters of a signature; what follows is "..."
_NOT_CALLED = (
    "PoplarExecutor",
    "LegacyBeginBlockFn",
    "Comparison",
)  # classes that only Pando makes objects of


def page(path: Path) -> str:
    """Return the text of a page, with the present signatures and figures."""
    lines, space = [], ""
    for line in path.read_text().splitlines(keepends=True):
        if line.startswith("## "):
            heading = re.fullmatch(r"## `(?!lightning)([\w.]+)`", line.strip())
            space = heading[1] if heading else ""
        elif space and (row := re.match(r"\| `?(\w+)[^|]*\| real \|", line)):
            line = f"| {_call(space, row[1])} | real |{line[row.end() :]}"
        lines.append(line)
    rows = (f"| `{figure.name}` | {_UNITS[figure.text]} | {figure.words} |\n" for figure in FIGURES)
    return _FIGURES.sub(lambda _: "".join(rows), "".join(lines))


def _call(space: str, name: str) -> str:
    """Return a name with its parameters and their defaults; the name alone, if users do not call it."""
    thing: Any = getattr(pkgutil.resolve_name(space), name, None)
    is_called = inspect.isroutine(thing) or (
        inspect.isclass(thing) and not issubclass(thing, enum.Enum | Exception) and name not in _NOT_CALLED
    )
    if not is_called:
        return name
    parameters = inspect.signature(thing).parameters.items()
    plain = [p.replace(annotation=p.empty) for n, p in parameters if n not in ("self", "cls", "popart")]
    text = re.sub(r"<(\w+\.\w+): [^>]*>", r"\1", str(inspect.Signature(plain)))
    if len(text) > _LONGEST:
        text = f"{text[: text.rindex(', ', 0, _LONGEST)]}, ...)"
    return f"`{name}{text}`"


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(page(path))
