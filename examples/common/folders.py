"""Folders of prepared data: complete or not there, also where two programs prepare the same one at once."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .logs import say


def prepared(
    folder: str | Path, notes: str, wanted: dict[str, Any], make: Callable[[Path], dict[str, Any]]
) -> dict:
    """What a folder's notes say; the folder is made, if it is not there.

    Args:
        notes:  the name of the JSON file in it
        wanted: what it is made from; kept in the notes as "made_from"
        make:   fills an empty folder, and returns what else to note
    Raises: SystemExit, if it is there and was made from something else
    """
    folder = Path(folder)
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f".{folder.name}.lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"Another program prepares {folder}: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = folder.with_name(f".{folder.name}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            found = {**make(unfinished), "made_from": wanted}
            (unfinished / notes).write_text(json.dumps(found, indent=1))
            os.rename(unfinished, folder)
    if not (folder / notes).exists():
        raise SystemExit(
            f"{folder} exists, and was not made by this program: it has no {notes}\n  fix: another folder"
        )
    found = json.loads((folder / notes).read_text())
    wanted = json.loads(json.dumps(wanted))
    other = [
        f"{name}: {found['made_from'].get(name)} there, {value} here"
        for name, value in wanted.items()
        if found["made_from"].get(name) != value
    ]
    if other:
        raise SystemExit(f"{folder} was made from something else: {'; '.join(other)}\n  fix: another folder")
    return found
