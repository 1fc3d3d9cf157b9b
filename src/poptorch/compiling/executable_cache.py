"""The cache of compiled models: one file for each distinct model, options and inputs, in a folder of the user's.

A hit skips the capture: forward does not run. So the key holds all that a capture reads, as far as that can be
seen from outside: the structure of the model and every attribute of its modules, the source files of its
classes and functions and of the user's modules that those mention, the options, the inputs, and the versions.
Not seen: values that forward takes from elsewhere while it runs (files, environment variables, objects in
modules). Empty the folder when such a thing changes. A model with an attribute that has no stable description
is not cached.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from popengine.errors import Error
from popengine.settings import Settings

from ..executor import executable_file
from ..executor.arguments import Call
from ..ops.host import calls_host
from ..options import Options
from ..reporting.logs import logger
from .executable import Executable
from .fingerprint import Unstable, fingerprint

# What does not change what is compiled.
_IRRELEVANT = {
    *("connection_type", "device_kind", "ipu_id", "log_dir", "max_repeat_logs", "model_name", "random_seed"),
}
_IRRELEVANT_POPART = {"cachePath", "enableEngineCaching", "engineOptions"}
_unusable: set[Path] = set()  # folders of which that was told


class Cache:
    """The place of one model in the folder; without a path it holds nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def load(self, settings: Settings) -> Executable | None:
        """What was compiled before, to be run with these settings."""
        if self._path is None or not self._path.exists():
            return None
        try:
            found = executable_file.read(self._path)
            settings = replace(settings, anchors=found.anchors.wanted)
        except (AssertionError, AttributeError) as error:
            logger.warning("the cached model %s can't be used and is compiled again: %s", self._path, error)
            return None
        logger.info("compiled model loaded from the cache: %s; forward is not captured", self._path)
        return replace(found, settings=settings)

    def store(self, executable: Executable) -> None:
        if self._path is not None and calls_host(executable.plan):
            logger.warning(
                "enableExecutableCaching: this model is not cached: it calls Python on the host (poptorch.CPU,"
                " custom_op), which a file can't hold"
            )
        elif self._path is not None:
            try:
                executable_file.write(self._path, executable.without_graph())
            except (OSError, AssertionError, Error) as error:
                _warn_unusable(self._path.parent, error)
                return
            logger.info("compiled model kept in the cache: %s", self._path)


def _warn_unusable(folder: Path, error: Exception) -> None:
    if folder not in _unusable:  # told once
        _unusable.add(folder)
        logger.warning(
            "enableExecutableCaching: %s can't be used, so models are compiled each time: %s", folder, error
        )


@contextlib.contextmanager
def cache(model: nn.Module, call: Call, options: Options, settings: Settings) -> Iterator[Cache]:
    """The cached model for these options and inputs. Where several processes train together, the first one
    in compiles, and the others wait for its file."""
    path = _path(model, call, options, settings)
    with _alone(path.parent) if path and settings.counts.instances > 1 else contextlib.nullcontext():
        yield Cache(path)


def _path(model: nn.Module, call: Call, options: Options, settings: Settings) -> Path | None:
    """The file of this model; None: it is not cached."""
    popart = options._Popart.options
    if not popart.get("enableEngineCaching"):
        return None
    folder = Path(popart["cachePath"])
    as_all_have = replace(settings, counts=replace(settings.counts, instance=0))
    try:
        key = fingerprint(model, call, _described(options), as_all_have)
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{key}.poptorch"
    except Unstable as error:
        logger.warning("enableExecutableCaching: this model is not cached: %s", error)
    except OSError as error:
        _warn_unusable(folder, error)
    return None


def _described(options: Options) -> list[Any]:
    values = {name: value for name, value in options._values.items() if name not in _IRRELEVANT}
    popart = {
        name: value for name, value in options._Popart.options.items() if name not in _IRRELEVANT_POPART
    }
    parts = (options._execution_strategy, options.Precision, options.Training, options.TensorLocations)
    return [values, popart, [repr(part) for part in parts]]


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Only one process at a time; the lock is on the folder, so that it leaves no file."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
