"""The model of an executor, and the mark that a model carries while an executor trains it."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from popengine.compile.recording.current_capture import current
from popengine.errors import Error, did_you_mean, without_internal_frames
from popengine.run.elsewhere import Mark, is_elsewhere, mark_of, set_mark
from popengine.run.instances.consistency import hash_of_sample
from popengine.run.train_state import TrainState, move_to_host

from ..annotating.replica_groups import GroupableParameter, Grouping
from ..checks import checked
from ..compiling.arguments import weights_of
from ..nested_values import tensors_of
from ..options import Options
from ..options.freeze_options import resolve_options
from ..options.option_base import OptionsDict

if TYPE_CHECKING:
    from .loaded_plans import LoadedPlans


@dataclass(frozen=True)
class WrappedModel:
    """The user's model, which an executor runs, and by parameter name the `replicaGrouping` of each parameter with one
    value per group."""

    user: nn.Module
    options: Options
    training: bool
    per_replica: dict[str, Grouping] = field(default_factory=dict)

    def shapes(self) -> dict[str, list[int]]:
        """Return the shape of each weight, by name."""
        return {name: [*weight.shape] for name, weight in weights_of(self.user).items()}

    def parameter_names(self) -> dict[int, str]:
        """Return {id(parameter): its canonical name}."""
        return {id(parameter): name for name, parameter in self.user.named_parameters()}

    def tied_parameters(self) -> tuple[tuple[str, ...], ...]:
        """Return the names of each parameter that has several."""
        names: dict[int, tuple[str, ...]] = {}
        for name, parameter in self.user.named_parameters(remove_duplicate=False):
            names[id(parameter)] = (*names.get(id(parameter), ()), name)
        return tuple(tied for tied in names.values() if len(tied) > 1)

    def updatable_buffers(self, are_needed: bool = False) -> None:
        """Raise Error if a name in `Options.updatableNamedBuffers` is not a buffer's, or if none `are_needed`."""
        names = self.options._Popart("updatableNamedBuffers")
        for name in names:
            checked("updatableNamedBuffers", name, tuple(dict(self.user.named_buffers())), Error)
        if are_needed and not names:
            raise Error(
                "No named buffers marked as updatable\n"
                "  fix: options.updatableNamedBuffers(['name']) before wrapping"
            )


def checked_options(options: Any, fix: str) -> Options:
    """Return the options that a user passes. Raises Error for another type."""
    if not isinstance(options, Options):
        if isinstance(options, OptionsDict):
            fix = "options = poptorch.Options(), and then options.Training.gradientAccumulation(4)"
            fix += ": this returns Training"
        raise Error(f"Invalid type: 'options' is {type(options)}, expected {Options}\n  fix: {fix}")
    return options


def wrap(model: Any, options: Options | None, training: bool) -> WrappedModel:
    """Return the wrapped model for a module or a function, and freeze its options. Raises Error for other types."""
    wrapper = f"poptorch.{'training' if training else 'inference'}Model"
    is_optimizer = isinstance(options, torch.optim.Optimizer)
    fix = f"{wrapper}(model, optimizer=optimizer)" if is_optimizer else "options = poptorch.Options()"
    given = Options() if options is None else checked_options(options, fix)
    fix = f"{wrapper}(model, options), with a torch.nn.Module"
    checked(f"{wrapper}: the model", model, Callable, Error, fix=fix)
    if not isinstance(model, nn.Module):
        function, model = model, nn.Module()
        model.forward = function
    resolved = resolve_options(given, training, model)
    given._freeze()  # a later change would have no effect
    return WrappedModel(model, resolved, training)


class ModelWithOwnModes:
    """A base of the class of an executor's `model` in inference: the attributes are those of the user's module, and the
    modes are the executor's. Copies and pickles are plain modules of the user's class."""

    _user: nn.Module
    _modes: Any

    def __init_subclass__(cls) -> None:
        """Skip the method of the user's class, which may keep a register of its subclasses."""

    @property
    def training(self) -> bool:
        return self._modes.top

    @training.setter
    def training(self, mode: bool) -> None:
        self._modes.top = mode

    def __eq__(self, other: Any) -> bool:
        """Return whether the other object is the user's module, or this one: so dictionaries find either."""
        return other is self or other is self._user

    def __hash__(self) -> int:
        return hash(self._user)

    def train(self, mode: bool = True) -> Any:
        """Set the modes of the executor."""
        self._modes.set_mode(mode)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = copy.copy(self._user)
        plain.training = self.training
        return copy.copy, (plain,)


