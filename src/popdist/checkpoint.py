"""Checkpoints of a run, written in the background. Any number of instances can restore them.

    checkpoint = popdist.Checkpoint.every(calls=20)
    for batch in popdist.resumable(loader, checkpoint, trainer, epochs=3, schedule=scheduler):
        trainer(*batch)
        scheduler.step()

`checkpoint_files.py` describes the files. Instances communicate only to choose the checkpoint that they restore, and
otherwise through the folder, so that no instance waits for one that has died. torch.distributed.checkpoint is not used:
its writers coordinate in collectives.
"""

from __future__ import annotations

import atexit
import os
import secrets
import sys
import threading
from collections import ChainMap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import poptorch
from popengine.environment import CHECKPOINTS, read_launch
from popengine.errors import without_internal_frames
from poptorch.checks import checked
from poptorch.data.loader_state import random_state, set_random_state
from poptorch.executor.executable_file import set_training_state, training_state
from poptorch.executor.executor import PoplarExecutor
from poptorch.logs import logger

from . import checkpoint_files as files
from . import collectives

# Fields of a parameter group.
_NOT_COMPARED = ("params", "initial_lr", "foreach", "fused", "capturable", "differentiable")


@without_internal_frames
class Checkpoint:
    """The checkpoints of a run: `step` saves one every few calls, `restore` loads the newest valid one.

    >>> checkpoint = popdist.Checkpoint("checkpoints", every=100)
    >>> for batch in popdist.resumable(loader, checkpoint, trainer, epochs=3):
    ...     trainer(*batch)

    Args:
        directory: folder of all checkpoints, the same in all instances (on several hosts: a shared one)
        every:     calls from one checkpoint to the next; 0: only `save()` writes checkpoints
        keep:      number of checkpoints to keep; older ones are removed
    """

    def __init__(self, directory: str | Path, every: int = 1, keep: int = 2) -> None:
        self._calls_between = checked("popdist.Checkpoint: every", every, int, ValueError, 0)
        self._keep = checked("popdist.Checkpoint: keep", keep, int, ValueError, 1)
        self._directory = Path(os.fspath(directory)).absolute()
        existing = next(path for path in (self._directory, *self._directory.parents) if path.exists())
        if not existing.is_dir():
            raise NotADirectoryError(
                f"popdist.Checkpoint: {existing} is a file\n"
                "  fix: the directory is a folder, which is made if it is missing; to load a file written by"
                " torch.save, call model.load_state_dict(torch.load(file))"
            )
        self._launch = read_launch()
        self._model: Any = None
        self._parts: dict[str, Any] = {}
        self._run: dict[str, Any] = {}  # the description of this run
        self._run_id = ""  # random and equal in all instances: distinguishes the files of a killed run
        self._writing: threading.Thread | None = None
        self._failure = ""  # the text of the newest checkpoint's error
        self._saved_call = 0  # `calls` at the newest checkpoint
        self.calls = 0
        """Calls that the run has made, including those before the restored checkpoint."""

    @classmethod
    def every(cls, calls: int, directory: str | Path | None = None, keep: int = 2) -> Checkpoint:
        """Return a `Checkpoint` that saves after every `calls` calls, in the folder `directory`: by default that of
        `poprun --checkpoint-dir`, else "checkpoints"."""
        return cls(directory or os.environ.get(CHECKPOINTS, "checkpoints"), calls, keep)

    def restore(self, model: Any, loader: Any = None, **others: Any) -> int:
        """Load the newest undamaged checkpoint into the arguments, which each `save` will save. Call it once.

        A warning names the checkpoint that is loaded. Damaged checkpoints are renamed, with a warning. At exit
        the program will wait up to 60 s for an unfinished checkpoint.

        Args:
            model:  a training executor, compiled or not
            loader: a `poptorch.DataLoader`, or None
            others: objects with `state_dict` and `load_state_dict`, equal in all instances (schedulers)
        Returns: the number of calls before the checkpoint; 0 if none is found
        Raises: Error, if the checkpoint is of another model, optimizer, number of replicas, options or arguments,
            or, with several instances, if `popdist.init()` was not called
        """
        fix = "checkpoint.restore(trainer, loader), with what poptorch.trainingModel returns"
        checked("popdist.Checkpoint.restore", model, PoplarExecutor, TypeError, fix=fix)
        self._model, self._parts = model, {"loader": loader, **others} if loader is not None else others
        for name, part in self._parts.items():
            if not hasattr(part, "load_state_dict"):
                raise TypeError(
                    f"popdist.Checkpoint.restore: {name} has no state_dict() and load_state_dict()\n"
                    "  fix: checkpoint.restore(trainer, loader, scheduler=scheduler)"
                )
        self._run = self._describe_run()
        atexit.register(self.wait, 60)  # seconds
        # Instance 0 chooses the checkpoint, since other instances may see other files.
        names = [path.name for path in files.complete_checkpoints(self._directory)]
        is_first = self._launch.instance == 0
        self._run_id, *names = _all_gather([secrets.token_hex(4), *names] if is_first else [])
        for folder in (self._directory / name for name in names):
            faults = _all_gather(files.find_damage(folder, self._launch.instance, self._launch.instances))
            if not faults:
                self._load_checkpoint(folder)
                return self.calls
            if is_first:
                text = "can't restore checkpoint %s: %s; it is renamed to %s, and an older one is tried"
                logger.warning(text, folder, "; ".join(faults), files.set_aside(folder).name)
        return 0

    def step(self) -> None:
        """Count a call of the model, and `save` if that is due. All instances call this after each call;
        `popdist.resumable` does it for you.

        >>> checkpoint.step()
        """
        self.calls += 1
        if self._calls_between and self.calls % self._calls_between == 0:
            self.save()

    def save(self) -> None:
        """Copy the state, and start to write it in the background; first `wait` for the previous checkpoint.

        >>> checkpoint.save()  # of what checkpoint.restore(trainer, loader) was given

        If writing fails, the next `wait` warns, and older checkpoints stay. Raises: Error, before `restore`
        """
        if self._model is None:
            raise poptorch.Error(
                "popdist.Checkpoint doesn't know what to save\n"
                "  fix: checkpoint.restore(trainer, loader) before the first call"
            )
        self.wait()
        state, self._saved_call = self._copy_state(), self.calls
        folder = self._directory / f"call-{self.calls}.{self._run_id}{files.UNFINISHED}"
        place = self._launch.instance, self._launch.instances

        def write() -> None:
            self._failure = files.write_checkpoint(folder, *place, state, self._run, self._keep)

        self._writing = threading.Thread(target=write, daemon=True)
        self._writing.start()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the checkpoint that is being written, if any, is complete; warn if writing it failed, or
        has not ended after `seconds` (None: no limit)."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        writing.join(seconds)
        if writing.is_alive():
            logger.warning("the checkpoint of call %d is not complete, and is left", self._saved_call)
        elif self._failure:
            text = "the checkpoint of call %d could not be written: %s; the run continues, older checkpoints stay"
            logger.warning(text, self._saved_call, self._failure)

    @property
    def _parts_of_replica(self) -> int:
        return self._model._options.Distributed.instances_per_replica

    def _describe_run(self) -> dict[str, Any]:
        """Return this run's command line, and values that are equal in each run that restores its checkpoints."""
        options, optimizer = self._model._options, self._model._optimizer
        seed = {"random_seed": options.random_seed} if options.exists("random_seed") else {}
        run = {
            "command": " ".join(sys.argv),
            "replicas": self._launch.instances // self._parts_of_replica * options.replication_factor,
            "optimizer": type(optimizer).__name__,
            "device_iterations": options.device_iterations,
            **options.Training.toDict(),
            **seed,
        }
        for number, group in enumerate(optimizer.param_groups):
            rates = {**group, "lr": group.get("initial_lr", group.get("lr"))}  # before a scheduler's changes
            run |= {f"{n} of group {number}": repr(v) for n, v in rates.items() if n not in _NOT_COMPARED}
        return run

    # ---- contents ----------------------------------------------------------------------------------------

    def _copy_state(self) -> dict[str, Any]:
        """Return copies of the training state, the contents of this instance's file. Of n instances with the same
        ipus each saves the weight and optimizer state of every n-th parameter (of a sharded state its shard), and all
        else."""
        training, parts = training_state(self._model), self._parts_of_replica
        for key in ("weights",) if self._model._plans.state.owner else ("weights", "optimizer"):
            names = sorted(training[key])
            share = names[self._launch.instance // parts :: self._launch.instances // parts]
            # The values of per-replica parameters differ between instances.
            chosen = {*share, *self._model.per_replica_params}
            training[key] = {name: training[key][name] for name in names if name in chosen}
        return {
            **training,
            "calls": self.calls,
            "host_random": random_state(),
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
        }

    def _load_checkpoint(self, folder: Path) -> None:
        """Load a checkpoint of any number of instances into the arguments of `restore`."""
        run = files.read_manifest(folder)["run"]
        here = {name: self._run[name] for name in run.keys() & self._run.keys() - {"command"}}
        differing = [name for name in sorted(here) if run[name] != here[name]]
        if differing:
            differences = "; ".join(f"{name} {run[name]} there, {here[name]} here" for name in differing)
            raise poptorch.Error(
                f"checkpoint {folder} is of another run: {differences}\n"
                "  fix: another directory for this run; or the same optimizer, options and number of replicas"
            )
        saved, count = files.read_checkpoint(folder), run["replicas"]
        # The number of replicas in a file, and the number of files of a replica.
        size, parts = max(1, count // len(saved)), max(1, len(saved) // count)
        here, first = self._model._options.replication_factor, self._launch.instance // self._parts_of_replica
        # The index of the saved replica for each replica of this instance.
        replicas = [(first * here + i) % count for i in range(here)]
        files_of = [saved[r // size * parts :][:parts] for r in replicas]
        own_file = files_of[0][0]
        state = dict(own_file)
        for key in ("weights", "optimizer"):
            # Own last, since the values of per-replica parameters differ between instances.
            state[key] = {name: value for file in (*saved, own_file) for name, value in file[key].items()}
        # Before the first call there is one set of buffers for all replicas of an instance.
        sets = [
            (file["buffers"], r % size) for r, files in zip(replicas, files_of, strict=True) for file in files
        ]
        buffers = [buffers[i if i < len(buffers) else 0] for buffers, i in sets]
        state["buffers"] = [dict(ChainMap(*buffers[i : i + parts])) for i in range(0, len(buffers), parts)]
        # A process that holds a part of the weights copies these after the compilation, which says which they are.
        set_training_state(self._model, state, copies=self._parts_of_replica == 1)
        unknown = sorted(set(self._parts) ^ set(own_file["parts"]))
        if unknown:
            raise poptorch.Error(
                f"checkpoint {folder} and restore() differ in {', '.join(unknown)}\n"
                f"  fix: give restore() the same arguments as when it was saved, or another directory"
            )
        for name, part in self._parts.items():
            part.load_state_dict(own_file["parts"][name])
        set_random_state(own_file["host_random"])
        self.calls = self._saved_call = own_file["calls"]
        if self._launch.instance == 0:
            is_other_command = run["command"] != self._run["command"]
            by = f", which another command wrote: {run['command']}" if is_other_command else ""
            logger.warning("the run resumes after call %d, from %s%s", self.calls, folder, by)


@without_internal_frames
def resumable(
    loader: Iterable[Any], checkpoint: Checkpoint, executor: Any, epochs: int = 1, **others: Any
) -> Iterator[Any]:
    """Restore the newest checkpoint, yield the remaining batches of `epochs` epochs; call `step` after each.

    >>> for batch in popdist.resumable(loader, popdist.Checkpoint("checkpoints"), trainer, epochs=3):
    ...     trainer(*batch)

    All instances must make one call of the executor for each batch. The state after the last call is also saved,
    so a program that is started again after its end gets no batch.

    Args:
        checkpoint: where the state is saved, and how often
        epochs: the number of epochs of the whole run
        loader, executor, others: as in `Checkpoint.restore`
    Raises: Error, as `Checkpoint.restore`; TypeError for arguments of other types
    """
    checked("popdist.resumable: loader", loader, poptorch.DataLoader, TypeError)
    checked("popdist.resumable: checkpoint", checkpoint, Checkpoint, TypeError)
    checkpoint.restore(executor, loader, **others)
    return _remaining(loader, checkpoint, epochs)


def _remaining(loader: Any, checkpoint: Checkpoint, epochs: int) -> Iterator[Any]:
    while loader.state_dict()["epoch"] < epochs:
        for batch in loader:
            yield batch
            checkpoint.step()
    if checkpoint.calls != checkpoint._saved_call:
        checkpoint.save()
    checkpoint.wait()


def _all_gather(texts: list[str]) -> list[str]:
    """Return the texts of all instances, concatenated in their order. All instances must call it."""
    gathered = collectives.all_gather_bytes("".join(f"{text}\0" for text in texts).encode())
    return gathered.decode().split("\0")[:-1]
