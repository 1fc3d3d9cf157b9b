"""Saved executors: a file of the compiled model, or the training state as a dictionary.

A file is one pickle with executables, options and state. Reading a pickle can run code, so read only files
that you trust. Only the version that wrote a file can read it. Weights are saved as a part of the pickled
model; `torch.save(model.state_dict(), ...)` saves weights alone.
"""

import copy
import hashlib
import io
import os
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from popengine.errors import Error
from popengine.run.instances.consistency import fingerprint_of_plan, hash_weights
from popengine.torch_private import tree_map_only

from ..annotating.replica_groups import Grouping
from ..compiling.executable import Executable
from ..enums import ConnectionType
from ..logs import logger
from ..ops.host import has_host_calls
from ..options import Options
from ..version import __version__
from .wrapped_model import WrappedModel

_HASH = hashlib.sha256().digest_size  # bytes of the hash that a file begins with
DEFAULT_NAME = "model.poptorch"
_VERSIONS = f"pando {__version__}, torch {torch.__version__}"
TrainingState = dict[str, Any]
_PLAIN_TYPES = (int, float, bool, str, tuple, list, type(None))


@dataclass(frozen=True)
class SavedExecutor:
    """The contents of a file of a compiled model; without model if saved with export_model=False."""

    executables: tuple[Executable, ...]
    options: Options
    per_replica_params: dict[str, Grouping]
    model: Any = None
    optimizer: Any = None
    state: dict[str, Any] = field(default_factory=dict)  # entries of `TrainState.export`, besides weights

    @property
    def training(self) -> bool:
        return self.executables[0].settings.training


def saved(executor: Any, with_model: bool, with_random_state: bool) -> SavedExecutor:
    """Return what a file of a compiled executor holds. Waits for other processes that have a part of the state."""
    plans = executor._plans
    first = plans.first or plans.require_executable()
    plans.state.move_to_host()  # the file can be read where there is no accelerator
    plans.fill_elsewhere()
    state = {**plans.export(weights=False), "optimizer": plans.optimizer_states()}
    if not with_random_state:
        del state["random"]
    others = (plan.executable for plan in plans.loaded if plan.executable is not first)
    parts = (executor._user_model, executor._optimizer) if with_model else ()
    return SavedExecutor((first, *others), executor.options, executor.per_replica_params, *parts, state=state)


