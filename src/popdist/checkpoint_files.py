"""The files of checkpoints, and when each instance writes them.

    call-120/                       complete: renamed when all files were in it and on the disk
        manifest                    its own checksum, the run, and each file's size and checksum
        instance-0.pt ...
    call-110.unreadable-3f2a/       a damaged checkpoint, or one of another format
    call-130.5f3a9c01.unfinished/   being written, by the run with this random id
        instance-0.pt  instance-0.done  instance-1.pt  instance-2.failed ...

Each instance writes its file and then `done`, or `failed` with the reason. Instance 0 waits until all
instances have done this, and then renames or removes the folder. So an instance that is killed can only lose
the current checkpoint.
"""

import io
import json
import os
import secrets
import shutil
import time
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
    """Write one instance's file of a checkpoint, then `done`, or after an error `failed` with the reason.
    Instance 0 also waits for the others, and completes the checkpoint; if an instance failed, it removes it.
    `state` is emptied, to free the copies meanwhile. Return the text of the first error; "" after success."""
    path, failure = folder / f"instance-{instance}.pt", ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _ChecksumFile(io.FileIO(path, "wb")) as file:
            try:
                torch.save(state, file)
            except RuntimeError as of_torch:  # raised after the error of the disk
                raise of_torch.__context__ or of_torch from None
            written = [file.tell(), file.checksum]
        _flush_to_disk(path)
        _write_text(path.with_suffix(".done"), json.dumps({path.name: written}))
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
    manifest = {"format": _FORMAT, "run": run, "files": _await_checksums(folder, instances)}
    text = f"\n{json.dumps(manifest, indent=1)}\n"
    _write_text(folder / _MANIFEST, f"{zlib.crc32(text.encode()):08x}{text}")
    for path in folder.glob("*.done"):
        path.unlink()
    _flush_to_disk(folder)
    name, run_id, _ = folder.name.split(".")
    complete = folder.with_name(name)
    if complete.exists():
        set_aside(complete)
    folder.rename(complete)
    _flush_to_disk(folder.parent)
    of_killed_runs = (path for path in folder.parent.glob(f"call-*{UNFINISHED}") if run_id not in path.name)
    # Another run may have left checkpoints of later calls: they don't count, so that no new one is removed.
    found = [
        path for path in complete_checkpoints(folder.parent) if call_number(path) <= call_number(complete)
    ]
    for path in (*found[keep:], *of_killed_runs):
        shutil.rmtree(path, ignore_errors=True)


def set_aside(checkpoint: Path) -> Path:
    """Rename a complete checkpoint so that it is not restored, and return its new path."""
    return checkpoint.rename(f"{checkpoint}.unreadable-{secrets.token_hex(2)}")


def _await_checksums(folder: Path, instances: int) -> dict[str, Any]:
    """Wait until all instances have written their files, and return [size in bytes, checksum] by file name.
    Raises: RuntimeError, if an instance could not write its file, or has not done so in time"""
    sums: dict[str, Any] = {}
    failures: list[str] = []
    until = time.monotonic() + _PATIENCE
    for instance in range(instances):
        done, failed = (folder / f"instance-{instance}.{how}" for how in ("done", "failed"))
        while not done.exists() and not failed.exists():
            if time.monotonic() > until:
                raise RuntimeError(f"instance {instance} has written nothing for {_PATIENCE} s")
            time.sleep(0.02)
        if failed.exists():
            failures.append(failed.read_text() or f"instance {instance} could not write to {folder}")
        else:
            sums |= json.loads(done.read_text())
    if failures:
        raise RuntimeError("; ".join(failures))
    return sums


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
        sums = sorted(read_manifest(folder)["files"].items())
    except (OSError, ValueError) as error:
        return [f"{_MANIFEST}: {error}"] if reader == 0 else []
    return [
        f"{name} is not what was written"
        for name, expected in sums[reader::readers]
        if not expected or _size_and_checksum(folder / name) != expected
    ]


def read_checkpoint(folder: Path) -> list[dict[str, Any]]:
    """Return the contents of each instance's file."""
    paths = [folder / f"instance-{i}.pt" for i in range(len(read_manifest(folder)["files"]))]
    return [torch.load(path, weights_only=True) for path in paths]


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest. Raises: OSError, ValueError, if it can't be read or is damaged"""
    data = (folder / _MANIFEST).read_bytes()
    if data[:8] != f"{zlib.crc32(data[8:]):08x}".encode():
        raise ValueError("its checksum differs")
    manifest = json.loads(data[8:])
    if manifest["format"] != _FORMAT:
        raise ValueError(
            f"another version of Pando wrote it, in format {manifest['format']}; this version reads format {_FORMAT}"
        )
    return manifest


class _ChecksumFile(io.BufferedWriter):
    """A file that computes the CRC-32 of its contents while they are written, before a disk can damage them."""

    checksum = 0

    def write(self, data: Any) -> int:
        self.checksum = zlib.crc32(data, self.checksum)
        return super().write(data)


def _size_and_checksum(path: Path) -> list[int]:
    """Return [size in bytes, checksum] of a file; [] if it can't be read."""
    size, total = 0, 0
    with suppress(OSError), open(path, "rb") as file:
        while part := file.read(1 << 24):
            size, total = size + len(part), zlib.crc32(part, total)
        return [size, total]
    return []


def _write_text(path: Path, text: str) -> None:
    """Write a small file atomically: to a temporary file, which is then renamed."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text)
    _flush_to_disk(temporary)
    temporary.rename(path)


def _flush_to_disk(path: Path) -> None:
    """Flush a file's contents, or a folder's list of files, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
