"""Checkpoints of a training in any number of instances: complete or not there, written while it goes on.

    checkpoint = popdist.Checkpoint("checkpoints", every=100)
    checkpoint.restore(trainer, loader, schedule=scheduler)
    for epoch in range(loader.state_dict()["epoch"], epochs):
        for batch in loader:
            trainer(*batch)
            scheduler.step()
            checkpoint.step()

What is written where is in `checkpoint_files.py`. Instances exchange nothing but the choice of what to restore, and
meet otherwise in the folder only, so one that dies leaves nobody waiting. torch.distributed.checkpoint is not used: it
coordinates its writers in collectives, and has nothing to reshard where all have the same weights.
"""

from __future__ import annotations

import atexit
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import poptorch
from popengine.environment import read
from poptorch.data.randomness import random_state, set_random_state
from poptorch.executor.training_state import set_training_state, training_state
from poptorch.logs import logger

from . import checkpoint_files as files
from . import collectives

_AT_EXIT = 60  # seconds that the end of a program waits for what is being written


class Checkpoint:
    """Saves a training every few calls, and restores the newest that is whole.

    Args:
        directory: of all checkpoints, the same for all instances; on several hosts a shared file system
        every:     calls from one checkpoint to the next; 0: only `save()` makes one
        keep:      how many of the newest stay
    """

    def __init__(self, directory: str | Path, every: int = 1, keep: int = 2) -> None:
        if every < 0 or keep < 1:
            raise ValueError(f"every must not be negative, and keep at least 1: got {every} and {keep}")
        self._directory, self._every, self._keep = Path(directory).absolute(), every, keep
        self._launch = read()
        self._model: Any = None
        self._parts: dict[str, Any] = {}
        self._run = (
            ""  # drawn once for all instances, so that nobody takes a killed run's files for this one's
        )
        self._writing: files.Writing | None = None
        self.calls = 0
        """Calls that the training has made, those before the checkpoint that was restored included."""

    def restore(self, model: Any, loader: Any = None, **others: Any) -> int:
        """Go on from the newest checkpoint that is whole; say what later ones are of. Call it once, before training.

        Args:
            model:  a training executor; it may be compiled or not
            loader: a `poptorch.DataLoader`, or None
            others: anything with `state_dict` and `load_state_dict`, such as schedulers, equal in all instances
        Returns: the calls that were made before; 0 without a checkpoint
        Raises:
            Error: the checkpoint is of another model, or several instances have not called `popdist.init()`
        """
        self._model, self._parts = model, {"loader": loader, **others} if loader is not None else others
        atexit.register(self.wait, _AT_EXIT)
        (self._run,) = self._from_first(lambda: [secrets.token_hex(4)])
        for folder in map(Path, self._from_first(lambda: list(map(str, files.complete(self._directory))))):
            faults = self._of_all(files.faults(folder, self._launch.instance, self._launch.instances))
            if not faults:
                self._take(folder)
                return self.calls
            logger.warning("checkpoint %s is damaged: %s; the one before is taken", folder, "; ".join(faults))
        return 0

    def step(self) -> None:
        """Count a call of the model, and write a checkpoint after every few. All instances call it after each one."""
        self.calls += 1
        if self._every and self.calls % self._every == 0:
            self.save()

    def save(self) -> None:
        """Begin to write a checkpoint, of a copy of everything. What could not be written is a warning, here or at the
        next one: the training goes on, and older checkpoints stay."""
        if self._model is None:
            raise poptorch.Error(
                "popdist.Checkpoint doesn't know what to save\n  fix: call restore(model, loader) before the training"
            )
        self.wait()
        place = files.Place(
            self._directory, self.calls, self._run, self._launch.instance, self._launch.instances
        )
        state = self._state()
        replicas = self._launch.instances * self._model._options.replication_factor
        self._writing = files.Writing(place, state, replicas, self._keep)
        self._writing.start()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until what is being written is complete; warn if it could not be written."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        writing.join(seconds)
        if writing.is_alive():
            logger.warning("the checkpoint of call %d is not complete, and is left", writing.place.calls)
        elif writing.failure:
            logger.warning(
                "the checkpoint of call %d could not be written: %s; the training goes on, older checkpoints stay",
                writing.place.calls,
                writing.failure,
            )

    # ---- what is in it -----------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        """This instance's file. Weights and optimizer state are shared out: each instance writes some parameters."""
        training = training_state(self._model)
        grouped, is_shared = self._grouped(), training.pop("shares_state")
        mine = {}
        for kind in ("weights", "optimizer"):
            names = sorted(training[kind])
            chosen = set(names[self._launch.instance :: self._launch.instances]) | grouped
            if is_shared and kind == "optimizer":
                chosen = names  # all that this instance has
            mine[kind] = {name: training[kind][name] for name in names if name in chosen}
        return {
            **{name: value for name, value in training.items() if name not in mine},
            **mine,
            "calls": self.calls,
            "host_random": random_state(),
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
        }

    def _grouped(self) -> set[str]:
        """Parameters of which instances have different values."""
        return set(getattr(self._model, "per_replica_params", {}))

    def _take(self, folder: Path) -> None:
        """Take this instance's share of a checkpoint that may be of another number of instances."""
        found = files.read(folder)
        each = found.replicas // found.instances
        here = self._model._options.replication_factor
        # The old replicas in the place of this instance's, and the old instance that had the first of them.
        replicas = [(self._launch.instance * here + i) % found.replicas for i in range(here)]
        own = found.files[replicas[0] // each]
        whole = {
            kind: {name: value for one in found.files for name, value in one[kind].items()}
            for kind in ("weights", "optimizer")
        }
        for kind in whole:
            whole[kind].update({n: v for n, v in own[kind].items() if n in self._grouped()})
        buffers = [_of_replica(found.files[r // each]["buffers"], r % each) for r in replicas]
        set_training_state(self._model, {**own, **whole, "buffers": buffers})
        unknown = sorted(set(self._parts) ^ set(own["parts"]))
        if unknown:
            raise poptorch.Error(
                f"checkpoint {folder} and restore() differ in {', '.join(unknown)}\n"
                f"  fix: give restore() what it was given when that was saved, or another directory"
            )
        for name, part in self._parts.items():
            part.load_state_dict(own["parts"][name])
        set_random_state(own["host_random"])
        self.calls = own["calls"]
        logger.info("the training goes on after call %d, from %s", self.calls, folder)

    # ---- all instances -----------------------------------------------------------------------------------

    def _from_first(self, make: Callable[[], list[str]]) -> list[str]:
        """What instance 0 makes of it, in all instances."""
        mine = _as_bytes(make()) if self._launch.instance == 0 else torch.empty(0, dtype=torch.uint8)
        return _as_texts(collectives.all_gather(mine))

    def _of_all(self, faults: list[str]) -> list[str]:
        """The faults that any instance has found."""
        return _as_texts(collectives.all_gather(_as_bytes(faults)))


def _as_bytes(texts: list[str]) -> torch.Tensor:
    return torch.tensor(list("".join(f"{text}\0" for text in texts).encode()), dtype=torch.uint8)


def _as_texts(value: torch.Tensor) -> list[str]:
    return bytes(value.tolist()).decode().split("\0")[:-1]


def _of_replica(buffers: list[Mapping[str, torch.Tensor]], replica: int) -> dict[str, torch.Tensor]:
    """A replica's buffers; before the first call there is one set for all."""
    return dict(buffers[replica if replica < len(buffers) else 0])
