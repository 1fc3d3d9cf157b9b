"""Reports of profiled runs: one HTML file with the viewer's scripts and the profiles' data, the headline for the
terminal, and the class that notebooks display as a page.

`analysis` and `memory` compute the figures; the scripts draw them, and add up what a reader selects.
"""

import html
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from textwrap import indent
from typing import Any
from uuid import uuid4

from popengine.errors import did_you_mean
from popengine.profile import PHASES, Profile, ProfileError, TaskRun
from popengine.texts import counted, table_text

from .analysis import FIGURES, Figures, compare_figures, comparison_text
from .joined import load
from .memory import bytes_curve, memory_table
from .sentences import about_sentences, fact_sentences, warning_sentences
from .units import seconds_text, size_text

PROFILE = "profile.pop"
_SCRIPTS = [  # in this order
    *("base", "lanes", "trace", "svg", "steer", "inspect"),
    *("memory", "operations", "diagram", "panels", "viewer"),
]
_SINGLE = (bool, int, float, str, type(None))  # types of figures that are single values


def find_profiles(path: Path) -> list[Path]:
    """Return the paths of all profile files at `path`, the one in a folder "training" first.

    Args: path: a profile's file, its folder, a folder of such folders, or the page in that folder
    Raises: ProfileError, if there is no profile
    """
    if path.is_file() and path.suffix == ".html":
        path = path.parent
    if path.is_file():
        return [path]
    here = path / PROFILE
    profiles = [here] if here.is_file() else sorted(path.glob(f"*/{PROFILE}"))
    profiles.sort(key=lambda one: one.parent.name != "training")
    if not path.exists():
        near = did_you_mean(path.name, (inner.name for inner in path.parent.glob("*")))
        fix = "the folder of options.enableProfiling(folder), written at the program's end or detachFromDevice()"
        if reports := sorted({str(inner.parents[1]) for inner in Path().glob(f"*/*/{PROFILE}")}):
            fix = f"popvision report FOLDER; profiled folders here: {', '.join(reports)}"
        raise ProfileError(f"there is no file or folder {path}{near}\n  fix: {fix}")
    if not profiles:
        if reports := sorted({inner.parents[1] for inner in path.glob(f"*/*/{PROFILE}")}):
            names = "".join(f"\n  {inner}" for inner in reports)
            raise ProfileError(
                f"{path} has {counted(len(reports), 'report')}:{names}\n  fix: name one of them"
            )
        raise ProfileError(
            f"no {PROFILE} in {path}, nor in a folder there\n"
            '  fix: options.enableProfiling("report") in the program, and popvision with that folder'
        )
    return profiles


def write_report(directory: Path, target: Path | None = None) -> Path:
    """Write the page of all profiles in `directory` to a file (None: `report.html` there), and return its path."""
    if target is not None:
        target.write_text(report_page(directory))
        return target
    draft = directory / f"report.html.{uuid4()}"  # other instances may write the page, too
    draft.write_text(report_page(directory))
    return draft.replace(directory / "report.html")


def report_page(folder: Path) -> str:
    """Return the page of all profiles in a folder as HTML."""
    entries = [*map(profile_entry, find_profiles(folder))]
    return viewer_page(f"Profile of {folder.resolve().name}", entries, folder=str(folder))


def viewer_page(title: str, entries: Sequence[dict[str, Any]], **extra: Any) -> str:
    """Return the HTML of a page that needs no other file. `entries`: from `profile_entry`; `extra`: "comparisons",
    a list of dictionaries ("first" and "second", indices in `entries`, and "rows"), or "folder", the report's path."""
    viewer = files("popvision") / "viewer"
    content = {"title": title, "entries": entries, "comparisons": [], **extra}
    data = json.dumps(content, separators=(",", ":"), default=asdict)
    # A profile's names may contain these, which could end the script element.
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    parts = {
        "title": html.escape(title),
        "style": (viewer / "viewer.css").read_text(),
        "script": "\n".join((viewer / f"{name}.js").read_text() for name in _SCRIPTS),
        "data": data,
    }
    # All marks are replaced in one pass, since an inserted text may contain a mark.
    return re.sub(r"{{(\w+)}}", lambda mark: parts[mark[1]], (viewer / "index.html").read_text())


