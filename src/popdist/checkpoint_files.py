"""The files of checkpoints, and when each instance writes them.

    call-120/                       complete: renamed when all files were in it and on the disk
        manifest.json               replicas, and each file's size and checksum
        instance-0.pt ...
    call-130.5f3a9c01.unfinished/   being written, by the run with this random id
        instance-0.pt  instance-0.done  instance-1.pt  instance-2.failed ...

Each instance writes its file and then `done`, or `failed` with the reason. Instance 0 waits until all
instances have done this, and then renames or removes the folder. So an instance that dies can only lose the
current checkpoint.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import threading
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_UNFINISHED = ".unfinished"
_MANIFEST = "manifest.json"
_PATIENCE = 600  # seconds that instance 0 waits for the others' files
_FORMAT = 1


@dataclass(frozen=True)
class Place:
    """The folder of a checkpoint, and the instance that writes a file of it."""

    directory: Path
    calls: int  # of the model, before the checkpoint
    run: str  # the random id of this run
    instance: int
    instances: int


class Writing(threading.Thread):
    """A thread that writes one instance's file. In instance 0 it also completes the checkpoint."""

    def __init__(self, place: Place, state: dict[str, Any], replicas: int, keep: int) -> None:
        super().__init__(name=f"checkpoint {place.calls}", daemon=True)
        self.place, self._state, self._replicas, self._keep = place, state, replicas, keep
        self._complete_folder = place.directory / f"call-{place.calls}"
        self._folder = place.directory / f"call-{place.calls}.{place.run}{_UNFINISHED}"
        self.failure = ""  # the text of an error, of which Checkpoint.wait warns

    def run(self) -> None:
        for step in (self._write, self._complete):
            try:
                step()
            except Exception as error:
                self.failure = self.failure or str(error)

    def _write(self) -> None:
        """Write this instance's file, then `done`; on an error write `failed` with the reason, and raise."""
        state, self._state = self._state, {}  # freed when it is written
        folder, name = self._folder, f"instance-{self.place.instance}"
        part = folder / f"{name}.pt"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            written = {part.name: _save(part, state)}
            _write_text(folder / f"{name}.done", json.dumps(written))
        except Exception as error:
            if isinstance(error, OSError):
                error = OSError(error.errno, error.strerror, str(self.place.directory))
            with suppress(OSError):  # on a full disk, this takes the space of the partial file
                part.write_text(f"instance {self.place.instance}: {error}")
            with suppress(OSError):
                part.rename(folder / f"{name}.failed")
            raise error from None

    def _complete(self) -> None:
        """In instance 0: wait for all files, rename (or remove) the folder, and remove old checkpoints."""
        directory, folder = self.place.directory, self._folder
        if self.place.instance or not folder.exists():
            return
        try:
            manifest = {"format": _FORMAT, "replicas": self._replicas, "files": self._await_sums(folder)}
            _write_text(folder / _MANIFEST, json.dumps(manifest, indent=1))
            for path in folder.glob("*.done"):
                path.unlink()
            _sync(folder)
            if self._complete_folder.exists():  # a damaged checkpoint
                shutil.rmtree(self._complete_folder)
            folder.rename(self._complete_folder)
            _sync(directory)
        except Exception:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        killed = (path for path in directory.glob(f"call-*{_UNFINISHED}") if self.place.run not in path.name)
        for path in (*complete_checkpoints(directory)[self._keep :], *killed):
            shutil.rmtree(path, ignore_errors=True)

    def _await_sums(self, folder: Path) -> dict[str, Any]:
        """Wait for all files; return [bytes, checksum] by name. Raises: RuntimeError, if one is missing."""
        sums: dict[str, Any] = {}
        failures: list[str] = []
        until = time.monotonic() + _PATIENCE
        for instance in range(self.place.instances):
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
    return sorted(
        (path for path in directory.glob("call-*") if path.name[5:].isdecimal()), key=call_of, reverse=True
    )


def call_of(checkpoint: Path) -> int:
    """Return the number of calls before a complete checkpoint, from its folder's name."""
    return int(checkpoint.name[5:])


def faults(folder: Path, reader: int = 0, readers: int = 1) -> list[str]:
    """Return a text for each fault of a checkpoint; reader `reader` of `readers` checks only its share."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        sums = sorted(manifest["files"].items())
        if manifest["format"] != _FORMAT:
            return [f"it is of format {manifest['format']}, and this is {_FORMAT}"] if reader == 0 else []
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{_MANIFEST}: {error}"] if reader == 0 else []
    return [
        f"{name} is not what was written"
        for name, expected in sums[reader::readers]
        if _checksum(folder / name) != expected
    ]


def read(folder: Path) -> tuple[int, list[dict[str, Any]]]:
    """Return how many replicas saved a checkpoint, and the contents of each instance's file, by index."""
    manifest = json.loads((folder / _MANIFEST).read_text())
    paths = [folder / f"instance-{i}.pt" for i in range(len(manifest["files"]))]
    return manifest["replicas"], [torch.load(path, weights_only=True) for path in paths]


class _ChecksumFile(io.BufferedWriter):
    """A file that computes its checksum (CRC-32, in `sum`) while it is written."""

    sum = 0

    def write(self, data: Any) -> int:
        self.sum = zlib.crc32(data, self.sum)
        return super().write(data)


def _save(path: Path, state: Any) -> list[int]:
    """Write `state` to a file by torch.save, flush it to the disk, and return [bytes, checksum]."""
    with _ChecksumFile(io.FileIO(path, "wb")) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch's own, raised after the error of the disk
            raise error.__context__ or error from None
        size = file.tell()
    _sync(path)
    return [size, file.sum]


def _checksum(path: Path) -> list[int]:
    """Return [bytes, checksum] of a file; an empty list, if it can't be read."""
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
    _sync(temporary)
    temporary.rename(path)


def _sync(path: Path) -> None:
    """Flush a file's contents, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
