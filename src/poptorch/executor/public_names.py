"""The executor's public names that neither run nor compile: each returns or changes a part of the executor.

`executor.py` has what a call does.
"""

import functools
from collections.abc import Callable
from datetime import timedelta
from operator import attrgetter
from types import FunctionType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import torch
from torch import nn

from popengine.errors import Error

from ..annotating.blocks import module_repr
from ..annotating.replica_groups import GroupableParameter
from ..logs import logger
from ..options import Options
from ..reporting.overview import Overview, overview
from . import marked_model
from .device_lease import DeviceLease
from .latest_call import LatestCall
from .marked_model import WrappedModel
from .optimizer_link import OptimizerLink
from .weight_sync import WeightSync

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def with_torch_modes(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that runs outside inference mode, and after Ctrl-C leaves gradients on or off as they were."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.is_inference_mode_enabled():
            # Tensors made in it take no gradient, and are not writable after it, as a model's have to be.
            with torch.inference_mode(False):
                return call(*args, **kwargs)
        takes_gradients = torch.is_grad_enabled()
        try:
            return function(*args, **kwargs)
        except KeyboardInterrupt:
            # Just before the end of a `with torch.no_grad()`, an interrupt keeps it from restoring the mode.
            torch.set_grad_enabled(takes_gradients)
            raise

    return call


def methods_with_torch_modes(kind: type[T]) -> type[T]:
    """Wrap all public methods of a class by `with_torch_modes`."""
    for name, member in list(vars(kind).items()):
        if isinstance(member, FunctionType) and (name == "__call__" or not name.startswith("_")):
            setattr(kind, name, with_torch_modes(member))
    return kind


def _part(name: str, method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Return a method of the executor that calls a method of its part of this name."""

    @functools.wraps(method)
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(getattr(self, name), *args, **kwargs)

    return call


@methods_with_torch_modes
class PublicNames:
    """What is public of an executor beside calling, compiling, devices and files."""

    _wrapped: WrappedModel
    _lease: DeviceLease
    _weights: WeightSync
    _optimizer_link: OptimizerLink
    _latest: LatestCall
    _updates: int
    _compiled_mode: bool
    _compilation_seconds: float | None
    _announced_methods: set[str]

    # ---- weights, optimizer, random state ----------------------------------------------------------------

    copyWeightsToHost = _part("_weights", WeightSync.copyWeightsToHost)
    copyWeightsToDevice = _part("_weights", WeightSync.copyWeightsToDevice)
    copyNamedBuffersToDevice = _part("_weights", WeightSync.copyNamedBuffersToDevice)
    averageRunningStatistics = _part("_weights", WeightSync.averageRunningStatistics)
    hostWeightsChanged = _part("_weights", WeightSync.hostWeightsChanged)
    setOptimizer = _part("_optimizer_link", OptimizerLink.setOptimizer)

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Copy the weights to the host if the devices have newer ones; return whether they had."""
        is_stale = self._weights.stale
        if is_stale:
            self.copyWeightsToHost()
        return is_stale

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the user model's, with the newest weights."""
        return self._wrapped.user.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
        """Load into the user's model, and upload if attached; returns missing and unexpected keys."""
        self.copyWeightsToHostIfNeeded()  # what the dictionary lacks keeps its newest value
        keys = self._wrapped.user.load_state_dict(state_dict, strict)
        if self.isAttachedToDevice():
            self.copyWeightsToDevice()
        return keys

    @property
    def rng_state(self) -> list[int]:
        """[seed, steps run]: with the same state a model draws the same random numbers."""
        self._lease.need_executable()
        return list(self._lease.random_state)

    @rng_state.setter
    def rng_state(self, state: list[int]) -> None:
        self._lease.need_executable()
        if not (isinstance(state, list | tuple) and len(state) == 2 and all(type(n) is int for n in state)):
            raise Error(
                f"a random state is the list of two integers that rng_state gave; found {state!r}\n"
                "  fix: state = executor.rng_state; ...; executor.rng_state = state"
            )
        self._lease.random_state = (state[0], state[1])

    # ---- the model and its compilation -------------------------------------------------------------------

    @property
    def model(self) -> Any:
        """The user's model; of an executor for inference, its own copy of the top level: weights and parts are
        shared, and its flags are what forward finds when it is compiled."""
        return self._wrapped.user if self._wrapped.training else self._wrapped.traced

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the model (in training: of its parts; what forward finds at the top is as at wrapping).

        The compilation has the modes of its moment for good; afterwards this is a warning, until `destroy`.
        """
        if self.isCompiled():
            logger.warning("train() and eval() come too late: the model is compiled, and its mode with it")
        self.model.train(mode)
        self._compiled_mode = self._wrapped.user.training  # has been warned of
        return self

    def eval(self) -> Self:
        """`train(False)`."""
        return self.train(False)

    @property
    def options(self) -> Options:
        """The executor's own frozen options, with an output mode picked."""
        return self._wrapped.options

    @property
    def plan(self) -> Overview:
        """What runs: stages, ipus, parameters, the bytes between them, the schedule and the code.

        `poptorch.describe` makes such an overview before the first call.
        """
        return overview(self._lease.need_executable())

    @property
    def memory_format(self) -> str:
        """*Pando*: the layout of the compiled model's convolutions, "preserve" or "channels_last": what "auto" chose.

        Raises: Error, before compilation.
        """
        return self._lease.need_executable().memory_format

    def isCompiled(self) -> bool:
        """Return whether there is a plan."""
        return self._lease.executable is not None

    def isAttachedToDevice(self) -> bool:
        """Return whether the model is on its devices."""
        return self._lease.engine is not None

    def compilationTime(self) -> timedelta:
        """Return how long the latest compilation took."""
        if not self.options._show_progress_bar:
            raise Error("compilationTime() needs options.showCompilationProgressBar(True)")
        if self._compilation_seconds is None:
            raise Error(
                "compile the model before obtaining compilation time: call it, or model.compile(*inputs)"
            )
        return timedelta(seconds=self._compilation_seconds)

    def getTensorNames(self) -> list[str]:
        """Return the names of tensors, all of which `Options.anchorTensor` takes."""
        executable = self._lease.executable
        assert executable is not None, (
            "getTensorNames() needs a compiled model: call it, or model.compile(*inputs), before"
        )
        return list(executable.anchors.names)

    # ---- the latest call ---------------------------------------------------------------------------------

    getPerfCounters = _part("_latest", LatestCall.getPerfCounters)
    getLatency = _part("_latest", LatestCall.getLatency)
    getHostIpuLatency = _part("_latest", LatestCall.getHostIpuLatency)
    getComputeLatency = _part("_latest", LatestCall.getComputeLatency)
    getIpuHostLatency = _part("_latest", LatestCall.getIpuHostLatency)
    getAnchoredTensor = _part("_latest", LatestCall.getAnchoredTensor)

    @property
    def finished_updates(self) -> int:
        """*Pando*: the weight updates that the latest call has finished.

        After an error or Ctrl-C fewer than `deviceIterations`; the weights are those after the last of them.
        """
        return self._updates if self._lease.engine is not None else 0

    @property
    def notes(self) -> list[tuple[Any, Any]]:
        """What the forward has noted (`poptorch.notes`), with the latest call's values."""
        return list(self._latest.notes)

    def cycleCount(self) -> int:
        """Refused: there are no cycles to count here."""
        if not self.options._Popart.options.get("instrumentWithHardwareCycleCounter"):
            raise Error("Cycle count logging is disabled\n  fix: options.logCycleCount(True)")
        if self._latest.has_run:
            raise Error(
                "cycleCount() is only supported on actual IPU hardware; getPerfCounters() has seconds"
            )
        raise Error("cycleCount() is for a model that has run: run the model at least once")

    forward = marked_model.HostForward()

    # ---- as a Python object ------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return module_repr(self._wrapped.user)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and "_wrapped" not in self.__dict__:
            raise AttributeError(name)  # while the executor is being made
        value = getattr(self.model, name)
        if name not in self._announced_methods:
            self._announced_methods.add(name)
            marked_model.announce_host_method(self.model, name, value)
        if isinstance(value, nn.Parameter) and name in self._wrapped.user._parameters:
            groupings = None if self.isCompiled() else self.per_replica_params
            return GroupableParameter.of(value, name, groupings)
        return value

    # ---- private names that programs use -----------------------------------------------------------------

    per_replica_params = property(attrgetter("_wrapped.per_replica"))
    _executable = property(attrgetter("_lease.executable"))
    _user_model = property(attrgetter("_wrapped.user"))
    _options = property(attrgetter("_wrapped.options"))
    _optimizer = property(attrgetter("_optimizer_link.optimizer"))
    _host_weights_version = property(attrgetter("_weights.version"))
    _is_attached = property(isAttachedToDevice)

    def _debugGetPopartIR(self) -> str:
        """Refused: there is no PopART graph here."""
        raise Error("_debugGetPopartIR: this implementation has no PopART graph to show")
