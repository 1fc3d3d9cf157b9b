"""Stand-ins for programs that a container's script calls and that would change this machine.

The stand-ins for apt, sudo, pip and the like print that they were skipped, and exit with 0. The stand-in for
git copies a folder in place of `git clone`; it runs this file as a script, so the file imports nothing of the
package. All are found by PATH only.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

SKIPPED = ("apt", "apt-get", "sudo", "pip", "pip3", "conda")
PYTHONS = ("python", "python3")
ALL = (*SKIPPED, *PYTHONS, "git")
_CLONES = "clones.json"


def install_stand_ins(folder: Path, clones: Mapping[str, str], real: Iterable[str] = ()) -> None:
    """Write the stand-ins, as shell scripts, into a new folder: `git clone` copies the folders `clones`, by URL;
    programs in `real` get none."""
    folder.mkdir(parents=True)
    sources = {_without_git_suffix(url): str(Path(path).resolve()) for url, path in clones.items()}
    (folder / _CLONES).write_text(json.dumps(sources))
    texts = {name: f'echo "skipped: {name} $*"' for name in SKIPPED}
    for name in PYTHONS:
        skip = "" if "pip" in real else f'[ "$1 $2" = "-m pip" ] && echo "skipped: {name} $*" && exit 0\n'
        texts[name] = f'{skip}exec "{sys.executable}" "$@"'
    texts["git"] = f'exec "{sys.executable}" -I -S "{Path(__file__).resolve()}" "{folder}" "$@"'
    for name in texts.keys() - set(real):
        (folder / name).write_text(f"#!/bin/sh\n{texts[name]}\n")
        (folder / name).chmod(0o755)


def run_git(folder: str, words: list[str]) -> int:
    """Stand in for git: for `clone URL [FOLDER]`, copy the folder that --clone gives for the URL, and return
    0, or 128 if it gives none. Replace this process by the real git for other commands."""
    if "clone" not in words[:1]:
        folders = [path for path in os.environ["PATH"].split(os.pathsep) if path != folder]
        os.environ["PATH"] = os.pathsep.join(folders)
        os.execvp("env", ["env", "git", *words])
    url = next((word for word in words[1:] if "/" in word or ":" in word), "")
    source = json.loads((Path(folder) / _CLONES).read_text()).get(_without_git_suffix(url))
    if source is None:
        fix = f"--clone {url}=FOLDER"
        print(f"ipujob: git clone {url}: nothing is fetched here\n  fix: {fix}", file=sys.stderr)
        return 128
    after = words[words.index(url) + 1 :]
    target = Path(after[0] if after else _without_git_suffix(url).rpartition("/")[2])
    ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__")
    shutil.copytree(source, target, dirs_exist_ok=True, ignore=ignored)
    print(f"copied {source} in place of {url}")
    return 0


def _without_git_suffix(url: str) -> str:
    return url.rstrip("/").removesuffix(".git")


if __name__ == "__main__":
    sys.exit(run_git(sys.argv[1], sys.argv[2:]))
