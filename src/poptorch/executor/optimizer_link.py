"""The link of executor and optimizer: `setOptimizer` copies the rates; the state is on the devices.

During training the state is on the devices, and `optimizer.state` is empty: `state_dict()` reads the devices. A
state loaded by `load_state_dict()` is uploaded before the next call. Optimizers of poptorch have attributes for
this (`optimizer_base.py`); the attribute `state` of torch's optimizers becomes a `DeviceStates`.
"""

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from popengine import settings
from popengine.errors import Error
from popengine.torch_private import DisableTorchFunctionSubclass
from popengine.update.optimizer_rules import OWN_STEP

from ..enums import MeanReductionStrategy
from ..logs import listed, logger
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
from .wrapped_model import WrappedModel

_LOSS_FACTOR = "lossScaleUpdateFactor"  # key of "ipu_state": the factor of automatic loss scaling


class DeviceStates(dict[Any, Any]):
    """`optimizer.state` of a torch optimizer: empty while the states are on the devices of an executor.

    Then `items()`, which `state_dict()` calls, and copies return the devices' states. `find_reader` returns
    the function that reads these; None: the executor has released the optimizer, and the states are here.
    """

    def __init__(self, find_reader: Callable[[], Callable[[], dict[Any, Any]] | None]) -> None:
        super().__init__()
        self.find_reader = find_reader
        self.is_lost = False  # whether the executor has ended with the states, which were sharded

    def __missing__(self, parameter: Any) -> Any:
        return self.setdefault(parameter, {})

    def items(self) -> Any:
        read = self.find_reader()
        return super().items() if read is None else read().items()

    def __reduce__(self) -> Any:
        if self.is_lost:
            _raise_lost_state()
        return defaultdict, (dict, dict(self.items()))  # as torch makes `optimizer.state`


