"""The page of profiles: one HTML file with the viewer's scripts and the profiles' data.

The scripts only draw: every figure is computed in Python, by `analysis` and `memory`.
"""

from __future__ import annotations

import html
import json
import re
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from popengine.profile import Profile, ProfileError, load

from .advice import advice_sentences, machine_sentence, stages_sentence
from .analysis import Figures, compare_figures, comparison_text
from .memory import bytes_curve, tracks_of_detailed_step
from .times import with_stage_costs

PROFILE, REPORT = "profile.pop", "report.html"
_SCRIPTS = [  # in this order
    *("base", "lanes", "trace", "steer", "inspect"),
    *("memory", "operations", "diagram", "panels", "viewer"),
]


def find_profiles(path: Path) -> list[Path]:
    """Return the paths of all profile files at `path`, the one in a folder "training" first.

    Args: path: a profile's file, its folder, or a folder of such folders
    Raises: ProfileError, if there is no profile
    """
    if path.is_file():
        return [path]
    here = path / PROFILE
    found = [here] if here.is_file() else sorted(path.glob(f"*/{PROFILE}"))
    found.sort(key=lambda one: one.parent.name != "training")
    if not found:
        raise ProfileError(
            f"no {PROFILE} in {path}, nor in a folder there\n"
            '  fix: run the program with POPLAR_ENGINE_OPTIONS=\'{"autoReport.all":"true",'
            ' "autoReport.directory":"report"}\''
        )
    return found


def write_report(directory: Path) -> Path:
    """Write the page of all profiles in `directory` to its file `report.html`, and return the file's path."""
    target = directory / REPORT
    target.write_text(report_page(directory))
    return target


def report_page(folder: Path) -> str:
    """Return the page of all profiles in a folder as HTML. Raises: ProfileError, if there is none."""
    return profiles_page(
        [profile_entry(path) for path in find_profiles(folder)], f"Profile of {folder.resolve().name}"
    )


def profiles_page(
    entries: list[dict[str, Any]], title: str, comparisons: list[dict[str, Any]] | None = None
) -> str:
    """Return the HTML of a page of profiles.

    Args:
        entries:     a dictionary for each profile, as `profile_entry` returns it
        comparisons: a dictionary for each comparison: "first" and "second" are indices in `entries`, "rows"
            a list of `analysis.Row`
    """
    viewer = files("popvision") / "viewer"
    content = {"title": title, "entries": entries, "comparisons": comparisons or []}
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
    """Return what the page shows of the profile in a file, as a dictionary: "label", the name of the file's
    folder, and the items of `page_data`. If the profile can't be read: "label", and "error", the reason."""
    label = path.parent.name
    try:
        profile = load(path)
        return {"label": label, **page_data(Figures(profile))}
    except ProfileError as error:
        return {"label": label, "error": str(error)}
    except (KeyError, TypeError, ValueError, IndexError, ArithmeticError, AttributeError) as error:
        return {"label": label, "error": f"{path} is damaged: {type(error).__name__}: {error}"}


def page_data(found: Figures) -> dict[str, Any]:
    """Return a profile, its figures, its sums over operations, and the memory curves of its ipus, as a
    dictionary for the page's scripts."""
    profile = found.profile
    figures = {name: value for name, value in vars(found).items() if name not in ("profile", "groups")}
    figures |= {
        "needs": [{**asdict(need), "always": need.always, "total": need.total} for need in found.needs],
        "warnings": advice_sentences(found),
        "machine_says": machine_sentence(found),
        "stages_say": stages_sentence(found),
    }
    return {
        "profile": json.loads(with_stage_costs(profile, found.stages).to_json()),
        "groups": found.groups,
        "figures": figures,
        "curves": {
            str(ipu): [number for point in bytes_curve(profile, track) for number in point]
            for ipu, track in tracks_of_detailed_step(profile).items()
        },
    }


def write_comparison(first: Path, second: Path, target: Path) -> str:
    """Write a page that compares two runs to the file `target`, and return the comparison as a text for the
    terminal. `first` and `second` are the runs' folders, or profile files.

    Raises: ProfileError, if a profile can't be read, or the runs have no profile of the same kind
    """
    found: list[dict[bool, tuple[str, Profile]]] = []  # of each folder: labels and profiles by kind
    for root in (first, second):
        found.append({})
        for path in reversed(find_profiles(root)):
            profile = load(path)
            is_inside = path.parent != root and path != root
            label = f"{root.name}: {path.parent.name}" if is_inside else root.name
            found[-1][profile.training] = label, profile
    entries, comparisons, texts = [], [], []
    for kind in sorted(found[0].keys() & found[1].keys(), reverse=True):  # training first
        runs = [Figures(profiles[kind][1]) for profiles in found]
        rows = compare_figures(*runs)
        at = {"first": len(entries), "second": len(entries) + 1}
        comparisons.append({**at, "rows": rows})
        texts.append(comparison_text(rows, (str(first), str(second))))
        for profiles, run in zip(found, runs, strict=True):
            entries.append({"label": profiles[kind][0], **page_data(run)})
    if not entries:
        raise ProfileError(
            f"{first} and {second} have no profile of the same kind: one trains, the other does not"
        )
    target.write_text(profiles_page(entries, f"{first.name} and {second.name}", comparisons))
    return "\n".join(texts)
