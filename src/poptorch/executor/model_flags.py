"""What a compilation fixes of a model besides weights: modes, layers, plain attributes and hooks.

An executor for inference has modes of its own: it computes in eval mode what was in eval mode when it was wrapped or
at its first call. Changes after compilation have no effect, and one warning for each kind of change.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from popengine.errors import Error

from ..logs import listed, logger
from .wrapped_model import WrappedModel, attributes_of

# Attributes of these types are compared with those of the compilation.
_PLAIN = (bool, int, float, complex, str, bytes, tuple, type(None), torch.dtype)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NOT_OF_FORWARD = ("__init__", "__repr__", "__setstate__", "extra_repr", "reset_parameters")


class ModelFlags:
    """The modes of an executor's model, and what its compilation has fixed."""

    def __init__(self, model: WrappedModel) -> None:
        self._model = model
        self._warned: set[str] = set()
        self._taken = attributes_of(model.user)  # the user's attributes that the traced copy has
        # By name, the mode to compile a layer in, unless its flag is no longer the one in `_seen`.
        self._modes = self._seen = self._present_modes()
        self._compiled: dict[str, bool] = {}
        self._layers: dict[str, _Fixed] = {}
        self._draws, self._torch_state = False, None
        if not model.training:
            vars(model.traced)["train"] = _OwnTrain(model.traced, self)

    def _present_modes(self) -> dict[str, bool]:
        """Return the flags `training` of all layers by name; of the top-level module that of the user's."""
        modes = {name: layer.training for name, layer in self._model.traced.named_modules()}
        return modes | {"": self._model.user.training}

    def set_mode(self, mode: bool) -> None:
        """Set the mode in which layers are compiled. In inference the user's layers keep their flags."""
        if self._model.training:
            self._model.user.train(mode)
        else:
            model, before = self._model.traced, self._present_modes()
            type(model).train(model, mode)
            self._modes = {name: layer.training for name, layer in model.named_modules()}
            _set_modes(model, {name: flag for name, flag in before.items() if name})
            self._seen = before
        for name, flag in self._present_modes().items():
            if name in self._layers:  # no second warning at the next call
                self._layers[name].mode = flag

    # ---- compiling ---------------------------------------------------------------------------------------

    def take(self) -> None:
        """Before the first compilation: choose the modes, and take over new attributes of the user's model."""
        user, traced = attributes_of(self._model.user), self._model.traced
        for name in user.keys() | self._taken.keys():
            before = self._taken.get(name)
            if user.get(name) is not before and vars(traced).get(name) is before:  # not set on the copy
                vars(traced).pop(name, None)
                if name in user:
                    vars(traced)[name] = user[name]
        self._taken = user
        present, top = self._present_modes(), {"": traced.training}
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
        _set_modes(self._model.traced, self._compiled)
        try:
            yield
        finally:
            _set_modes(self._model.traced, now)

    def fix(self, draws: bool) -> None:
        """After the first compilation, of a model that draws random numbers or not: store what it has fixed."""
        self._draws = draws
        self._torch_state = self._present_torch_state()
        layers = dict(self._model.traced.named_modules())
        names: set[str] = set().union(*map(_names_read_by, {type(layer) for layer in layers.values()}))
        modes = self._present_modes()
        layers[""] = self._model.user  # with attributes of its own, and the same layers and hooks
        self._layers = {name: _Fixed(layer, modes[name], names) for name, layer in layers.items()}

    def _present_torch_state(self) -> Any:
        """Return torch's dtype for autocast (False: off), and torch's seed, or False if the model draws no numbers."""
        autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
        return autocast, self._draws and torch.initial_seed()

    def present_parameters(self) -> list[tuple[int, bool]]:
        """Return id and `requires_grad` of each compiled parameter; [] if layers were replaced."""
        if any(layer.own["_modules"] != layer.layers for layer in self._layers.values()):
            return []
        return [
            (id(parameter), parameter.requires_grad)
            for layer in self._layers.values()
            for parameter in layer.parameters.values()
            if parameter is not None
        ]

    # ---- changes after it --------------------------------------------------------------------------------

    def check_changes(self) -> None:
        """Warn, once per kind, of changes of the model since its compilation, of torch's seed and of
        autocast: calls ignore them. Raises Error if the hooks of a parameter have changed."""
        changed = {name: layer for name, layer in self._layers.items() if layer.has_changed()}
        if changed:
            self._warn_of_modes(changed)
            found = [change for name, layer in changed.items() for change in layer.changes(name)]
            if found:
                self._warn_once(f"{listed(found)} since the compilation", "computes as it did then")
        if self._torch_state is not None and self._torch_state != (now := self._present_torch_state()):
            (autocast, seed), before = now, self._torch_state
            if autocast != before[0]:
                change = (
                    f"torch.autocast is {autocast or 'off'}, and was {before[0] or 'off'} at the compilation"
                )
                self._warn_once(change, "computes in the types of then", "use torch.autocast in forward")
            if seed != before[1]:
                change = "torch.manual_seed was called after the compilation"
                self._warn_once(change, "keeps its seed", "options.randomSeed(seed), before the first call")
        names = [
            f"{name}.{key}".lstrip(".")
            for name, layer in self._layers.items()
            for key, parameter in layer.parameters.items()
            if parameter is not None and _hooks_of(parameter) != layer.parameter_hooks.get(key, [])
        ]
        if names and self._model.training:
            raise Error(
                f"a hook is set on, or removed from, {listed(names)} of a compiled model, and that would have no"
                " effect\n"
                "  why: the backward was compiled at the first call, with the hooks that parameters had then\n"
                "  fix: call register_hook before the first call; or executor.destroy(), register_hook, and call it"
                " again"
            )

    def _warn_of_modes(self, changed: Mapping[str, "_Fixed"]) -> None:
        """Warn, once, of layers in another mode than the one they were compiled in."""
        training = self._model.training
        modes = {name: layer.own["training"] for name, layer in changed.items()}
        others = {
            name: mode
            for name, mode in modes.items()
            if mode != changed[name].mode and mode != self._compiled[name] and (training or not mode)
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

    def _warn_once(
        self,
        change: str,
        effect: str,
        fix: str = "call destroy() on the executor: its next call compiles the model as it is",
    ) -> None:
        """Log "`change`, and the compiled program `effect`" with a fix, unless `effect` was logged before."""
        if effect not in self._warned:
            self._warned.add(effect)
            logger.warning("%s, and the compiled program %s\n  fix: %s", change, effect, fix)


class _Fixed:
    """A layer when it was compiled: its mode, the layers in it, its attributes in `names`, and hooks."""

    def __init__(self, layer: nn.Module, mode: bool, names: set[str]) -> None:
        self.own, self.mode, self.parameters = vars(layer), mode, layer._parameters
        self.parameter_hooks = {key: _hooks_of(value) for key, value in self.parameters.items()}
        self.layers = dict(layer._modules)
        names = {name for name, value in self.own.items() if name in names and isinstance(value, _PLAIN)}
        self._attributes = {name: self.own.get(name) for name in (*names, "forward")}
        self._hooks = self._present_hooks()

    def _present_hooks(self) -> list[int]:
        return [number for name in _HOOKS for number in self.own[name]]

    def has_changed(self) -> bool:
        """Return whether anything may have changed."""
        own, attributes = self.own, self._attributes
        return (
            own["training"] is not self.mode
            or own["_modules"] != self.layers
            or any(own.get(name) is not value for name, value in attributes.items())
            or self._present_hooks() != self._hooks
        )

    def changes(self, name: str) -> list[str]:
        """Return each change of the layer `name`, except its mode, in words."""
        prefix, now = f"{name}." if name else "", self.own["_modules"]
        found = [
            f"{prefix}{key} has another layer in its place"
            for key, layer in self.layers.items()
            if not _computes_the_same(layer, now.get(key, layer))
        ]
        for key, before in self._attributes.items():
            value = self.own.get(key)
            if value is not before and (type(value) is not type(before) or value != before):
                found.append(f"{prefix}{key} is {value!r}, and was {before!r},")
        if self._present_hooks() != self._hooks:
            found.append(f"a hook of {name or 'the model'} was registered or removed")
        return found


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


def _computes_the_same(one: nn.Module | None, other: nn.Module | None) -> bool:
    """Return whether two layers are one, or of one class and print the same arguments."""
    if one is other or one is None or other is None:
        return one is other
    return type(one) is type(other) and one.extra_repr() == other.extra_repr()


def _names_read_by(kind: type) -> set[str]:
    """Return the names, without private ones, that methods of a class may read, except those of nn.Module."""
    own = [base for base in kind.__mro__ if base not in (nn.Module, object)]
    functions = [f for base in own for name, f in vars(base).items() if name not in _NOT_OF_FORWARD]
    codes = [function.__code__ for function in functions if isinstance(function, FunctionType)]
    found: set[str] = set()
    while codes:
        code = codes.pop()
        found.update(code.co_names, (value for value in code.co_consts if isinstance(value, str)))
        codes += [value for value in code.co_consts if isinstance(value, CodeType)]
    return {name for name in found if not name.startswith("_")} - {"training"}


def _hooks_of(parameter: nn.Parameter | None) -> list[int]:
    """Return the numbers of a parameter's hooks."""
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return [number for name in names for number in getattr(parameter, name, None) or ()]
