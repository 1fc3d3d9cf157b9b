"""A report of profiled runs for notebooks: it displays itself, and gives its figures and its trace as rows."""

from __future__ import annotations

import html
from dataclasses import fields
from pathlib import Path
from typing import Any

from popengine.profile import Profile, load

from .advice import sentences
from .analysis import figures
from .find import profiles_at
from .html import entry, page
from .text import summary

_PLAIN = (bool, int, float, str, type(None))


class Report:
    """What `enableProfiling(folder)` left. (Not in PopTorch.)

    >>> report = poptorch.Report("report")
    >>> report                                # in a notebook: the page; elsewhere its headline
    >>> pandas.DataFrame(report.trace())

    Args:
        folder: with profiles, or one profile.pop. It is read anew at each use.
    Raises:
        ValueError: (at use) there is no profile, or one can't be read
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def _profiles(self) -> dict[str, Profile]:
        return {path.parent.name: load(path) for path in profiles_at(self.folder)}

    def figures(self) -> list[dict[str, Any]]:
        """A row for each profile, with all figures that are one value; `advice` is a list of sentences."""
        rows = []
        for label, profile in self._profiles().items():
            found = figures(profile)
            values = {field.name: getattr(found, field.name) for field in fields(found)}
            plain = {name: value for name, value in values.items() if isinstance(value, _PLAIN)}
            rows.append({"profile": label, **plain, "advice": sentences(profile, found)})
        return rows

    def trace(self) -> list[dict[str, Any]]:
        """A row for each instruction that was recorded; `start`, `end` and `cost` (work alone) in ns."""
        return [
            {"profile": label, **event._asdict(), "cost": event.cost}
            for label, profile in self._profiles().items()
            for event in profile.events()
        ]

    def __repr__(self) -> str:
        return "\n".join(summary(profile) for profile in self._profiles().values())

    def _repr_html_(self) -> str:
        """The whole page in a frame of its own."""
        text = page([entry(path) for path in profiles_at(self.folder)], f"Profile of {self.folder.name}")
        style = "width: 100%; height: 760px; border: 1px solid #8888"
        return f'<iframe srcdoc="{html.escape(text)}" style="{style}" title="Report"></iframe>'
