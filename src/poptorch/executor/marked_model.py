"""Marked models: reading a weight of a trained model on the host first copies the newest values from devices.

The classes of the model, its parameters and its buffers are replaced by subclasses, in which a read calls the
executor's `copyWeightsToHostIfNeeded`. Deep copies and pickles have the original classes.
"""

import copy
import functools
import weakref
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from popengine.errors import Error
from popengine.torch_private import DisableTorchFunctionSubclass

from ..annotating.replica_groups import Grouping
from ..compiling.arguments import weights_of
from ..logs import listed, logger
from ..options import Options

_HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)


def _refresh_weights(owner: weakref.ref[Any] | None) -> Any:
    """Copy newer weights from the devices to the host. Return the executor; None if it is gone."""
    executor = owner() if owner is not None else None
    if executor is not None:
        executor.copyWeightsToHostIfNeeded()
    return executor


class _Marked:
    """The base class of marked parameters and buffers: a torch function of them first copies newer values."""

    _owner: weakref.ref[Any] | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, _Marked):
                    executor = _refresh_weights(item.__dict__.get("_owner"))
                    if func in _HOOKS and executor is not None and executor.isCompiled():
                        raise Error(
                            "a hook is set on a parameter of a compiled model, and would never be called\n"
                            "  why: the backward was compiled at the first call, with the hooks that parameters had"
                            " then\n"
                            "  fix: call register_hook before the first call; or executor.destroy(), register_hook,"
                            " and call it again"
                        )
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def _as_plain_tensor(self) -> Any:
        """Copy newer values from the devices; return a plain parameter or tensor with the same memory."""
        _refresh_weights(self.__dict__.get("_owner"))
        with DisableTorchFunctionSubclass():
            plain = self.detach()  # type: ignore[attr-defined]
            return nn.Parameter(plain, self.requires_grad) if isinstance(self, nn.Parameter) else plain

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._as_plain_tensor(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._as_plain_tensor().__reduce_ex__(protocol)


class PoptorchParameter(_Marked, nn.Parameter):
    """A parameter of a model that an executor trains."""

    def __repr__(self, **kwargs: Any) -> str:
        return f"Parameter containing:\n{self.detach().requires_grad_(self.requires_grad)!r}"


class PoptorchBuffer(_Marked, Tensor):
    """A buffer of a model that an executor trains."""

    def __repr__(self, **kwargs: Any) -> str:
        return repr(self.detach())  # as the tensor that it is to the user


def _refreshing_method(name: str) -> Callable[..., Any]:
    """Return a method that copies newer weights to the host, then calls `name` of the model's own class."""

    @functools.wraps(getattr(nn.Module, name))
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        _refresh_weights(self._pando_owner)
        return getattr(super(_MarkedModel, self), name)(*args, **kwargs)

    return method


class _MarkedModel:
    """The mixin that `mark_model` adds to a model's class: reading a weight first copies newer values."""

    _pando_owner: weakref.ref[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an instance of the user's class, since `type(model)(...)` must not make a marked model."""
        return cls.__mro__[2](*args, **kwargs)

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Copy newer weights from the devices to the host; return whether there were newer weights."""
        owner = self._pando_owner()
        return owner is not None and owner.copyWeightsToHostIfNeeded()

    def destroy(self) -> None:
        """Call `destroy` of the executor that trains this model, if the executor still exists."""
        owner = self._pando_owner()
        if owner is not None:
            owner.destroy()

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)  # type: ignore[misc]
        if isinstance(value, _Marked):
            _refresh_weights(self._pando_owner)
        return value

    named_parameters, named_buffers, state_dict, __call__ = map(
        _refreshing_method, ("named_parameters", "named_buffers", "state_dict", "__call__")
    )

    def __copy__(self) -> Any:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refresh_weights(self._pando_owner)
        # Later protocols refuse an object of another class than that of the object which is pickled.
        return shallow_copy(self).__reduce_ex__(1)


class HostForward:
    """A descriptor: `executor.forward` is the forward of the user's model, which runs on the host. The class
    attribute `PoplarExecutor.forward` raises AttributeError: trainers read the signature of forward there."""

    def __get__(self, executor: Any, kind: type) -> Any:
        if executor is not None:
            return executor.model.forward
        raise AttributeError(
            "an executor has no forward of its own: a call computes gradients and updates weights, too\n"
            "  fix: give a trainer the model, and call the executor in its training_step: docs/guide/hugging_face.md"
        )


def plain_class(model: Any) -> type:
    """Return the class of a model; if the model is marked, the class that it had before."""
    return type(model).__mro__[2] if isinstance(model, _MarkedModel) else type(model)


def executor_of(model: Any) -> Any:
    """Return the executor that trains a model; None if the model is not marked, or its executor is gone."""
    return model._pando_owner() if isinstance(model, _MarkedModel) else None


def check_not_wrapped(model: Any) -> None:
    """Raise RuntimeError if a model is wrapped for training already."""
    if executor_of(model) is not None:
        raise RuntimeError(
            "this model has already been wrapped in 'poptorch.trainingModel'\n"
            "  fix: call model.destroy() to unwrap it first"
        )


def check_buffer_classes(model: nn.Module) -> None:
    """Raise Error if a buffer of the model is of a subclass of Tensor, which `mark_model` does not mark."""
    for name, buffer in model.named_buffers():
        if type(buffer) not in (Tensor, PoptorchBuffer):
            raise Error(
                f"All buffers must be an instance of torch.Tensor: {name} is a {type(buffer).__module__}."
                f"{type(buffer).__qualname__}\n"
                f"  fix: register_buffer({name.rsplit('.', 1)[-1]!r}, value.data)"
            )


def mark_model(model: nn.Module, owner: Any) -> None:
    """Replace the classes of a model and its weights by marked ones, with a weak reference to the executor.

    Warns if another executor trains some of the parameters.

    Raises: RuntimeError, if another executor trains the model
    """
    link = weakref.ref(owner)
    if executor_of(model) is not owner:
        check_not_wrapped(model)
        unmark_model(model)  # removes the mark of an executor that is gone
        shared = [
            name
            for name, parameter in model.named_parameters()
            if isinstance(parameter, _Marked)
            and (other := vars(parameter).get("_owner"))
            and other() is not None
        ]
        if shared:
            logger.warning(
                "another executor trains %s, too: each trains a copy of its own, and the host has the one that was"
                " copied last\n"
                "  fix: train them in one model; or call detachFromDevice() on one executor before the other is called",
                listed(shared),
            )
        kind = type(model)
        own = {"__module__": kind.__module__, "_pando_owner": link}
        model.__class__ = type(f"Poptorch{kind.__name__}", (_MarkedModel, kind), own)
    mark_tensors(model, link)


def mark_tensors(value: nn.Module | Tensor, link: weakref.ref[Any]) -> None:
    """Replace the class of a plain tensor, or of a module's plain parameters and buffers, by a marked one.

    Args: link: a weak reference to the executor that trains the model
    """
    tensors: list[Any] = [value]
    if isinstance(value, nn.Module):
        tensors = [
            t for layer in value.modules() for t in (*layer._parameters.values(), *layer._buffers.values())
        ]
    for tensor in tensors:
        if type(tensor) in (nn.Parameter, Tensor):  # other subclasses are not marked
            kind: Any = PoptorchParameter if type(tensor) is nn.Parameter else PoptorchBuffer
            tensor.__class__ = kind
            vars(tensor)["_owner"] = link


def unmark_model(model: nn.Module) -> None:
    """Give a marked model and its weights their original classes; leave other models as they are."""
    if not isinstance(model, _MarkedModel):
        return
    model.__class__ = plain_class(model)
    for tensor in (*model.parameters(), *model.buffers()):
        if isinstance(tensor, _Marked):
            vars(tensor).pop("_owner")
            kind: Any = nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor
            tensor.__class__ = kind


def shallow_copy(model: Any) -> Any:
    """Return an unmarked copy of the top-level module. Its weights and submodules are those of `model`."""
    plain = object.__new__(plain_class(model))
    plain.__dict__.update(copy.copy(model).__dict__)
    return plain


@dataclass(frozen=True)
class WrappedModel:
    """The model of an executor, its options, and whether it is trained.

    Args:
        user:        the user's model
        traced:      the shallow copy of `user` that is compiled; made when the executor was
        per_replica: by parameter name, the `replicaGrouping` of a parameter with one value per group
    """

    user: nn.Module
    traced: nn.Module
    options: Options
    training: bool
    per_replica: dict[str, Grouping] = field(default_factory=dict)

    def shapes(self, groups: Container[str]) -> dict[str, tuple[int, ...]]:
        """Return, by name, the shape of each weight in a replica.

        Args: groups: names of per-replica parameters, which on the host have one row per group of replicas
        """
        with DisableTorchFunctionSubclass():
            return {
                n: tuple(w.shape[1:] if n in groups else w.shape) for n, w in weights_of(self.traced).items()
            }

    def parameter_names(self) -> dict[int, str]:
        """Return {id(parameter): its canonical name}."""
        return {id(parameter): name for name, parameter in self.traced.named_parameters()}

    def updatable_buffers(self) -> list[str]:
        """Return the names in `Options.updatableNamedBuffers`. Raises Error if a name is not a buffer's."""
        names = self.options._Popart.options.get("updatableNamedBuffers", [])
        known = dict(self.traced.named_buffers())
        unknown = [name for name in names if name not in known]
        if unknown:
            raise Error(
                f"updatableNamedBuffers names {', '.join(unknown)}; the model's buffers are"
                f" {', '.join(known) or 'none'}"
            )
        return names
