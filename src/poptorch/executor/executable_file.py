"""Saved executors: a file of a model with its options and training state, or the training state as a dictionary.

A file is one pickle. Reading a pickle can run code, so read only files that you trust. Only the version that wrote a
file can read it. Weights are saved as a part of the pickled model; `torch.save(model.state_dict(), ...)` saves weights
alone. No compiled code is saved: an executor from a file compiles at its first call.
"""

import copy
import hashlib
import io
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from popengine.errors import Error
from popengine.torch_private import tree_map_only

from ..annotating.replica_groups import Grouping
from ..enums import ConnectionType
from ..logs import logger
from ..options import Options
from ..version import __version__

# A file begins with a line of these words, followed by a hash and the pickle.
_WORDS = [b"pando", __version__.encode(), b"executor"]
_HASH = hashlib.sha256().digest_size
DEFAULT_NAME = "model.poptorch"
TrainingState = dict[str, Any]
_PLAIN_TYPES = (int, float, bool, str, tuple, list, type(None))


@dataclass(frozen=True)
class SavedExecutor:
    """The contents of a file. Without `model` and `optimizer` if it was saved with export_model=False."""

    training: bool
    options: Options
    per_replica_params: dict[str, Grouping]
    modes: dict[str, bool]  # by name of a layer, the flag `training` that it is compiled with
    shapes: dict[str, list[int]]  # of the weights, by name
    kind: str  # name of the optimizer's class
    model: Any = None
    optimizer: Any = None
    state: dict[str, Any] = field(default_factory=dict)  # entries of `TrainState.export`, besides "weights"


def saved(executor: Any, with_model: bool, with_random_state: bool) -> SavedExecutor:
    """Return the contents of an executor's file. Waits for other processes that have a part of the state."""
    plans, wrapped, optimizer = executor._plans, executor._wrapped, executor._optimizer
    plans.state.move_to_host()  # the file can be read where there is no accelerator
    plans.fill_elsewhere()
    state = {**plans.export(), "optimizer": plans.state.gather_optimizer_states()}
    for name, is_saved in (("weights", False), ("buffers", with_model), ("random", with_random_state)):
        if not is_saved:
            del state[name]
    return SavedExecutor(
        wrapped.training,
        executor.options,
        executor.per_replica_params,
        executor._compilation.flags.modes(),
        wrapped.shapes(),
        type(optimizer).__name__,
        *((wrapped.user, optimizer) if with_model else ()),
        state=state,
    )


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
        # The default protocol can't pickle a torch.memory_format.
        torch.save(saved, content, pickle_protocol=4)
        with unfinished.open("wb") as file:
            file.writelines(
                (b" ".join(_WORDS) + b"\n", hashlib.sha256(content.getbuffer()).digest(), content.getbuffer())
            )
        unfinished.replace(path)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise Error(
            f"can't save the model: {error}\n"
            "  why: the file is a pickle, and something in the model (a lambda, a local class) can't be pickled\n"
            "  fix: move it to the top level of a module, or save with export_model=False"
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)


def read_file(filename: str | os.PathLike[str]) -> SavedExecutor:
    """Return the contents of a file from `write_file`. Raises AssertionError if it is damaged, or of another
    version."""
    path = Path(filename)
    path = path / DEFAULT_NAME if path.is_dir() else path
    written = ", ".join(sorted(file.name for file in path.parent.glob("*.poptorch"))) or "none"
    if not path.exists():
        raise AssertionError(
            f"Invalid file {path}: it does not exist; files of executors in this folder: {written}\n"
            "  fix: write it with executor.save(path) or compileAndExport(path, ...)"
        )
    with path.open("rb") as file:
        words, content = file.readline(100).split(), memoryview(file.read())
    if words[:1] + words[2:] == [_WORDS[0], _WORDS[2]] and words != _WORDS:
        raise AssertionError(
            f"Invalid file {path}: pando {words[1].decode('utf-8', 'replace')} wrote it, and this is pando"
            f" {__version__}\n"
            "  fix: save the model again; or load the file with the version that wrote it, save the state_dict() of"
            " model and optimizer with torch.save, and load these here"
        )
    try:
        if words != _WORDS or content[:_HASH] != hashlib.sha256(content[_HASH:]).digest():
            raise ValueError("this is no file of an executor, or it was damaged since it was written")
        saved = torch.load(io.BytesIO(content[_HASH:]), weights_only=False)
    except Exception as error:  # unpickling a model can raise any error
        raise AssertionError(
            f"Invalid file {path}: {type(error).__name__}: {error}\n"
            "  fix: a file of executor.save(path); a file of torch.save: model.load_state_dict(torch.load(path))"
        ) from None
    if saved.options.connection_type == ConnectionType.Never:
        saved.options.connectionType(ConnectionType.Always)  # the offline target was for compilation only
    return saved


