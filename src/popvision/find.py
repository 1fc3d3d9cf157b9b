"""From what a user names to the profiles meant: a file, a folder with a profile, or a folder of such folders."""

from __future__ import annotations

from pathlib import Path

from popengine.profile import ProfileError

FILE = "profile.pop"


def profiles_at(path: Path) -> list[Path]:
    """The profiles there, training first.

    Raises:
        ProfileError: there is none
    """
    if path.is_file():
        return [path]
    here = path / FILE
    found = [here] if here.is_file() else sorted(path.glob(f"*/{FILE}"), key=_training_first)
    if not found:
        raise ProfileError(
            f"no {FILE} in {path}, nor in a folder there\n"
            '  fix: run the program with POPLAR_ENGINE_OPTIONS=\'{"autoReport.all":"true",'
            ' "autoReport.directory":"report"}\''
        )
    return found


def _training_first(path: Path) -> tuple[int, str]:
    order = ("training", "inference")
    name = path.parent.name
    return order.index(name) if name in order else len(order), name
