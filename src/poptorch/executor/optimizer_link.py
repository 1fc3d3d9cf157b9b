"""The link of executor and optimizer: `setOptimizer` copies the rates; updates change `optimizer.state` itself."""

import copy
import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from popengine import settings
from popengine.errors import Error
from popengine.run.optimizer_step import warn_of_a_step

from ..logs import listed, logger
from ..optim import SGD
from ..optim import Optimizer as PoptorchOptimizer
from ..optim.freeze_optimizer import Snapshot, check_changes, take_snapshot, unexpected_names
from ..optim.optimizer_base import check_torch_state, class_of, parameters_of
from .loaded_plans import LoadedPlans
from .wrapped_model import WrappedModel

# Packages whose classes hold an optimizer as `optimizer`, and step when that one does.
_WRAPPERS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")


class Seen(NamedTuple):
    """The raw values of an optimizer that are compared before each call; if they are equal, nothing has changed."""

    members: list[list[int]]  # ids of the parameters of each group
    loads: int  # calls of `load_state_dict`; of torch's optimizers 0
    values: list[Any]  # rates, and numbers and types among the attributes

    @classmethod
    def of(cls, optimizer: Any) -> Self:
        attributes, members = vars(optimizer), []
        values: list[Any] = [v for v in attributes.values() if isinstance(v, (int, float, torch.dtype))]
        values.append(type(optimizer))
        for group in optimizer.param_groups:
            members.append([*map(id, group["params"])])
            for value in group.values():
                if isinstance(value, Tensor):
                    values.append(value.tolist())
                elif isinstance(value, (int, float, str, tuple)):  # what is None is left out
                    values.append(value)
        return cls(members, attributes.get("_loads", 0), values)


