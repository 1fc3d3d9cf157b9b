"""Reports of profiled runs: the headline for the terminal, and the class that notebooks display as a page."""

from __future__ import annotations

import html
from pathlib import Path
from textwrap import indent
from typing import Any

from popengine.profile import Profile, load

from .advice import advice_sentences, machine_sentence
from .analysis import Figures
from .html import find_profiles, report_page
from .memory import memory_table
from .units import layout_text, rate_text, seconds_text, share_text, size_text, table_text

_PLAIN = (bool, int, float, str, type(None))


class Report:
    """The profiles in the folder of `enableProfiling(folder)`. (Not in PopTorch.)

    >>> report = poptorch.Report("report")
    >>> report                                # in a notebook: the page; elsewhere its headline
    >>> pandas.DataFrame(report.trace())

    Args:
        folder: a folder with profiles, or one profile.pop; it is read again at each use
    Raises:
        ValueError: (at use) there is no profile, or one can't be read
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def _profiles(self) -> dict[str, Profile]:
        """Return the profiles, read anew, by the names of their folders."""
        return {path.parent.name: load(path) for path in find_profiles(self.folder)}

    def figures(self) -> list[dict[str, Any]]:
        """Return a dictionary for each profile: "profile", its folder's name; the figures that are numbers or
        texts; and "advice", a list of sentences."""
        rows = []
        for label, profile in self._profiles().items():
            found = Figures(profile)
            plain = {name: value for name, value in vars(found).items() if isinstance(value, _PLAIN)}
            rows.append({"profile": label, **plain, "advice": advice_sentences(found)})
        return rows

    def trace(self) -> list[dict[str, Any]]:
        """Return a dictionary for each recorded instruction: "profile", its folder's name; the fields of an
        `Event`; and "cost", the ns that a core computed. "start" and "end" are in ns, too."""
        return [
            {"profile": label, **event._asdict(), "cost": event.cost}
            for label, profile in self._profiles().items()
            for event in profile.events()
        ]

    def __repr__(self) -> str:
        return "\n".join(summary(profile) for profile in self._profiles().values())

    def _repr_html_(self) -> str:
        """Return the page of `popvision REPORT` in an iframe, for a notebook."""
        text = html.escape(report_page(self.folder))
        style = "width: 100%; height: 760px; border: 1px solid #8888"
        return f'<iframe srcdoc="{text}" style="{style}" title="Report"></iframe>'


def summary(profile: Profile) -> str:
    """Return a profile's figures, tables and advice as a text for the terminal, about a screen long."""
    found = Figures(profile)
    lines = [f"{profile.name}: {layout_text(profile)}"]
    lines += [f"  {said}"] if (said := machine_sentence(found)) else []
    if found.calls:
        passes = ", ".join(f"{entry.name} {seconds_text(entry.seconds)}" for entry in profile.passes)
        lines += [
            f"  throughput    {rate_text(found.samples_per_second)} in calls,"
            f" {rate_text(found.samples_per_second_overall)} with the time between them",
            f"  ran           {found.calls} call(s), {found.steps} step(s), {seconds_text(found.step_seconds)} a step",
            f"  virtual time  a step takes {seconds_text(found.step_apart)} on separate devices,"
            f" {seconds_text(found.step_here)} {found.here_is}",
            f"  bubble        {share_text(found.bubble_measured)} measured, {share_text(found.bubble_ideal)} ideal,"
            f" {share_text(found.bubble_apart)} on separate devices",
            f"  compilation   {seconds_text(found.compile_seconds)}: {passes}",
        ]
    elif profile.facts.get("failed_calls", 0):
        lines.append("  no call came to its end")
    else:
        lines.append("  nothing was run: the model was compiled and let go")
    lines += [
        indent(table_text(rows), "  ")
        for rows in (_stage_table(found), memory_table(found.needs))
        if len(rows) > 1
    ]
    if found.capacity and found.needs:
        verdict = {True: "fits into", False: "DOES NOT FIT into", None: "held against"}[found.fits]
        lines.append(f"  {verdict} {size_text(found.capacity)}: {found.capacity_of}")
    lines += [f"  ! {warning}" for warning in advice_sentences(found)]
    return "\n".join(lines) + "\n"


def _stage_table(found: Figures) -> list[list[str]]:
    """Return a table with a row for each stage's costs, after a row of column names."""
    rows = [["stage", "ipu", "forward", "backward", "update", "blocks"]]
    for stage in found.stages:
        mark = "  <- slowest" if stage.stage == found.slowest and len(found.stages) > 1 else ""
        times = [
            seconds_text(ns / 1e9 if ns else None) for ns in (stage.forward, stage.backward, stage.update)
        ]
        rows.append([str(stage.stage), str(stage.ipu), *times, stage.blocks + mark])
    return rows
