"""The files of checkpoints, and when each instance writes them.

    call-120/                       complete: renamed when all files were in it and on the disk
        manifest                    its own checksum, the run, and the names of the files
        instance-0.pt ...           as torch.save writes it: a zip file, with a checksum of each of its records
    call-110.unreadable-3f2a/       a damaged checkpoint, or one of another format
    call-130.5f3a9c01.unfinished/   being written, by the run with this random id
        instance-0.pt  instance-1.part  instance-2.failed ...

Each instance writes its file under the name `part`, and renames it when it is on the disk, or writes the reason to
`failed`. Instance 0 waits until all instances have done this, and then renames or removes the folder. So an instance
that is killed can only lose the current checkpoint.
"""

import json
import os
import secrets
import shutil
import time
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

UNFINISHED = ".unfinished"
_MANIFEST = "manifest"
_PATIENCE = 600  # seconds that instance 0 waits for the others' files
_FORMAT = 2


def write_checkpoint(
    folder: Path, instance: int, instances: int, state: dict[str, Any], run: dict[str, Any], keep: int
) -> str:
    """Write one instance's file of a checkpoint, or after an error `failed` with the reason. Instance 0 also waits for
    the others, and completes the checkpoint; if an instance failed, it removes it. `state` is emptied, to free the
    copies meanwhile. Return the text of the first error; "" after success."""
    path, failure = folder / f"instance-{instance}.part", ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            try:
                torch.save(state, file)
            except RuntimeError as of_torch:  # raised after the error of the disk
                raise of_torch.__context__ or of_torch from None
        _flush_to_disk(path)
        path.rename(path.with_suffix(".pt"))
    except Exception as error:
        if isinstance(error, OSError):
            error = OSError(error.errno, error.strerror, str(folder.parent))
        failure = str(error)
        with suppress(OSError):  # on a full disk, this takes the space of the partial file
            path.write_text(f"instance {instance}: {failure}")
        with suppress(OSError):
            path.rename(path.with_suffix(".failed"))
    state.clear()
    if instance == 0 and folder.exists():
        try:
            _complete_checkpoint(folder, instances, run, keep)
        except Exception as error:
            shutil.rmtree(folder, ignore_errors=True)
            failure = failure or str(error)
    return failure


def _complete_checkpoint(folder: Path, instances: int, run: dict[str, Any], keep: int) -> None:
    """Wait for the files of all instances, write the manifest, and rename the folder to its name. Remove all
    earlier checkpoints but the newest `keep - 1`, and unfinished checkpoints of other runs."""
    manifest = {"format": _FORMAT, "run": run, "files": _await_files(folder, instances)}
    text = f"\n{json.dumps(manifest, indent=1)}\n"
    (folder / _MANIFEST).write_text(f"{zlib.crc32(text.encode()):08x}{text}")
    _flush_to_disk(folder / _MANIFEST)
    _flush_to_disk(folder)
    name, run_id, _ = folder.name.split(".")
    complete = folder.with_name(name)
    if complete.exists():
        set_aside(complete)
    folder.rename(complete)
    _flush_to_disk(folder.parent)
    of_killed_runs = (path for path in folder.parent.glob(f"call-*{UNFINISHED}") if run_id not in path.name)
    # Another run may have left checkpoints of later calls: they don't count, so that no new one is removed.
    checkpoints = [
        path for path in complete_checkpoints(folder.parent) if call_number(path) <= call_number(complete)
    ]
    for path in (*checkpoints[keep:], *of_killed_runs):
        shutil.rmtree(path, ignore_errors=True)


def set_aside(checkpoint: Path) -> Path:
    """Rename a complete checkpoint so that it is not restored, and return its new path."""
    return checkpoint.rename(f"{checkpoint}.unreadable-{secrets.token_hex(2)}")


def _await_files(folder: Path, instances: int) -> list[str]:
    """Wait until all instances have written their files, and return the files' names.
    Raises: RuntimeError, if an instance could not write its file, or has not done so in time"""
    names: list[str] = []
    failures: list[str] = []
    until = time.monotonic() + _PATIENCE
    for instance in range(instances):
        done, failed = (folder / f"instance-{instance}.{how}" for how in ("pt", "failed"))
        while not done.exists() and not failed.exists():
            if time.monotonic() > until:
                raise RuntimeError(f"instance {instance} has written nothing for {_PATIENCE} s")
            time.sleep(0.02)
        if failed.exists():
            failures.append(failed.read_text() or f"instance {instance} could not write to {folder}")
        names.append(done.name)
    if failures:
        raise RuntimeError("; ".join(failures))
    return names


def complete_checkpoints(directory: Path) -> list[Path]:
    """Return the paths of the complete checkpoints in a folder, newest first."""
    folders = [path for path in directory.glob("call-*") if path.name[5:].isdecimal()]
    return sorted(folders, key=call_number, reverse=True)


def call_number(checkpoint: Path) -> int:
    """Return the number of calls before a checkpoint, from its folder's name: 120 for `call-120`."""
    return int(checkpoint.name[5:])


def find_damage(folder: Path, reader: int = 0, readers: int = 1) -> list[str]:
    """Return a text for each damaged file. Each of n readers checks every n-th, reader 0 the manifest."""
    try:
        names = list(read_manifest(folder)["files"])
    except (OSError, ValueError) as error:
        return [f"{_MANIFEST}: {error}"] if reader == 0 else []
    return [
        f"{name} is not what was written" for name in names[reader::readers] if _is_damaged(folder / name)
    ]


def _is_damaged(path: Path) -> bool:
    """Return whether a file can't be read, or the checksum of one of its records differs."""
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
        torch.load(path, weights_only=True, mmap=True)  # checks the headers
        return damaged is not None
    except Exception:  # damaged headers raise many kinds of errors
        return True


def read_checkpoint(folder: Path) -> list[dict[str, Any]]:
    """Return the contents of each instance's file. Values are read from it when they are used."""
    names = read_manifest(folder)["files"]
    return [torch.load(folder / name, weights_only=True, mmap=True) for name in names]


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest. Raises: OSError, ValueError, if it can't be read or is damaged"""
    data = (folder / _MANIFEST).read_bytes()
    if data[:8] != f"{zlib.crc32(data[8:]):08x}".encode():
        raise ValueError("its checksum differs")
    try:
        manifest = json.loads(data[8:])
        if manifest["format"] != _FORMAT:
            raise ValueError(
                f"another version of Pando wrote it, in format {manifest['format']};"
                f" this version reads format {_FORMAT}"
            )
        names, replicas = manifest["files"], manifest["run"]["replicas"]
        expected = [f"instance-{instance}.pt" for instance in range(len(names))]
        if not names or names != expected or not isinstance(replicas, int) or replicas < 1:
            raise ValueError(f"it names the files {names} of {replicas} replicas")
    except (LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"it is no manifest: {error!r}") from None
    return manifest


def _flush_to_disk(path: Path) -> None:
    """Flush a file's contents, or a folder's list of files, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