class OptimizerLink:
    """The optimizer of an executor, and its `snapshot`: the rates of the next call, and what can't change after
    compilation. Both are None in inference."""

    def __init__(self, model: WrappedModel, plans: LoadedPlans) -> None:
        self._model, self._plans = model, plans
        self.optimizer: Any = None
        self.snapshot: Snapshot | None = None
        self._seen = Seen([], 0, [])
        self._parameters: dict[str, Tensor] = {}  # the optimizer's, by canonical name
        self._is_connected = False  # whether an engine updates the optimizer's state
        self._hooks: list[Any] = []  # of the optimizer
        self._accepted: dict[str, set[str]] = {}  # as in `unexpected_names`
        self._warned: set[Any] = set()  # what a warning was logged of

    @property
    def hyper(self) -> settings.Hyper | None:
        """The rates of the next call; None in inference."""
        return self.snapshot and self.snapshot.hyper

    @property
    def frozen(self) -> settings.Optimizer | None:
        """What is compiled in; None in inference."""
        return self.snapshot and self.snapshot.frozen

    def set_optimizer(self, optimizer: Any) -> None:
        """`PoplarExecutor.setOptimizer`."""
        if not self._model.training:
            raise Error(
                "setOptimizer needs a model that trains, and this one is for inference\n"
                "  fix: wrap the model with poptorch.trainingModel(model, options, optimizer)"
            )
        if type(optimizer).__module__.partition(".")[0] in _WRAPPERS:
            optimizer = optimizer.optimizer
        is_compiled, before = self._plans.executable is not None, self.snapshot
        now = self._snapshot_of(optimizer)
        seen = Seen.of(optimizer)
        # Rates of a checkpoint replace constants.
        is_loaded = seen.loads != (self._seen.loads if optimizer is self.optimizer else 0)
        if is_compiled and before is not None:
            check_changes(before, now, with_rates=not is_loaded)
            now = now if is_loaded else replace(now, frozen=before.frozen, constants=before.constants)
        elif before is None or now.frozen.kind != before.frozen.kind:
            self._accepted = {}
        self._report_names(optimizer, now)
        optimizer._opt_called = True  # else schedulers warn: calls update weights without step()
        if optimizer is not self.optimizer:
            states = [optimizer.state.get(parameter, {}) for parameter in parameters_of(optimizer)]
            check_torch_state(optimizer, {"state": dict(enumerate(states))})
            # A state of another kind is of no use.
            is_new = before is not None and now.cls == before.cls and not any(states)
            self._replace_optimizer(optimizer, continues=is_new)
        else:
            self._name_parameters()
        self.snapshot, self._seen = now, seen

    def freeze_again(self) -> None:
        """Take over names of parameters, and attributes that are compiled in, from before the compilation."""
        if self.snapshot is not None:
            now, before = self._snapshot_of(self.optimizer), self.snapshot
            self._report_names(self.optimizer, now)
            self.snapshot = replace(now, hyper=before.hyper)
            self._name_parameters()

    def _snapshot_of(self, optimizer: Any) -> Snapshot:
        """Return an optimizer's snapshot. The optimizer in use may hold parameters that the program has replaced."""
        replaced = map(id, self._parameters.values()) if optimizer is self.optimizer else ()
        names = dict.fromkeys(replaced, "") | self._model.parameter_names()
        return take_snapshot(
            optimizer, names, bool(self._model.options._Popart("automaticLossScalingSettings.enabled"))
        )

    def _report_names(self, optimizer: Any, snapshot: Snapshot) -> None:
        """Warn once of each attribute or key that is new and unknown."""
        report = logger.debug if self._model.options._relax_optimizer_checks else logger.warning
        for description, names in unexpected_names(optimizer, self._accepted):
            report("Ignoring unexpected %s in %s optimizer: %s", description, snapshot.frozen.kind, names)

    def follow_parameters(self) -> None:
        """Take over the places of parameters in the model. Warn, once of each, of parameters that the optimizer does
        not hold."""
        self._name_parameters()
        held = {*map(id, parameters_of(self.optimizer))}
        parameters = self._model.user.named_parameters()
        not_held = [name for name, p in parameters if p.requires_grad and id(p) not in held]
        if new := [name for name in not_held if name not in self._warned]:
            self._warned.update(new)
            logger.warning(
                "the optimizer does not hold these parameters of the model, so they are not updated: %s\n"
                "  fix: executor.setOptimizer(...) with a new optimizer of model.parameters(); or"
                " optimizer.add_param_group({'params': [...]})",
                listed(new),
            )

    def _replace_optimizer(self, optimizer: Any, continues: bool) -> None:
        """Set the optimizer. If it `continues`, move the previous optimizer's state to it, and leave copies."""
        before, previous, is_connected = self._parameters, self.optimizer, self._is_connected
        self.release_optimizer()
        self.optimizer = optimizer
        self._name_parameters()
        for name in self._parameters.keys() & before.keys() if continues else ():
            if state := previous.state.get(before[name]):
                optimizer.state[self._parameters[name]] = state
                previous.state[before[name]] = copy.deepcopy(state)
        if isinstance(previous, PoptorchOptimizer) and previous._loss_factor is not None:
            previous._loss_factor = previous._loss_factor.clone()
        if is_connected:
            self.connect_optimizer()

    def _name_parameters(self) -> None:
        """Set `_parameters` by the present names. One that the program has replaced in the model keeps its name, with
        an addition if the optimizer holds the new one, too."""
        before = {id(parameter): name for name, parameter in self._parameters.items()}
        present, state = self._model.parameter_names(), self._plans.state
        self._parameters, taken = {}, {present.get(id(p)) for p in parameters_of(self.optimizer)}
        for parameter in parameters_of(self.optimizer):
            name = present.get(id(parameter)) or before[id(parameter)]
            while id(parameter) not in present and name in taken:
                name += " (replaced)"
            taken.add(name)
            self._parameters[name] = parameter
            if state.owner and before.get(id(parameter), name) != name:
                raise Error(
                    f"parameter {before[id(parameter)]} is at {name} now, and the optimizer's state is shared out over"
                    " the instances by name\n"
                    "  fix: keep optimizer.state_dict(), call destroy(), and load it into a new optimizer"
                )
        parameters = self._parameters
        state.optimizer, state.parameters = self.optimizer, lambda: parameters
        if self._is_connected:
            self._share_names()

    def _share_names(self) -> None:
        """Let a poptorch optimizer know the parameters' names, and which have a row for each group of replicas."""
        if isinstance(self.optimizer, PoptorchOptimizer):
            self.optimizer._names = tuple(self._parameters)
            rows = (value for name, value in self._parameters.items() if name in self._model.per_replica)
            self.optimizer._per_replica = frozenset(map(id, rows))

    def connect_optimizer(self) -> None:
        """If there is an optimizer, check states that are loaded from now on; let `state_dict()` gather
        shards."""
        optimizer: Any = self.optimizer
        if self._is_connected or self.frozen is None:
            return
        settings = self._plans.require_executable().settings
        if class_of(optimizer) is not None:
            self._hooks.append(optimizer.register_step_pre_hook(warn_of_a_step))
        if isinstance(optimizer, PoptorchOptimizer):
            self._share_names()
            if settings.automatic_loss_scaling:
                if optimizer._loss_factor is not None:
                    self._plans.state.loss_factor.copy_(optimizer._loss_factor)
                optimizer._loss_factor = self._plans.state.loss_factor
        elif class_of(optimizer) is not None:
            self._hooks.append(optimizer.register_load_state_dict_pre_hook(check_torch_state))
        # Each instance has only a part of the state: a shard, or that of its ipus.
        is_sharded = settings.shard_optimizer is not None and settings.counts.instances > 1
        if is_sharded or settings.counts.parts > 1:
            hook = functools.partial(_gather_state, self)
            if (earlier := vars(optimizer).get("_optimizer_shard_hook")) is not None:
                earlier.remove()
            self.optimizer._optimizer_shard_hook = self.optimizer.register_state_dict_post_hook(hook)
        self._is_connected = True

    def release_optimizer(self) -> None:
        """Undo `connect_optimizer`."""
        while self._hooks:
            self._hooks.pop().remove()
        self._is_connected = False

    def follow_optimizer(self) -> list[list[int]]:
        """Take over parameter groups and loaded rates that have changed since the latest call. Warn, once, of rates
        that have changed in another way. Return the ids of the parameters in each group.

        Raises: Error, if a value that is compiled in has changed
        """
        if self.snapshot is None:
            return []
        before = self.snapshot
        seen = Seen.of(self.optimizer)
        if seen == self._seen:
            return seen.members
        if (seen.members, seen.loads) != (self._seen.members, self._seen.loads):
            self.set_optimizer(self.optimizer)
            return seen.members
        now = self._snapshot_of(self.optimizer)
        check_changes(before, now, with_rates=False)
        rates, earlier_rates = now.rates(), before.rates()
        if rates != earlier_rates and "changed rates" not in self._warned:
            self._warned.add("changed rates")
            changes = [
                f"{name} is {value}, and was {earlier}"
                for name, values in rates.items()
                for value, earlier in zip(values, earlier_rates.get(name, values), strict=False)
                if value != earlier
            ]
            logger.warning(
                "the optimizer's rates changed after setOptimizer, and calls use those from before: %s\n"
                "  fix: call setOptimizer(optimizer) on the executor after scheduler.step(), or after a change of"
                " param_groups",
                "; ".join(changes[:3]),
            )
        self._seen = seen
        return seen.members


