"""Modes, which the first compilation fixes, and attributes of the user's top-level module.

An executor for inference has modes of its own: it computes in eval mode what was in eval mode when it was wrapped or
at its first call. Later changes of modes and of torch's seed have no effect, and one warning each. All else that
forward reads is followed: `LoadedPlan.holds`.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..logs import listed, logger
from .wrapped_model import WrappedModel, attributes_of


class ModelFlags:
    """The modes of an executor's model, and what its compilation has fixed."""

    def __init__(self, model: WrappedModel) -> None:
        self._model = model
        self._warned: set[str] = set()
        self._taken = attributes_of(model.user)  # the user's attributes that the traced copy has
        # By name, the mode to compile a layer in, unless its flag is no longer the one in `_seen`.
        self._modes = self._seen = self._present_modes()
        self._compiled: dict[str, bool] = {}
        # By name, attributes of each compiled layer, and its flag `training` when the first plan was compiled.
        self._layers: dict[str, dict[str, Any]] = {}
        self._flags: dict[str, bool] = {}
        # Of each layer, its layers when the latest plan was compiled.
        self._children: list[dict[str, Any]] = []
        self._draws, self._seed = False, 0  # whether the model draws random numbers, and torch's seed
        if not model.training:
            vars(model.traced)["train"] = _OwnTrain(model.traced, self)

    def _present_modes(self) -> dict[str, bool]:
        """Return the flags `training` of all layers by name; of the top-level module that of the user's."""
        modes = {name: layer.training for name, layer in self._model.traced.named_modules()}
        return modes | {"": self._model.user.training}

    def set_mode(self, mode: bool) -> bool:
        """Set the mode in which layers are compiled. In inference the user's layers keep their flags. Return whether a
        layer is compiled in another mode."""
        model = self._model.user
        if self._model.training:
            model.train(mode)
            wanted = self._present_modes()
        else:
            model, before = self._model.traced, self._present_modes()
            type(model).train(model, mode)
            wanted = self._modes = {name: layer.training for name, layer in model.named_modules()}
            _set_modes(model, {name: flag for name, flag in before.items() if name})
            self._seen = before
        self._flags |= {name: flag for name, flag in self._present_modes().items() if name in self._flags}
        return any(wanted.get(name, flag) != flag for name, flag in self._compiled.items())

    # ---- compiling ---------------------------------------------------------------------------------------

    def take(self) -> None:
        """Take over attributes that were set on the user's top-level module, unless the copy has another one."""
        user, traced = attributes_of(self._model.user), vars(self._model.traced)
        if user.keys() == self._taken.keys() and all(map(operator.is_, user.values(), self._taken.values())):
            return
        absent = object()
        for name in user.keys() | self._taken.keys():
            before = self._taken.get(name, absent)
            is_new = user.get(name, absent) is not before
            if is_new and traced.get(name, absent) is before:  # not set on the copy
                traced.pop(name, None)
                if name in user:
                    traced[name] = user[name]
        self._taken = user

    def choose_modes(self) -> None:
        """Choose the modes of the first compilation, and forget what an earlier one has fixed."""
        self._layers, self._flags, self._children = {}, {}, []
        present, top = self._present_modes(), {"": self._model.traced.training}
        if self._model.training:
            self._compiled = present | top
            return
        modes, seen = self._modes | top, self._seen
        self._compiled = {
            name: modes[name] if flag == seen.get(name) else flag and modes.get(name, True)
            for name, flag in present.items()
        }

    @contextlib.contextmanager
    def as_compiled(self) -> Iterator[None]:
        """Set the modes of the model to those of the first compilation, inside the `with`."""
        now = {name: layer.training for name, layer in self._model.traced.named_modules()}
        self._compiled = now | self._compiled  # layers that are new keep their mode
        _set_modes(self._model.traced, self._compiled)
        try:
            yield
        finally:
            _set_modes(self._model.traced, now)

    def fix(self, draws: bool) -> None:
        """After a compilation, of a model that draws random numbers or not: note what it has fixed."""
        if not self._layers:
            self._draws, self._seed = draws, torch.initial_seed()
        self._flags = self._present_modes() | self._flags
        layers = dict(self._model.traced.named_modules()) | {"": self._model.user}  # its flag is the user's
        self._layers = {name: vars(layer) for name, layer in layers.items()}
        self._children = [dict(own["_modules"]) for own in self._layers.values()]

    def present_parameters(self) -> tuple[list[int], list[bool]]:
        """Return ids and `requires_grad` of the compiled layers' parameters; empty lists if layers were replaced."""
        layers = self._layers.values()
        if [own["_modules"] for own in layers] != self._children:
            return [], []
        shelves = (own["_parameters"].values() for own in layers)
        found = [value for value in chain.from_iterable(shelves) if value is not None]
        return [*map(id, found)], [value.requires_grad for value in found]

    # ---- changes after it --------------------------------------------------------------------------------

    def check_changes(self) -> None:
        """Warn, once per kind, of changes of modes since the compilation and of torch's seed: calls ignore them."""
        if any(own["training"] is not self._flags[name] for name, own in self._layers.items()):
            self._warn_of_modes()
        if self._draws and self._seed != torch.initial_seed():
            change = "torch.manual_seed was called after the compilation"
            self._warn_once(change, "keeps its seed", "options.randomSeed(seed), before the first call")

    def _warn_of_modes(self) -> None:
        """Warn, once, of layers in another mode than the one they were compiled in."""
        training = self._model.training
        modes = {name: own["training"] for name, own in self._layers.items()}
        others = {
            name: mode
            for name, mode in modes.items()
            if mode != self._flags[name] and mode != self._compiled[name] and (training or not mode)
        }
        if not others:
            return
        now = next(iter(others.values()))
        names = [name for name, mode in others.items() if mode == now]
        words = ("train", "eval") if now else ("eval", "train")
        self._warn_once(
            "{} is in {}() mode now, and was compiled in {}() mode".format(
                "the model" if "" in names else listed(names), *words
            ),
            "trains it in that mode" if training else "computes it in that mode",
            "set the mode before the first call, or call destroy() on the executor"
            + ("; wrap the model with poptorch.inferenceModel to evaluate it" if training else ""),
        )

    def _warn_once(self, change: str, effect: str, fix: str) -> None:
        """Log "`change`, and the compiled program `effect`" with a fix, unless `effect` was logged before."""
        if effect not in self._warned:
            self._warned.add(effect)
            logger.warning("%s, and the compiled program %s\n  fix: %s", change, effect, fix)


class _OwnTrain:
    """The method `train` of the copy of a model for inference: it sets the modes of the executor. Deep copies
    and pickles have the method of the module's class."""

    def __init__(self, module: nn.Module, flags: ModelFlags) -> None:
        self._module, self._flags = module, flags

    def __call__(self, mode: bool = True) -> nn.Module:
        self._flags.set_mode(mode)
        return self._module

    def __reduce__(self) -> Any:
        train: Callable[..., Any] = type(self._module).train
        return functools.partial, (train,), (train, (self._module,), {}, None)


def _set_modes(model: nn.Module, modes: Mapping[str, bool]) -> None:
    """Set the flags `training` of layers, by name. Other layers stay as they are."""
    for name, layer in model.named_modules():
        vars(layer)["training"] = modes.get(name, layer.training)