def with_own_modes(user: nn.Module, modes: Any) -> Any:
    """Return an object with the class and the attributes of a module, and with the modes of an executor
    (`ModelFlags`)."""
    cls: Any = type(user)
    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    bases = ModelWithOwnModes, cls
    metaclass: Any = type(cls)
    twin = object.__new__(metaclass(cls.__name__, bases, {**names, "_user": user, "_modes": modes}))
    object.__setattr__(twin, "__dict__", vars(user))
    return twin


class HostForward:
    """A descriptor: `executor.forward` is the forward of the user's model. `PoplarExecutor.forward` raises
    AttributeError, since trainers read the signature of forward there."""

    def __get__(self, executor: Any, cls: type) -> Any:
        if executor is not None:
            return executor.model.forward
        raise AttributeError(
            "an executor has no forward of its own: a call computes gradients and updates weights, too\n"
            "  fix: give a trainer the model, and call the executor in its training_step: docs/guide/hugging_face.md"
        )


# ---- the mark: two attributes of the instance ------------------------------------------------------------------


class _MethodOfExecutor:
    """A method of the executor that its model has as an attribute; copies and pickles have None instead."""

    def __init__(self, owner: weakref.ref[Any], name: str, without_owner: Any) -> None:
        self.owner, self._name, self._without_owner = owner, name, without_owner
        self.__doc__ = getattr(type(owner()), name).__doc__

    def __call__(self) -> Any:
        executor = self.owner()
        return self._without_owner if executor is None else getattr(executor, self._name)()

    def __reduce__(self) -> Any:
        return type(None), ()


_METHODS = {"copyWeightsToHostIfNeeded": False, "destroy": None}  # by name, what they return without executor


def executor_of(model: Any) -> Any:
    """Return the executor that trains a model; None if no executor does, or if it is gone."""
    method = getattr(model, "__dict__", {}).get("destroy")
    return method.owner() if isinstance(method, _MethodOfExecutor) else None


def mark_model(model: nn.Module, executor: Any) -> None:
    """Give a model the methods `copyWeightsToHostIfNeeded` and `destroy` of the executor that trains it. Raises
    RuntimeError if another executor does."""
    if executor_of(model) not in (executor, None):
        raise RuntimeError(
            "this model has already been wrapped in 'poptorch.trainingModel'\n"
            "  fix: call model.destroy() to unwrap it first"
        )
    owner = weakref.ref(executor)
    for name, result in _METHODS.items():
        vars(model)[name] = _MethodOfExecutor(owner, name, result)


def unmark_model(model: nn.Module) -> None:
    """Remove the methods that `mark_model` has added."""
    for name in _METHODS:
        if isinstance(vars(model).get(name), _MethodOfExecutor):
            del vars(model)[name]


def refuse_reads_if_lost(model: nn.Module, state: TrainState) -> None:
    """Let `state_dict()` of a model raise an error while its weights are lost: until a complete `load_state_dict()`."""

    def check(*args: Any) -> None:
        state.commit.check_not_lost()

    def end(module: nn.Module, keys: Any) -> None:
        if not keys.missing_keys:
            state.commit.restore()

    model.register_state_dict_pre_hook(check)
    model.register_load_state_dict_post_hook(end)


def return_weights(model: nn.Module, args: Any, kwargs: Any) -> None:
    """A hook before calls of the user's own model: with a tensor of the CPU, move the weights from accelerators to the
    CPU."""
    if current() is None and any(value.is_cpu for value in tensors_of((args, kwargs))):
        move_to_host(weights_of(model))