def profile_entry(path: Path) -> dict[str, Any]:
    """Return what the page shows of a profile's file: "label", the name of its folder, and the items of `page_data`;
    or "error", the reason why the profile can't be read."""
    label = path.parent.name
    try:
        profile = load(path)
        return {"label": label, **page_data(Figures(profile))}
    except ProfileError as error:
        return {"label": label, "error": str(error)}
    except (KeyError, TypeError, ValueError, IndexError, ArithmeticError, AttributeError) as error:
        return {"label": label, "error": f"{path} is damaged: {type(error).__name__}: {error}"}


def page_data(figures: Figures) -> dict[str, Any]:
    """Return what the page's scripts draw of a profile: the profile, the step on separate devices, sums over
    operations (see `analysis.operation_sums`), the memory curve of each ipu, and all other figures."""
    left_out = ("profile", "timed", "groups", "devices")
    values = {name: value for name, value in vars(figures).items() if name not in left_out}
    values |= {
        "needs": [
            {**asdict(need), "name": f"ipu {need.ipu}", "always": need.always, "total": need.total}
            for need in figures.needs
        ],
        "facts": fact_sentences(figures),
        "warnings": warning_sentences(figures),
        "about": about_sentences(figures),
        "shown": known_figures(figures),
    }
    runs = figures.devices.runs
    curves = {
        str(ipu): [number for point in bytes_curve(figures.timed, runs, ipu) for number in point]
        for ipu in (figures.profile.devices if figures.profile.tensors else ())
    }
    return {
        "profile": json.loads(figures.timed.to_json()),
        "moves": [
            {"task": row, "ipu": task.ipu, "phase": task.phase, "stage": task.stage, **part._asdict()}
            for row, task, part in figures.profile.moves()
        ],
        "devices": {"columns": TaskRun._fields, "rows": runs},
        "groups": figures.groups,
        "figures": values,
        "curves": curves,
    }


def known_figures(figures: Figures) -> list[tuple[str, str, str]]:
    """Return (tile, words, value with its unit) of each declared figure that is known."""
    values = [(figure, getattr(figures, figure.name)) for figure in FIGURES]
    return [(figure.tile, figure.words, figure.text(value)) for figure, value in values if value is not None]


def write_comparison(first: Path, second: Path, target: Path) -> str:
    """Write a page that compares two runs (folders, or profile files) to the file `target`, and return the
    comparison as a text. Raises: ProfileError, if the runs have no profile of the same kind"""
    folders: list[dict[bool, tuple[str, Profile]]] = []  # of each folder: labels and profiles by kind
    for root in (first, second):
        folders.append({})
        for path in reversed(find_profiles(root)):
            profile = load(path)
            folders[-1][profile.training] = str(path.parent), profile
    entries, comparisons, texts = [], [], []
    for training in sorted(folders[0].keys() & folders[1].keys(), reverse=True):  # training first
        labels, profiles = zip(*(folder[training] for folder in folders), strict=True)
        runs = [Figures(profile) for profile in profiles]
        rows = compare_figures(*runs)
        comparisons.append({"first": len(entries), "second": len(entries) + 1, "rows": rows})
        texts.append(comparison_text(rows, (str(first), str(second))))
        entries += [{"label": label, **page_data(run)} for label, run in zip(labels, runs, strict=True)]
    if not entries:
        raise ProfileError(
            f"{first} and {second} have no profile of the same kind: one trains, the other does not"
        )
    page = viewer_page(f"{first.name} and {second.name}", entries, comparisons=comparisons)
    target.write_text(page)
    return "\n".join(texts)