def default_optimizer(model: nn.Module) -> SGD:
    """Return the optimizer of a model that is wrapped without one. Raises Error without parameters."""
    parameters = list(model.parameters())
    if not parameters:
        raise Error(
            "poptorch.trainingModel: the model has no parameters to train\n"
            "  why: those of a function, or of layers in a plain list or dictionary, can't be found\n"
            "  fix: wrap an nn.Module that has the layers as attributes (nn.ModuleList, nn.ModuleDict)"
        )
    return SGD(parameters, lr=0.01)


def _gather_state(
    link: OptimizerLink, optimizer: Any, state_dict: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return an optimizer's `state_dict` with the states of all processes, unless the program has loaded its own since
    the executor was detached; raise Error if another optimizer has followed this one."""
    state = link._plans.state
    if link.optimizer is optimizer and (link._is_connected or state.has_state_of_calls):
        states = state.gather_optimizer_states()
        whole = {index: states[name] for index, name in enumerate(link._parameters) if name in states}
        return {**state_dict, "state": whole}
    away = state.elsewhere
    if state.shared is not None:
        away |= {name for name, owner in state.owner.items() if owner != state.shared[1].instance}
    if any(name in away and not optimizer.state.get(p) for name, p in state.parameters().items()):
        raise Error(
            "the optimizer's state was shared out over the instances, and has gone to another optimizer\n"
            "  fix: call state_dict() before setOptimizer()"
        )
    return None