def read_file_for(filename: str, executor: Any) -> SavedExecutor:
    """Return the contents of a file. Raises Error if it can't be read, or if it has another mode (training, inference),
    other weights or another optimizer than the executor."""
    try:
        saved = read_file(filename)
    except AssertionError as error:
        raise Error(str(error)) from None
    model, name = executor._wrapped, type(executor._optimizer).__name__
    calls = {True: "poptorch.trainingModel", False: "poptorch.inferenceModel"}
    if saved.training != model.training:
        raise Error(
            f"Invalid file {filename}: it was saved from a {calls[saved.training]}, this is a"
            f" {calls[model.training]}\n  fix: wrap the model with {calls[saved.training]}, or poptorch.load(filename)"
        )
    if difference := _difference(saved.shapes, model.shapes()):
        raise Error(
            f"Invalid file {filename}: it is of another model: {difference}\n"
            "  fix: wrap the model that was saved, or compile this one"
        )
    if saved.kind != name:
        raise Error(
            f"Invalid file {filename}: it has the state of the optimizer {saved.kind}, and this model trains with"
            f" {name}\n  fix: setOptimizer(...) with one of class {saved.kind}, or poptorch.load(filename)"
        )
    saved.state.pop("buffers", None)  # as its weights, those of the model stay
    return saved


# ---- the state of a run, which `popdist.Checkpoint` writes and restores -----------------------------------


def training_state(executor: Any) -> TrainingState:
    """Return a copy of the `TrainState.export` of an executor that trains, with the "rates" of parameter groups and the
    "loss_scaling". Of a state that instances share out, each has its part."""
    state, optimizer = executor._plans.state, executor._optimizer
    with state.commit.lock, torch.no_grad():
        state.commit.check_not_lost()
        state.move_to_host()  # the checkpoint can be read where there is no accelerator
        exported = executor._plans.export()
        copied = tree_map_only(Tensor, Tensor.clone, {key: exported[key] for key in ("weights", "buffers")})
        copied["optimizer"] = copy.deepcopy(exported["optimizer"])  # an own `step()` may keep any objects
    return {
        **exported,
        **copied,
        "rates": [
            {n: value for n, value in group.items() if n != "params" and isinstance(value, _PLAIN_TYPES)}
            for group in optimizer.param_groups
        ],
        "loss_scaling": getattr(optimizer, "loss_scaling", None),
    }


def set_training_state(executor: Any, state: TrainingState, copies: bool = True) -> None:
    """Replace the executor's weights, optimizer state, rates and random state by (`copies` of) those in a
    `training_state`."""
    _check_state(executor, state)
    executor._plans.load(state, copies)
    optimizer = executor._optimizer
    for group, rates in zip(optimizer.param_groups, state["rates"], strict=True):
        group.update(rates)
    if state["loss_scaling"] is not None:
        optimizer.loss_scaling = state["loss_scaling"]
    executor.setOptimizer(optimizer)


def _check_state(executor: Any, state: TrainingState) -> None:
    """Raise Error if names or shapes of weights (not per-replica), or the number of groups, differ."""
    per_replica, here = executor.per_replica_params, executor._wrapped.shapes()
    saved = {**state["buffers"][0], **state["weights"]}
    there = {name: list(value.shape) for name, value in saved.items() if name not in per_replica}
    if difference := _difference(there, {name: here[name] for name in here.keys() - per_replica.keys()}):
        raise Error(
            f"the checkpoint is of another model: {difference}\n"
            "  fix: build the model as in the run that saved the checkpoint"
        )
    if len(state["rates"]) != len(executor._optimizer.param_groups):
        raise Error(
            f"the optimizer has {len(executor._optimizer.param_groups)} parameter groups, and the checkpoint's had"
            f" {len(state['rates'])}\n"
            "  why: each group's learning rate and other rates are restored from the checkpoint\n"
            "  fix: build the optimizer with the parameter groups of the run that saved the checkpoint"
        )


def _difference(there: Mapping[str, list[int]], here: Mapping[str, list[int]]) -> str:
    """Return in words which weights have other names or shapes in a file than in a model; "" if none."""
    names = sorted(name for name in there.keys() | here.keys() if here.get(name) != there.get(name))
    shapes = ((name, there.get(name, "missing"), here.get(name, "missing")) for name in names[:5])
    return "; ".join(f"{name} is {saved} there, {present} here" for name, saved, present in shapes)