def write_file(filename: str | os.PathLike[str], saved: SavedExecutor) -> None:
    """Write a saved executor to a file, or to `model.poptorch` in a folder, atomically."""
    path = Path(filename)
    if path.is_dir():
        path = path / DEFAULT_NAME
        logger.warning("%s is a folder: the model is saved as %s", filename, path)
    if path.parent.exists() and not path.parent.is_dir():
        raise AssertionError(f"can't save to {path}: {path.parent} is a file, and not a folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        content = io.BytesIO()
        content.seek(_HASH)
        # The default protocol is older, and can't pickle a memory format among the arguments of an operation.
        torch.save({"versions": _VERSIONS, "saved": saved}, content, pickle_protocol=4)
        content.getbuffer()[:_HASH] = hashlib.sha256(content.getbuffer()[_HASH:]).digest()
        unfinished.write_bytes(content.getbuffer())
        unfinished.replace(path)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise Error(
            f"can't save the model: {error}\n"
            "  why: the file is a pickle, and something in the model (a lambda, a local class) can't be pickled\n"
            "  fix: move it to the top level of a module, or save with export_model=False"
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)


def write_to_cache_folder(
    executable: Executable, options: Options, per_replica_params: dict[str, Grouping]
) -> None:
    """Write a compiled model, in instance 0, to the folder of `enableExecutableCaching`, if it can be
    written."""
    popart, settings = options._Popart, executable.settings
    if not popart("enableEngineCaching") or settings.counts.process != 0 or executable.plan.is_spread:
        return
    if has_host_calls(executable.plan):
        logger.warning(
            "enableExecutableCaching: this model is not written to the folder: it calls Python on the host"
            " (poptorch.CPU, custom_op), which a file can't hold"
        )
        return
    constants = hash_weights(executable.plan.partition.signature.constants)
    compiled = repr((_VERSIONS, fingerprint_of_plan(executable.plan, settings, {}, seed=0), constants))
    name = hashlib.sha256(compiled.encode()).hexdigest()[:32]
    path = Path(popart("cachePath")) / f"{name}.poptorch"
    try:
        if not path.exists():
            write_file(path, SavedExecutor((executable,), options, per_replica_params))
    except (OSError, AssertionError, Error) as error:
        logger.warning(
            "enableExecutableCaching: the compiled model is not written to %s: %s", path.parent, error
        )


def read_file(filename: str | os.PathLike[str]) -> SavedExecutor:
    """Return the contents of a file from `write_file`. Raises AssertionError if it is damaged, or of another
    version."""
    path = Path(filename)
    path = path / DEFAULT_NAME if path.is_dir() else path
    written = ", ".join(sorted(file.name for file in path.parent.glob("*.poptorch"))) or "none"
    if not path.exists():
        raise AssertionError(
            f"Invalid file {path}: it does not exist; files of compiled models in this folder: {written}\n"
            "  fix: write it with executor.save(path) or compileAndExport(path, ...)"
        )
    try:
        content = memoryview(path.read_bytes())
        if content[:_HASH] != hashlib.sha256(content[_HASH:]).digest():
            raise ValueError("this is no file of a compiled model, or it was damaged since it was written")
        loaded = torch.load(io.BytesIO(content[_HASH:]), weights_only=False)
        versions, saved = loaded["versions"], loaded["saved"]
    except Exception as error:  # reading another program's pickle can raise any error
        raise AssertionError(
            f"Invalid file {path}: {type(error).__name__}: {error}\n"
            "  fix: a file of executor.save(path); a file of torch.save: model.load_state_dict(torch.load(path))"
        ) from None
    if versions != _VERSIONS:
        raise AssertionError(
            f"Invalid file {path}: written by {versions}, this is {_VERSIONS}\n"
            "  fix: compile and save the model again"
        )
    if saved.options.connection_type == ConnectionType.Never:
        saved.options.connectionType(ConnectionType.Always)  # the offline target was for compilation only
    return saved


def read_file_for(filename: str, model: WrappedModel) -> SavedExecutor:
    """Return the contents of a file. Raises Error if it can't be read, or if it has another mode (training, inference)
    or other weights than the model."""
    try:
        saved = read_file(filename)
    except AssertionError as error:
        raise Error(str(error)) from None
    kinds = {True: "poptorch.trainingModel", False: "poptorch.inferenceModel"}
    if saved.training != model.training:
        raise Error(
            f"Invalid file {filename}: it was saved from a {kinds[saved.training]}, this is a"
            f" {kinds[model.training]}"
        )
    shapes = model.shapes(saved.executables[0].settings.replica_groups)
    weights = saved.executables[0].plan.partition.signature.parameters_and_buffers
    other = [f"{slot.key} {list(slot.shape)}" for slot in weights if shapes.get(slot.key) != slot.shape]
    if other:
        raise Error(
            f"Invalid file {filename}: it is of another model, which has {', '.join(other)}\n"
            "  fix: wrap the model that was saved, or compile this one"
        )
    return saved


# ---- the state of a run, which `popdist.Checkpoint` writes and restores -----------------------------------


def training_state(executor: Any) -> TrainingState:
    """Return a copy of the `TrainState.export` of an executor that trains, with the "rates" of parameter groups and the
    "loss_scaling". Of a state that instances share out, each has its part."""
    state, optimizer = executor._plans.state, executor._optimizer
    with state.commit.lock, torch.no_grad():
        state.commit.check_not_lost()
        state.move_to_host()  # the checkpoint can be read where there is no accelerator
        found = executor._plans.export()
        copied = tree_map_only(Tensor, Tensor.clone, {key: found[key] for key in ("weights", "buffers")})
        copied["optimizer"] = copy.deepcopy(found["optimizer"])  # an own `step()` may keep any objects
    return {
        **found,
        **copied,
        "rates": [
            {n: value for n, value in group.items() if n != "params" and isinstance(value, _PLAIN_TYPES)}
            for group in optimizer.param_groups
        ],
        "loss_scaling": getattr(optimizer, "loss_scaling", None),
    }


def set_training_state(executor: Any, state: TrainingState) -> None:
    """Replace the executor's weights, optimizer state, rates and random state by those in a `training_state`."""
    _check_state(executor, state)
    executor._plans.load(state)
    optimizer = executor._optimizer
    for group, rates in zip(optimizer.param_groups, state["rates"], strict=True):
        group.update(rates)
    if state["loss_scaling"] is not None:
        optimizer.loss_scaling = state["loss_scaling"]
    executor.setOptimizer(optimizer)


def _check_state(executor: Any, state: TrainingState) -> None:
    """Raise Error if names or shapes of weights (not per-replica), or the number of groups, differ."""
    saved = {**state["buffers"][0], **state["weights"]}
    here = {name: list(shape) for name, shape in executor._wrapped.shapes(()).items()}
    there = {name: list(value.shape) for name, value in saved.items()}
    other = [
        f"{name} is {there.get(name, 'missing')} there, {here.get(name, 'missing')} here"
        for name in sorted((here.keys() | there.keys()) - executor.per_replica_params.keys())
        if here.get(name) != there.get(name)
    ]
    if other:
        raise Error(
            f"the checkpoint is of another model: {'; '.join(other[:5])}\n"
            "  fix: build the model as in the run that saved the checkpoint"
        )
    if len(state["rates"]) != len(executor._optimizer.param_groups):
        raise Error(
            f"the optimizer has {len(executor._optimizer.param_groups)} parameter groups, and the checkpoint's had"
            f" {len(state['rates'])}\n"
            "  why: each group's learning rate and other rates are restored from the checkpoint\n"
            "  fix: build the optimizer with the parameter groups of the run that saved the checkpoint"
        )
