"""Joins the recordings of the instances of a replica, which have the same table of tasks, on one clock.

Each instance writes a file of its own tasks, with the clocks of its host at the file's origin. On one host all
processes have the same monotonic clock; times of other hosts are moved by the time of day.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path

from popengine import profile
from popengine.profile import Profile, ProfileError, file_of_part


def load(path: Path) -> Profile:
    """Return the profile in a file. If its replica spans several instances, those of the others, which are beside it,
    are joined with it. Raise ProfileError if a file can't be read, or is of another plan."""
    first = profile.load(path)
    count = len(first.facts.get("ipus_of_instances", [[]]))
    if count == 1 or first.facts.get("part", 0):
        return first
    files = {part: file_of_part(path, part) for part in range(1, count)}
    profiles = {part: profile.load(file) for part, file in files.items() if file.is_file()}
    for part, loaded in profiles.items():
        if loaded.tasks != first.tasks:
            raise ProfileError(
                f"{files[part]} is of another plan than {path}\n  fix: put the files of one run side by side"
            )
    return join({0: first, **profiles})


def join(parts: Mapping[int, Profile]) -> Profile:
    """Return the profile of a replica, given those of its instances by their index in it; others are missing.

    The entry "joined" of its facts has: "cores", the [instance, name] of each number in the column `core`;
    "one_clock", whether all are of one host; "missing", the instances without a recording. (A process with several
    devices writes such an entry itself, with "devices".)
    """
    first = parts[0]
    hosts = {part.facts["clock"]["host"]: part for part in parts.values()}
    clock = "monotonic" if len(hosts) == 1 else "time"
    runs, cores, before = [], dict[int, tuple[int, str]](), 0
    for instance, part in parts.items():
        later = part.facts["clock"][clock] - first.facts["clock"][clock]
        for run in part.runs:
            core = run.core + before if run.core >= 0 else run.core - instance
            cores[core] = instance, f"core {instance}.{run.core}" if run.core >= 0 else f"sends {instance}"
            runs.append(run._replace(core=core, start=run.start + later, end=run.end + later))
        before += part.facts["threads"]
    facts = {
        "threads": before,
        "cores": sum(part.facts["cores"] for part in hosts.values()),
        "step_tasks": sum(part.facts["step_tasks"] for part in parts.values()),
        "joined": {
            "cores": {str(core): cores[core] for core in sorted(cores)},
            "one_clock": clock == "monotonic",
            "missing": [i for i in range(len(first.facts["ipus_of_instances"])) if i not in parts],
        },
    }
    same_operation = zip(*(part.operations for part in parts.values()), strict=True)
    return replace(
        first,
        facts={**first.facts, **facts},
        runs=tuple(sorted(runs, key=lambda run: run.end)),
        operations=tuple(max(rows, key=lambda row: row.calls) for rows in same_operation),
        memory=tuple(sorted(chain(*(part.memory for part in parts.values())))),
    )