class _SharedOut:
    """Hooks of the modules of a model of which other processes hold weights, for all its executors; copies and pickles
    do nothing. (Weak references, because a capture searches what hooks refer to for tensors that forward left.)"""

    def __init__(self) -> None:
        self.executors: list[weakref.ref[LoadedPlans]] = []
        # The latest `state_dict()`, and the copies in it, by the id of the weight: a tied weight has one.
        self._latest: Callable[[], Any] = type(None)
        self._copies: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    def __reduce__(self) -> Any:
        return type(self), ()

    def _named_weights(self, module: nn.Module, prefix: str, keys: Container[str]) -> dict[str, Tensor]:
        """Return a module's own weights by their `keys` in a `state_dict()`, if a process of the replica holds one."""
        named = chain(module._parameters.items(), module._buffers.items())
        weights = {prefix + key: value for key, value in named if value is not None and prefix + key in keys}
        holders = (mark.process for value in weights.values() if (mark := mark_of(value)) is not None)
        return weights if any(process is not None for process in holders) else {}

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Replace a module's own weights in a `state_dict()` by copies, those of other processes by theirs."""
        held, live = self._named_weights(module, prefix, state), [p for ref in self.executors if (p := ref())]
        plans = next((p for p in live if p.engine is not None), None)
        away = [key for key, value in held.items() if is_elsewhere(value)]
        if plans is not None and plans.engine is not None and held:
            if self._latest() is not state:
                self._latest, self._copies = weakref.ref(state), weakref.WeakValueDictionary()
            names = {id(value): name for name, value in plans.state.find_weights().items()}
            new = [names[id(held[key])] for key in away if id(held[key]) not in self._copies]
            weights = plans.state.read_elsewhere(new)["weights"]
            for key, value in held.items():
                copied = self._copies.get(id(value))
                if copied is None:
                    copied = weights[names[id(value)]] if key in away else value.detach().clone()
                state[key] = self._copies[id(value)] = copied
        elif away:
            raise Error(
                f"other processes hold {', '.join(away[:5])}, and no executor of the model is attached that could read"
                " them\n"
                "  fix: keep the executor, and call state_dict() before it goes; or call its destroy() in all instances"
            )

    def note_load(
        self, module: nn.Module, given: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any
    ) -> None:
        """Note a hash of what is loaded into a module's own weights, which all processes compare before the next call.
        Into those of other processes load no values, which torch would warn of."""
        for key, value in self._named_weights(module, prefix, given).items():
            mark, new = mark_of(value), given[key]
            if mark is not None and isinstance(new, Tensor) and not new.is_meta:
                mark.loaded = f"loaded {hash_of_sample(new)}"
                if is_elsewhere(value) and not metadata.get("assign_to_params_buffers"):
                    given[key] = new.to("meta")


_SHARED_OUT = "_pando_shared_out"


def share_out(model: nn.Module, plans: LoadedPlans) -> None:
    """Let `state_dict()` of a model or a part of it return all weights, if other processes hold some of them: waits for
    these."""
    hooks = vars(model).get(_SHARED_OUT)
    if hooks is None:
        hooks = vars(model)[_SHARED_OUT] = _SharedOut()
        for module in model.modules():
            module.register_state_dict_post_hook(hooks)
            module.register_load_state_dict_pre_hook(hooks.note_load)
    hooks.executors.append(weakref.ref(plans))
    for weight in weights_of(model).values():
        if mark_of(weight) is None:
            set_mark(weight, Mark(None, weight))


def check_buffer_classes(model: nn.Module) -> None:
    """Raise Error if a buffer of the model is of a subclass of Tensor."""
    for name, buffer in model.named_buffers():
        if type(buffer) is not Tensor:
            raise Error(
                f"All buffers must be an instance of torch.Tensor: {name} is a {type(buffer).__module__}."
                f"{type(buffer).__qualname__}\n"
                f"  fix: register_buffer({name.rsplit('.', 1)[-1]!r}, value.data)"
            )


# ---- methods of the model that an executor has --------------------------------------------------------------------


def attribute_of_model(executor: Any, name: str) -> Any:
    """Return an attribute of an executor's model. A parameter of the user's module has `replicaGrouping`."""
    model = executor.model
    if (value := getattr(model, name, executor)) is executor:
        words = f"{type(model).__name__!r} object has no attribute {name!r}, and its executor has none"
        raise AttributeError(words + did_you_mean(name, {*dir(executor), *dir(model)}))
    if getattr(value, "__self__", None) is model:
        return _method_of_model(executor, name, value)
    if isinstance(value, nn.Parameter) and name in executor._wrapped.user._parameters:
        groupings = None if executor.isCompiled() else executor.per_replica_params
        return GroupableParameter.wrap(value, name, groupings)
    return value


def _method_of_model(executor: Any, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of the model that returns the executor where the model's method returns the model, and raises
    Error where it would move the weights to an accelerator."""

    @without_internal_frames
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        device = _device_of_move(name, args, kwargs)
        if device not in (None, "cpu", "meta"):
            raise Error(
                f"the weights of an executor stay in the host's memory, and .{name}(...) moves them to {device!r}\n"
                f'  fix: options.device("{device}") before wrapping chooses where the model runs; leave .{name} out'
            )
        result = method(*args, **kwargs)
        return executor if result is executor.model else result

    return call


def _device_of_move(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    """Return the type of the device to which a method of `nn.Module`, called like this, moves weights; None if none."""
    if name in ("cuda", "cpu", "ipu", "xpu", "mtia"):
        return name
    for value in (*args, *kwargs.values()) if name in ("to", "to_empty") else ():
        if isinstance(value, int | str | torch.device) and not isinstance(value, bool):
            return "cuda" if isinstance(value, int) else torch.device(value).type
        if isinstance(value, Tensor):
            return value.device.type
    return None
