"""The link of executor and optimizer: `setOptimizer` copies the rates; the state is on the devices.

While an executor trains with an optimizer, `optimizer.state` is empty. `state_dict()` reads the state from
the devices, and a state loaded by `load_state_dict()` is uploaded before the next call. poptorch's optimizers
have attributes for this (`optimizer_base.py`), torch's get hooks.
"""

import copy
import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from popengine import settings
from popengine.errors import Error

from ..enums import MeanReductionStrategy
from ..logs import logger
from ..optim import Optimizer as PoptorchOptimizer
from ..optim.freeze_optimizer import OptimizerGuard, refuse_step_hooks
from ..optim.optimizer_state import (
    check_states,
    check_torch_state,
    from_ipu_state,
    from_torch_state,
    rates_of,
    to_ipu_param,
    to_ipu_state,
    to_torch_state,
)
from .loaded_plans import LoadedPlans
from .marked_model import WrappedModel

_LOSS_FACTOR = "lossScaleUpdateFactor"  # key of "ipu_state": the factor of automatic loss scaling
_LOST = "_pando_lost_state"  # attribute of a torch optimizer whose state is lost: the handle of the hook that raises
_PICKLED = "__getstate__"  # set on a torch optimizer itself: copies and pickles use it instead of the class's


class OptimizerLink:
    """The optimizer of an executor, and the rates of the next call (`hyper`). Both are None in inference.

    `frozen` has those properties of the optimizer that can't change after compilation.
    """

    frozen: settings.Optimizer

    def __init__(self, model: WrappedModel, plans: LoadedPlans) -> None:
        self._model, self._plans = model, plans
        self.optimizer: Any = None
        self.hyper: settings.Hyper | None = None
        self._hooks: list[Any] = []  # handles of the hooks on a torch optimizer
        self._loaded: dict[str, dict[str, Tensor]] = {}  # states of a torch optimizer, to be uploaded
        self._has_warned = False  # of rates that changed without `setOptimizer`
        options = model.options
        scaling = bool(options._Popart.options.get("automaticLossScalingSettings.enabled", False))
        self._guard = OptimizerGuard(options._relax_optimizer_checks, scaling)

    def setOptimizer(self, optimizer: Any) -> None:
        """Train with this optimizer and its present rates from the next call on.

        Before compilation the next call also uploads the state of `optimizer`; later the state on the devices
        stays. The previous optimizer gets a copy of the state on the devices.

        Raises:
            Error: a property that is compiled in has changed, or the model is for inference
            AssertionError, ValueError: the optimizer is not supported
        """
        if not self._model.training:
            raise Error(
                "setOptimizer needs a model that trains, and this one is for inference\n"
                "  fix: wrap the model with poptorch.trainingModel(model, options, optimizer)"
            )
        inner = getattr(optimizer, "optimizer", None)  # in accelerate's AcceleratedOptimizer, for example
        optimizer = inner if isinstance(inner, torch.optim.Optimizer) else optimizer
        compiled = self._plans.executable is not None
        frozen, hyper = self._guard.check_and_freeze(optimizer, self._model.parameter_names(), compiled)
        if not compiled:
            if self.optimizer is not None and frozen.kind != self.frozen.kind:
                self._plans.kept = replace(self._plans.kept, optimizer=None)  # it is of another update rule
            self.frozen = frozen
            is_combined = getattr(optimizer, "use_combined_accum", False)
            if frozen.accumulator_type == torch.float16 and not is_combined:  # running means do not overflow
                update = self._model.options.Training
                self._model.options._unfreeze()
                update.setMeanAccumulationAndReplicationReductionStrategy(MeanReductionStrategy.Running)
                self._model.options._freeze()
            with torch._C.DisableTorchFunctionSubclass():
                trained = [name for name, parameter in self._model.parameters() if parameter.requires_grad]
            lost = [name for name in trained if name not in frozen.group_of]
            if lost:
                logger.warning("parameters in no group of the optimizer are not updated: %s", ", ".join(lost))
        optimizer._opt_called = True  # else schedulers warn: calls update weights without step()
        if optimizer is not self.optimizer:
            self.release()
            self.optimizer = optimizer
            self.connect(take=not compiled)  # after compilation the state on the devices is newer
        self.hyper = hyper
        if isinstance(optimizer, PoptorchOptimizer):
            optimizer._has_loaded_rates = False

    def connect(self, take: bool = True) -> None:
        """Make the optimizer's `state_dict()` read the devices' state, and `load_state_dict()` upload one.

        Empties a torch optimizer's state. Does nothing in inference, or if its hooks are set already.

        Args: take: whether the next call uploads the optimizer's present state
        """
        if isinstance(self.optimizer, PoptorchOptimizer):
            if take and self.optimizer._state_reader is None:
                self.optimizer._reload_kept_state(self._model.parameter_names())
            if self._plans.executable is not None:
                link = weakref.ref(self)
                self.optimizer._state_check = lambda entries: (it := link()) and it._check_states(entries)
                self.optimizer._state_reader = lambda: ((it := link()) and it._read_state()) or (None, None)
        elif self._model.training and not self._hooks:
            self._add_hooks()
            if take:
                self._load_torch_state()
            self.optimizer.state.clear()

    def release(self) -> None:
        """Copy the optimizer state from the devices into the optimizer, and undo `connect`.

        A state that is sharded over instances is not copied: `state_dict()` then raises Error.
        """
        lost, optimizer = self._plans.is_optimizer_sharded, self.optimizer
        if isinstance(optimizer, PoptorchOptimizer):
            optimizer._unlink_executor(self._model.parameter_names(), _raise_lost if lost else None)
        elif self._hooks:
            if lost:
                vars(optimizer)[_LOST] = optimizer.register_state_dict_pre_hook(lambda _: _raise_lost())
                vars(optimizer)[_PICKLED] = _raise_lost
            else:
                self._write_torch_state()
                vars(optimizer).pop(_PICKLED, None)
            for handle in self._hooks:
                handle.remove()
            self._hooks = []

    # ---- a torch optimizer ---------------------------------------------------------------------------------

    def _add_hooks(self) -> None:
        """Set hooks and `__getstate__` of a torch optimizer: state_dict(), copies and pickles read the
        devices' state, and load_state_dict() uploads. The hooks have no effect once the executor is gone."""
        optimizer: torch.optim.Optimizer = self.optimizer
        link = weakref.ref(self)

        def hook(method: Callable[[OptimizerLink], None]) -> Callable[..., None]:
            def call(*_: Any) -> None:
                if (it := link()) is not None:
                    method(it)

            return call

        fill, empty = hook(OptimizerLink._write_torch_state), hook(lambda it: it.optimizer.state.clear())

        def pickled() -> dict[str, Any]:
            fill()
            attributes = dict(type(optimizer).__getstate__(optimizer))
            attributes["state"] = copy.copy(attributes["state"])
            empty()
            return attributes

        if (lost := vars(optimizer).pop(_LOST, None)) is not None:
            lost.remove()
        vars(optimizer)[_PICKLED] = pickled
        self._hooks = [
            optimizer.register_state_dict_pre_hook(fill),
            optimizer.register_state_dict_post_hook(empty),
            optimizer.register_load_state_dict_pre_hook(
                functools.partial(check_torch_state, self.frozen.kind)
            ),
            optimizer.register_load_state_dict_post_hook(hook(OptimizerLink._load_torch_state)),
        ]

    def _load_torch_state(self) -> None:
        """Move the states in `optimizer.state` to `_loaded`, which the next call uploads, as checked copies.

        States of parameters that are not the model's are dropped.
        """
        names = self._model.parameter_names()
        loaded = {
            names[id(parameter)]: from_torch_state(self.frozen, state)
            for parameter, state in self.optimizer.state.items()
            if id(parameter) in names
        }
        check_states(self.frozen.kind, loaded)
        self._loaded.update(loaded)
        self.optimizer.state.clear()

    def _write_torch_state(self) -> None:
        """Copy the states of the devices (after a first update) and of `_loaded` to `optimizer.state`."""
        _, steps = self._plans.random_state
        on_devices, names = self._plans.optimizer_states() or {}, self._model.parameter_names()
        states = {name: dict(state) for name, state in on_devices.items()} if steps else {}
        for name, state in self._loaded.items():
            states.setdefault(name, {}).update(state)
        for parameter in (p for group in self.optimizer.param_groups for p in group["params"]):
            name = names.get(id(parameter))
            if name in states and (state := to_torch_state(self.frozen.kind, states[name], steps)):
                self.optimizer.state[parameter] = state

    # ---- state -------------------------------------------------------------------------------------------

    def discard_host_states(self) -> None:
        """Discard the optimizer's states on the host, also loaded states that were not uploaded yet."""
        self._loaded = {}
        self.optimizer.state.clear()
        if isinstance(self.optimizer, PoptorchOptimizer):
            self.optimizer._pending_state = self.optimizer._kept_state = None
            self.optimizer._has_torch_state = False
        else:
            self.connect(take=False)

    def _read_state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
        """Return ("ipu_state", "ipu_param") for a poptorch optimizer's state_dict(); None without a state."""
        assert self.hyper is not None
        states, executable = self._plans.optimizer_states(), self._plans.executable
        if states is None:
            return None
        entries = to_ipu_state(self.frozen.kind, states)
        if executable is not None and executable.settings.automatic_loss_scaling:
            entries[_LOSS_FACTOR] = torch.tensor(self._plans.loss_factor)
        return entries, to_ipu_param(self.frozen.group_of, self.hyper)

    def upload_loaded(self) -> None:
        """Upload optimizer state that was loaded since the last call, and use loaded rates from now on.

        Loaded "ipu_state" is checked. Missing states stay as they are on the devices; a warning names them.
        """
        optimizer, state = self.optimizer, self._plans.require_engine().state
        is_ours = isinstance(optimizer, PoptorchOptimizer)
        if is_ours and optimizer._has_torch_state:
            self._load_torch_state()
            optimizer._has_torch_state = False
        if self._loaded:
            state.write_optimizer(self._loaded)
            self._loaded = {}
        if is_ours and optimizer._pending_state is not None:
            kind, entries = self.frozen.kind, optimizer._pending_state[0] or {}
            self._check_states(entries)
            missing = sorted(set(to_ipu_state(kind, state.read_optimizer())) - set(entries))
            if missing:
                logger.warning(
                    "the loaded optimizer state has nothing for %s: kept as it is", ", ".join(missing)
                )
            factor = entries.get(_LOSS_FACTOR)
            state.write_optimizer(from_ipu_state(kind, entries), None if factor is None else float(factor))
            optimizer._pending_state = None
        if is_ours and optimizer._has_loaded_rates:
            names = self._model.parameter_names()
            _, self.hyper = self._guard.check_and_freeze(self.optimizer, names, compiled=True)
            optimizer._has_loaded_rates = False

    def _check_states(self, entries: Mapping[str, Tensor]) -> None:
        """Raise RuntimeError if a state in an "ipu_state" has invalid values or another shape."""
        with torch._C.DisableTorchFunctionSubclass():
            shapes = {name: tuple(parameter.shape) for name, parameter in self._model.parameters()}
        grouped = self._model.per_replica  # on the host these have one row per group of replicas
        shapes = {name: shape for name, shape in shapes.items() if name not in grouped}
        check_states(self.frozen.kind, from_ipu_state(self.frozen.kind, entries), shapes)

    # ---- rates -------------------------------------------------------------------------------------------

    def warn_of_changes(self) -> None:
        """Warn, once, if the optimizer's rates changed since `setOptimizer`: calls ignore the change.

        Raises: Error, if the optimizer's `step()` has hooks
        """
        used = self.hyper
        if used is None:
            return
        refuse_step_hooks(self.optimizer)
        if self._has_warned or getattr(
            self.optimizer, "_has_loaded_rates", False
        ):  # `upload_loaded` reads these
            return
        now = rates_of(self.frozen.kind, self.optimizer)
        if now != used:
            self._has_warned = True
            scalings = {"loss_scaling": now.loss_scaling}, {"loss_scaling": used.loss_scaling}
            changes = [
                f"{name} is {value}, and was {before.get(name)}"
                for group, before in (scalings, *zip(now.groups, used.groups, strict=False))
                for name, value in group.items()
                if before.get(name) != value
            ]
            logger.warning(
                "the optimizer's rates changed after setOptimizer, and calls use those from before: %s\n"
                "  fix: call setOptimizer(optimizer) on the executor after scheduler.step(), or after a change of"
                " param_groups",
                "; ".join(changes[:3]) or "its parameter groups",
            )


def _raise_lost() -> NoReturn:
    """Raise Error: the optimizer state was sharded, and is gone with its executor."""
    raise Error(
        "the optimizer's state was shared out over the instances, and has gone with its executor\n"
        "  fix: call state_dict() before destroy()"
    )