class OptimizerLink:
    """The optimizer of an executor, and the rates of the next call (`hyper`). Both are None in inference.

    `frozen` has those properties of the optimizer that can't change after compilation.
    """

    frozen: settings.Optimizer

    def __init__(self, model: WrappedModel, plans: LoadedPlans) -> None:
        self._model, self._plans = model, plans
        self.optimizer: Any = None
        self.hyper: settings.Hyper | None = None
        self._device_states: DeviceStates | None = None  # of a torch optimizer that is connected
        self._names: dict[int, str] = {}  # of the optimizer's parameters: id -> canonical name
        self._has_warned_of_replaced = False
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
        names = self._model.parameter_names()
        frozen, hyper = self._guard.check_and_freeze(optimizer, names, compiled)
        self._names = names
        if not compiled:
            if self.optimizer is not None and frozen.kind != self.frozen.kind:
                self._plans.state.optimizer.clear()  # it is of another update rule
            self.frozen = frozen
            is_combined = getattr(optimizer, "use_combined_accum", False)
            if frozen.accumulator_type == torch.float16 and not is_combined:  # running means do not overflow
                update = self._model.options.Training
                self._model.options._unfreeze()
                update.setMeanAccumulationAndReplicationReductionStrategy(MeanReductionStrategy.Running)
                self._model.options._freeze()
            with DisableTorchFunctionSubclass():
                parameters = self._model.traced.named_parameters()
                trained = [name for name, parameter in parameters if parameter.requires_grad]
            lost = [name for name in trained if name not in frozen.group_of]
            if lost:
                logger.warning("parameters in no group of the optimizer are not updated: %s", ", ".join(lost))
        optimizer._opt_called = True  # else schedulers warn: calls update weights without step()
        if optimizer is not self.optimizer:
            self.release_optimizer()
            self.optimizer = optimizer
            self.connect_optimizer(take=not compiled)  # after compilation the state on the devices is newer
        self.hyper = hyper
        link = weakref.ref(self)  # threads of an engine refer to the state
        self._plans.state.own_step = lambda gradients: (it := link()) and it._step(gradients)
        if isinstance(optimizer, PoptorchOptimizer):
            optimizer._has_loaded_rates = False

    def freeze_again(self) -> None:
        """Take over what has changed before the compilation: names of parameters, and attributes of the optimizer
        that are compiled in. The rates stay those of `setOptimizer`."""
        if self.optimizer is not None:
            self._names |= self._model.parameter_names()
            self.frozen, _ = self._guard.check_and_freeze(self.optimizer, self._names, compiled=False)

    def _step(self, gradients: Mapping[str, Tensor]) -> None:
        """Run the optimizer's own `step()` with these gradients, by name of the parameter. The attributes `grad` of
        the parameters are the program's own before and after it."""
        parameters = [value for group in self.optimizer.param_groups for value in group["params"]]
        kept = [parameter.grad for parameter in parameters]
        try:
            for parameter in parameters:
                parameter.grad = gradients.get(self._names[id(parameter)])
            with torch.enable_grad():  # as in a plain loop
                self.optimizer.step()
        finally:
            for parameter, gradient in zip(parameters, kept, strict=True):
                parameter.grad = gradient

    def replaced_parameters(self) -> tuple[str, ...]:
        """Return the names of parameters that the program has replaced, and that the optimizer does not hold.

        As in plain PyTorch they are not updated. The first one logs a warning.
        """
        held = {id(value) for group in self.optimizer.param_groups for value in group["params"]}
        present = self._model.parameter_names()
        if held <= present.keys():
            return ()
        found = tuple(n for key, n in present.items() if key not in held and n in self.frozen.group_of)
        if found and not self._has_warned_of_replaced:
            self._has_warned_of_replaced = True
            logger.warning(
                "%s was replaced by another Parameter, which the optimizer does not hold: it is not updated\n"
                "  fix: executor.setOptimizer(...) with a new optimizer of model.parameters()",
                listed(list(found)),
            )
        return found

    def connect_optimizer(self, take: bool = True) -> None:
        """Make the optimizer's `state_dict()` read the devices' state, and `load_state_dict()` check a state.

        Does nothing in inference, or if the optimizer is connected already.

        Args: take: whether the next call uploads the optimizer's present state
        """
        optimizer = self.optimizer
        if isinstance(optimizer, PoptorchOptimizer):
            if take and optimizer._state_reader is None:
                optimizer._reload_kept_state(self._model.parameter_names())
            if self._plans.executable is not None:
                link = weakref.ref(self)
                optimizer._state_check = lambda entries: (it := link()) and it._check_ipu_state(entries)
                optimizer._state_reader = lambda: ((it := link()) and it._read_ipu_state()) or (None, None)
        elif self._model.training and self.frozen.kind != OWN_STEP and self._device_states is None:
            is_lost = getattr(optimizer.state, "is_lost", False)
            if take and not is_lost:
                self._host_states()  # raises an error for a wrong state
            check = functools.partial(check_torch_state, self.frozen.kind)
            self._load_hook = optimizer.register_load_state_dict_pre_hook(check)
            self._device_states = DeviceStates(weakref.WeakMethod(self._torch_states))
            if is_lost or not take:
                optimizer.state = self._device_states

    def release_optimizer(self) -> None:
        """Copy the optimizer state from the devices into the optimizer, and undo `connect_optimizer`.

        A state that is sharded over instances is not copied: `state_dict()` then raises Error.
        """
        lost, states = self._plans.is_optimizer_sharded, self._device_states
        if isinstance(self.optimizer, PoptorchOptimizer):
            self.optimizer._unlink_executor(
                self._model.parameter_names(), _raise_lost_state if lost else None
            )
        elif states is not None:
            if lost:
                self.optimizer.register_state_dict_pre_hook(_check_not_lost)
            else:
                states.update(self._torch_states())
            states.is_lost, states.find_reader, self._device_states = lost, lambda: None, None
            self._load_hook.remove()

    # ---- a torch optimizer ---------------------------------------------------------------------------------

    def _torch_states(self) -> dict[Tensor, dict[str, Tensor]]:
        """Return the devices' states by parameter, in torch's format; no states before the first update."""
        _, steps = self._plans.random_state
        states, names = self._plans.optimizer_states(), self._model.parameter_names()
        found = {}
        for parameter in (p for group in self.optimizer.param_groups for p in group["params"]):
            name = names.get(id(parameter), "")
            if steps and name in states and (state := to_torch_state(self.frozen.kind, states[name], steps)):
                found[parameter] = state
        return found

    def _host_states(self) -> dict[str, dict[str, Tensor]]:
        """Return the checked states in `optimizer.state`, by name of the parameter, in the engine's format."""
        names = self._model.parameter_names()
        states = {
            names[id(parameter)]: from_torch_state(self.frozen, state)
            for parameter, state in self.optimizer.state.items()
            if id(parameter) in names
        }
        check_states(self.frozen.kind, states)
        return states

    def discard_host_states(self) -> None:
        """Discard the optimizer's states on the host, also loaded states that were not uploaded yet."""
        optimizer = self.optimizer
        if isinstance(optimizer, PoptorchOptimizer):
            optimizer._pending_state = optimizer._kept_state = None
            optimizer._has_torch_state = False
            self.optimizer.state.clear()
        else:
            self.connect_optimizer(take=False)
            optimizer.state = self._device_states

    def _read_ipu_state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
        """Return ("ipu_state", "ipu_param") for a poptorch optimizer's state_dict(); None without a state."""
        assert self.hyper is not None
        states, executable = self._plans.optimizer_states(), self._plans.executable
        entries = to_ipu_state(self.frozen.kind, states)
        if executable is not None and executable.settings.automatic_loss_scaling:
            entries[_LOSS_FACTOR] = torch.tensor(self._plans.state.loss_factor)
        return entries, to_ipu_param(self.frozen.group_of, self.hyper)

    def upload_loaded_state(self) -> None:
        """Upload optimizer state that was loaded since the last call, and use loaded rates from now on.

        Loaded "ipu_state" is checked. Missing states stay as they are on the devices; a warning names them.
        """
        optimizer, state = self.optimizer, self._plans.state
        if not isinstance(optimizer, PoptorchOptimizer):
            if self._device_states is not None and optimizer.state is not self._device_states:
                state.load_optimizer(self._host_states())
                optimizer.state = self._device_states
            return
        if optimizer._has_torch_state:
            state.load_optimizer(self._host_states())
            self.optimizer.state.clear()
            optimizer._has_torch_state = False
        if optimizer._pending_state is not None:
            kind, entries = self.frozen.kind, optimizer._pending_state[0] or {}
            self._check_ipu_state(entries)
            missing = sorted(set(to_ipu_state(kind, state.optimizer)) - set(entries))
            if missing:
                logger.warning(
                    "the loaded optimizer state has nothing for %s: kept as it is", ", ".join(missing)
                )
            factor = entries.get(_LOSS_FACTOR)
            state.load_optimizer(from_ipu_state(kind, entries))
            state.loss_factor = state.loss_factor if factor is None else float(factor)
            optimizer._pending_state = None
        if optimizer._has_loaded_rates:
            names = self._model.parameter_names()
            _, self.hyper = self._guard.check_and_freeze(self.optimizer, names, compiled=True)
            optimizer._has_loaded_rates = False

    def _check_ipu_state(self, entries: Mapping[str, Tensor]) -> None:
        """Raise RuntimeError if a state in an "ipu_state" has invalid values or another shape."""
        grouped = self._model.per_replica  # on the host these have one row per group of replicas
        shapes = {n: shape for n, shape in self._model.shapes(()).items() if n not in grouped}
        check_states(self.frozen.kind, from_ipu_state(self.frozen.kind, entries), shapes)

    def warn_of_changes(self) -> None:
        """Warn, once, if the optimizer's rates changed since `setOptimizer`: calls ignore the change.

        Raises: Error, if the optimizer's `step()` has hooks
        """
        used = self.hyper
        if used is None:
            return
        if self.frozen.kind != OWN_STEP:
            refuse_step_hooks(self.optimizer)
        self._guard.check_attributes(self.optimizer)
        # `upload_loaded_state` reads loaded rates.
        if self._has_warned or getattr(self.optimizer, "_has_loaded_rates", False):
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


def _check_not_lost(optimizer: torch.optim.Optimizer) -> None:
    """Raise Error if the optimizer's states are lost. A hook of its `state_dict()`."""
    if getattr(optimizer.state, "is_lost", False):
        _raise_lost_state()


def _raise_lost_state() -> NoReturn:
    raise Error(
        "the optimizer's state was shared out over the instances, and has gone with its executor\n"
        "  fix: call state_dict() before destroy()"
    )
