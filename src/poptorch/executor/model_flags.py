"""What a compilation fixes of a model besides weights: modes, `requires_grad`, layers and hooks of parameters."""

import contextlib
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from popengine.errors import Error

from ..logs import listed, logger
from .wrapped_model import WrappedModel


class ModelFlags:
    """The flags of a model when it was compiled, and warnings of changes since. `mode` is the flag `training`
    of the user's model."""

    def __init__(self, model: WrappedModel) -> None:
        self._model = model
        self._warned: set[str] = set()
        self.store()

    def store(self) -> None:
        """Store the model's layers, modes, `requires_grad` and hooks of parameters."""
        self._layers = dict(self._model.traced.named_modules())
        self._flags = _flags_of(self._model.traced)
        self._hooks = _hooks_of(dict(self._model.traced.named_parameters()))
        self.mode = self._model.user.training

    @contextlib.contextmanager
    def as_compiled(self) -> Iterator[None]:
        """Set modes and `requires_grad` of the model to those of the first compilation, inside the `with`."""
        now = _flags_of(self._model.traced)
        _set_flags(self._model.traced, self._flags)
        try:
            yield
        finally:
            _set_flags(self._model.traced, now)

    def check_changes(self, trained: list[str]) -> None:
        """Warn, once per kind, of changes to the model since its compilation: calls ignore such changes.

        Kinds are replaced layers and, in training, modes and `requires_grad`.

        Args: trained: names of the parameters that the compiled program trains
        Raises: Error, if a parameter has a hook that it had not when the model was compiled
        """
        layers = self._layers
        others = ((n, layer) for n, layer in self._model.traced.named_modules() if layers.get(n) is not layer)
        replaced = [n for n, layer in others if n in layers and not _computes_the_same(layer, layers[n])]
        if replaced:
            self._warn_once(
                f"{listed(replaced)} has another layer in its place since the compilation",
                "computes with its weights what the layer before did",
            )
        if not self._model.training:
            return
        if self._model.user.training != self.mode:
            modes = ("eval", "train") if self.mode else ("train", "eval")
            self._warn_once(
                "the model is in {}() mode now, and was compiled in {}() mode".format(*modes),
                "trains it in that mode",
                "set the mode before the first call, or call destroy() on the executor; wrap the model with"
                " poptorch.inferenceModel to evaluate it",
            )
        weights = dict(self._model.traced.named_parameters())
        frozen = [name for name in trained if name in weights and not weights[name].requires_grad]
        freed = [n for n, weight in weights.items() if weight.requires_grad and self._flags.get(n) is False]
        if frozen:
            self._warn_once(f"{listed(frozen)} was frozen after the compilation", "trains it as before")
        if freed:
            self._warn_once(f"{listed(freed)} was made trainable after the compilation", "does not train it")
        if (hooks := _hooks_of(weights)) != self._hooks:
            changed = [n for n in hooks.keys() | self._hooks.keys() if hooks.get(n) != self._hooks.get(n)]
            raise Error(
                f"a hook is set on, or removed from, {listed(changed)} of a compiled model, and that would have no"
                " effect\n"
                "  why: the backward was compiled at the first call, with the hooks that parameters had then\n"
                "  fix: call register_hook before the first call; or executor.destroy(), register_hook, and call it"
                " again"
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


def _computes_the_same(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two layers are of one class and print the same arguments."""
    return type(one) is type(other) and one.extra_repr() == other.extra_repr()


def _flags_of(model: nn.Module) -> dict[str, bool]:
    """Return the flags `training` of layers and `requires_grad` of parameters, by name."""
    modes = {name: layer.training for name, layer in model.named_modules()}
    return modes | {name: parameter.requires_grad for name, parameter in model.named_parameters()}


def _set_flags(model: nn.Module, flags: Mapping[str, bool]) -> None:
    """Set the flags of layers and parameters to `flags`, as returned by `_flags_of`. Other names stay."""
    for name, layer in model.named_modules():
        vars(layer)["training"] = flags.get(name, layer.training)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad != flags.get(name, parameter.requires_grad):
            parameter.requires_grad = flags[name]


def _hooks_of(parameters: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Return the numbers of the hooks of each parameter that has hooks, by name."""
    found = {}
    for name, parameter in parameters.items():
        hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks  # pyright: ignore
        if any(hooks):
            found[name] = [number for each in hooks for number in each or ()]
    return found