# ---- headline and notebook -------------------------------------------------------------------------------


class Report:
    """*Pando*: the profiles in the folder of `Options.enableProfiling(folder)`. A notebook displays their page.

    >>> report = poptorch.Report("report")
    >>> print(report)                              # figures, tables and sentences, as `popvision summary` prints
    >>> report.figures()[0]["samples_per_second"]
    >>> pandas.DataFrame(report.trace())           # a row for each run of a task

    Args: folder: a folder with profiles, or one profile.pop; it is read again at each use
    Raises: ValueError, at use: there is no profile, or one can't be read
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(os.fspath(folder))

    def _profiles(self) -> dict[str, Profile]:
        """Return the profiles, read anew, by the names of their folders."""
        return {path.parent.name: load(path) for path in find_profiles(self.folder)}

    def figures(self) -> list[dict[str, Any]]:
        """Return a dictionary for each profile: "profile", its folder's name; the figures that are numbers or
        texts; and two lists of sentences: "facts" about stages, bubble and memory, and "warnings"."""
        rows = []
        for label, profile in self._profiles().items():
            figures = Figures(profile)
            plain = {name: value for name, value in vars(figures).items() if isinstance(value, _SINGLE)}
            facts = [*fact_sentences(figures).values()]
            rows.append({"profile": label, **plain, "facts": facts, "warnings": warning_sentences(figures)})
        return rows

    def trace(self) -> list[dict[str, Any]]:
        """Return a dictionary for each run of a task: "profile", its folder's name; the fields of an `Event`;
        and "cost", the ns that a core computed. "start" and "end" are in ns, too."""
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
    """Return a profile's figures, tables and sentences as a text for the terminal, about a screen long."""
    run = Figures(profile)
    mode = f"{profile.facts.get('mode', '')} {'training' if profile.training else 'inference'}"
    replicas = counted(profile.counts.get("replicas", 1), "replica")
    places = f"{counted(len(profile.stages), 'stage')} on {counted(len(profile.devices), 'ipu')}"
    lines = [f"{profile.name}: {mode}, {places}, {replicas}"]
    lines += [f"  {sentence}" for sentence in about_sentences(run)]
    if run.calls:
        passes = ", ".join(f"{entry.name} {seconds_text(entry.seconds)}" for entry in profile.passes)
        lines += [
            indent(table_text([(words, text) for _, words, text in known_figures(run)]), "  "),
            f"  {counted(run.calls, 'call')}, {counted(run.steps, 'step')} on {run.cores}; compilation: {passes}",
        ]
    elif profile.facts.get("failed_calls", 0):
        lines.append("  no call finished")
    else:
        lines.append("  nothing ran: the model was compiled and never called")
    lines += [
        indent(table_text(rows), "  ")
        for rows in (_stage_table(run), memory_table(run.needs))
        if len(rows) > 1
    ]
    if run.fits:  # else a warning says so
        lines.append(f"  fits into {size_text(run.capacity)}: this machine's memory, which all ipus share")
    lines += [f"  {fact}" for fact in fact_sentences(run).values()] if run.calls else []
    lines += [f"  ! {warning}" for warning in warning_sentences(run)]
    return "\n".join(lines) + "\n"


def _stage_table(figures: Figures) -> list[list[str]]:
    phases = figures.profile.phases
    rows = [["stage", "ipu", *(PHASES[phase] for phase in phases), "update", "sums and others", "blocks"]]
    for stage in figures.stages:
        mark = "  <- slowest" if stage.stage == figures.slowest and len(figures.stages) > 1 else ""
        times = [*(stage.phases.get(phase, 0.0) for phase in phases), stage.update, stage.around]
        cells = [seconds_text(ns / 1e9 if ns else None) for ns in times]
        rows.append([str(stage.stage), str(stage.ipu), *cells, stage.blocks + mark])
    return rows
