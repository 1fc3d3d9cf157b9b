"""The executor's public methods, without those for calls, compilation, devices and files (`executor.py`)."""

import copy
import functools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from operator import attrgetter
from types import FunctionType
from typing import Any, ParamSpec, Self, TypeVar

import torch
from torch import Tensor, nn

from popengine.errors import Error, hide_internal_frames

from ..annotating.blocks import module_repr
from ..annotating.replica_groups import GroupableParameter
from ..compiling.compilation_log import Overview
from ..logs import logger
from ..options import Options
from .latest_call import Latency, LatestCall, Times
from .loaded_plans import LoadedPlans
from .model_flags import ModelFlags
from .optimizer_link import OptimizerLink
from .wrapped_model import HostForward, WrappedModel, read_weights_elsewhere

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def outside_inference_mode(function: Callable[P, R]) -> Callable[P, R]:
    """Return a wrapper that calls `function` outside inference mode, restores grad mode after Ctrl-C, and hides frames
    of Pando in the tracebacks of errors."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True  # notebooks and pytest leave this frame out, too
        if torch.is_inference_mode_enabled():
            # Tensors made in inference mode can't be a model's: no gradients, and read-only after it.
            with torch.inference_mode(False):
                return call(*args, **kwargs)
        takes_gradients = torch.is_grad_enabled()
        try:
            return function(*args, **kwargs)
        except KeyboardInterrupt:
            # An interrupt just before the end of a `with torch.no_grad()` keeps it from restoring the mode.
            torch.set_grad_enabled(takes_gradients)
            raise
        except Exception as error:
            hide_internal_frames(error)
            raise

    return call


def run_methods_outside_inference_mode(kind: type[T]) -> type[T]:
    """Replace `__call__` and public methods of a class by `outside_inference_mode` ones; return the class."""
    for name, member in list(vars(kind).items()):
        if isinstance(member, FunctionType) and (name == "__call__" or not name.startswith("_")):
            setattr(kind, name, outside_inference_mode(member))
    return kind


@run_methods_outside_inference_mode
class PublicNames:
    """The base class of the executor: creates its parts, and has the public methods that use these alone."""

    def __init__(self, wrapped: WrappedModel) -> None:
        self._wrapped = wrapped
        self._flags = ModelFlags(wrapped)
        self._plans = LoadedPlans(wrapped.options, wrapped.traced)
        if wrapped.options.Distributed.instances_per_replica > 1:
            read_weights_elsewhere(wrapped.user, self._plans)
        self._optimizer_link = OptimizerLink(wrapped, self._plans)
        self._latest = LatestCall()
        self._lock = threading.RLock()  # calls in several threads run one by one
        self._host_weights_version = 0  # calls of `copyWeightsToHost`; programs for PopTorch read it
        self._compilation_seconds: float | None = None

    # ---- weights, optimizer, random state ----------------------------------------------------------------

    def setOptimizer(self, optimizer: Any) -> None:
        """Train with this optimizer and its current lr, momentum, betas, weight decay, ... from the next call on.

        An optimizer without state continues with the state of the previous optimizer, which keeps a copy. After
        compilation the optimizer must have the same class.

        >>> optimizer.param_groups[0]["lr"] *= 0.1
        >>> trainer.setOptimizer(optimizer)

        Raises:
            Error: the class, a dtype (`accum_type`, ...) or an attribute that is marked constant
                (`variable_attrs`) has changed since compilation; or the model is for inference
            AssertionError, ValueError: the optimizer is not supported
        """
        self._optimizer_link.set_optimizer(optimizer)

    def copyWeightsToHost(self) -> None:
        """Move weights and optimizer state from accelerators to the CPU; the next call moves them back. On the CPU the
        model's weights are the ones that train: there is nothing to copy, except if a replica spans several processes:
        then all instances must call this, and have all weights until the next call.

        Raises: Error, if the model is not compiled or not attached, or its weights do not fit any more
        """
        engine = self._plans.require_engine()
        engine.state.bind(None)
        engine.state.train_state.move_to_host()
        self._plans.fill_elsewhere()
        self._host_weights_version += 1

    def copyWeightsToDevice(self) -> None:
        """Check that the model is attached, and its weights. Each call uses the model's current weights.

        Raises: Error, if the model is not compiled or not attached, or its weights do not fit any more
        """
        self._plans.require_engine().state.bind(None)

    def copyNamedBuffersToDevice(self) -> None:
        """Check `Options.updatableNamedBuffers`. Each call uses the model's current buffers.

        Raises: Error, if the option names none, or the model is not compiled or not attached
        """
        self._plans.require_engine()
        if not self._wrapped.updatable_buffers():
            raise Error(
                "No named buffers marked as updatable\n"
                "  fix: options.updatableNamedBuffers(['name']) before wrapping"
            )

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Copy the weights to the host if an accelerator has them, as `copyWeightsToHost`; return whether one had."""
        return self._plans.engine is not None and self._plans.engine.state.train_state.move_to_host()

    def averageRunningStatistics(self) -> None:
        """*Pando*: replace running statistics by their mean over the replicas of all instances.

        Each replica processes different rows, and the model has the buffers of this instance's first replica:
        call this method before a validation or a checkpoint, in all instances. Running statistics are all
        floating point buffers that forward changes.

        Raises: Error, if the model is not attached to its devices
        """
        with self._lock:
            self._plans.require_engine().average_buffers()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the `state_dict()` of the user's model."""
        return self._wrapped.user.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
        """Load a `state_dict()` into the user's model, as torch does; the next call uses these weights.

        Returns: torch's pair (missing_keys, unexpected_keys)
        Raises: RuntimeError, for shapes that differ and, if `strict`, for keys that differ
        """
        return self._wrapped.user.load_state_dict(state_dict, strict)

    @property
    def rng_state(self) -> list[int]:
        """Return [seed, number of steps run], the key of random draws. Raises: Error, before compilation"""
        self._plans.require_executable()
        return list(self._plans.random_state)

    @rng_state.setter
    def rng_state(self, state: list[int]) -> None:
        self._plans.require_executable()
        if not (isinstance(state, list | tuple) and len(state) == 2 and all(type(n) is int for n in state)):
            raise Error(
                f"a random state is the list of two integers that rng_state gave; found {state!r}\n"
                "  fix: state = executor.rng_state; ...; executor.rng_state = state"
            )
        self._plans.random_state = (state[0], state[1])

    # ---- the model and its compilation -------------------------------------------------------------------

    @property
    def model(self) -> Any:
        """Return the user's model; in inference a shallow copy, which shares weights and submodules. Forward
        is compiled with the flags of this copy, such as `training`."""
        return self._wrapped.user if self._wrapped.training else self._wrapped.traced

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the model and its submodules, and return the executor.

        In training these are the user's, but the top-level module is compiled in the mode that it had when it was
        wrapped. In inference they are the executor's own. Compilation fixes all modes: a later `train` logs a
        warning, and calls compute as before, until `destroy`.
        """
        if self._flags.set_mode(mode) and self.isCompiled():
            logger.warning("train() and eval() come too late: the model is compiled, and its mode with it")
        return self

    def eval(self) -> Self:
        """Set evaluation mode, as `train(False)`; return the executor."""
        return self.train(False)

    @property
    def options(self) -> Options:
        """Return the executor's frozen copy of the options, with the default output mode resolved."""
        return self._wrapped.options

    @property
    def plan(self) -> Overview:
        """Return an overview of the compiled model: stages, ipus, parameters, transfers, schedule and code.

        Raises: Error, before compilation. `poptorch.describe` returns an overview without a compiled model.
        """
        compiled = self._plans.require_executable()
        return Overview(compiled.plan, compiled.settings, compiled.graph)

    @property
    def memory_format(self) -> str:
        """*Pando*: return "preserve" or "channels_last", of convolutions; raises Error before compilation."""
        return self._plans.require_executable().memory_format

    def isCompiled(self) -> bool:
        """Return whether the model is compiled."""
        return self._plans.executable is not None

    def isAttachedToDevice(self) -> bool:
        """Return whether the model is attached to its devices."""
        return self._plans.engine is not None

    def compilationTime(self) -> timedelta:
        """Return the time of the latest compilation.

        Raises: Error, before compilation, or without `showCompilationProgressBar(True)`
        """
        if not self.options._show_progress_bar:
            raise Error("compilationTime() needs options.showCompilationProgressBar(True)")
        if self._compilation_seconds is None:
            raise Error(
                "compile the model before obtaining compilation time: call it, or model.compile(*inputs)"
            )
        return timedelta(seconds=self._compilation_seconds)

    def getTensorNames(self) -> list[str]:
        """Return all names that `Options.anchorTensor` accepts. Raises: AssertionError, before compilation"""
        executable = self._plans.executable
        if executable is None:
            raise AssertionError(
                "getTensorNames() needs a compiled model: call it, or model.compile(*inputs), before"
            )
        return list(executable.anchor_names)

    # ---- the latest call ---------------------------------------------------------------------------------

    def getPerfCounters(self) -> dict[str, Times]:
        """Return when inputs and outputs of the latest call were copied: {key: [tensor][micro-batch]}, in seconds.

        "input" and "input_complete": when the copy of a micro-batch's input began and ended; "output" and
        "output_complete": of an output that the output mode keeps. The host's clock has an arbitrary zero.
        """
        return copy.deepcopy(self._latest.counters)

    def getLatency(self) -> Latency:
        """Return (min, max, mean) seconds of the latest call's micro-batches, from first input to last output."""
        return self._latest.latency("input", min, "output_complete")

    def getHostIpuLatency(self) -> Latency:
        """Return (min, max, mean) seconds in which the inputs of a micro-batch were copied, as `getLatency`."""
        return self._latest.latency("input", min, "input_complete")

    def getComputeLatency(self) -> Latency:
        """Return (min, max, mean) seconds from a micro-batch's last input to its first output, as `getLatency`."""
        return self._latest.latency("input_complete", max, "output")

    def getIpuHostLatency(self) -> Latency:
        """Return (min, max, mean) seconds in which the outputs of a micro-batch were copied, as `getLatency`."""
        return self._latest.latency("output", min, "output_complete")

    def getAnchoredTensor(self, short_name: str) -> Tensor:
        """Return the latest call's values of the tensor that `Options.anchorTensor` calls `short_name`: those of
        the micro-batches that the anchor's output mode keeps, concatenated along dimension 0.

        Raises: AssertionError, if the latest call has no such tensor, or there was no call
        """
        known = self._latest.anchored
        if short_name not in known:
            raise AssertionError(
                f"No tensor with name {short_name} found. Known now: {', '.join(known) or 'none'}\n"
                "  fix: options.anchorTensor(short_name, long_name) before wrapping, and call the model"
            )
        return known[short_name]

    @property
    def finished_updates(self) -> int:
        """*Pando*: return the number of weight updates that the latest call has finished; 0 if not attached.

        After an error or Ctrl-C this can be less than `deviceIterations`; the weights include these updates.
        """
        return self._plans.state.updates if self._plans.engine is not None else 0

    @property
    def notes(self) -> list[tuple[Any, Any]]:
        """*Pando*: return (key, value) of each note of forward (`poptorch.notes`) in the latest call. The values of
        micro-batches are concatenated along dimension 0; those of scalars have the shape [micro-batches]."""
        return list(self._latest.notes)

    def cycleCount(self) -> int:
        """Raise Error: there are no cycles to count here."""
        if not self.options._Popart("instrumentWithHardwareCycleCounter"):
            raise Error(
                "Cycle count logging is disabled (options.logCycleCount), and there are no cycles to count here\n"
                "  fix: executor.getPerfCounters() and executor.getLatency() have seconds"
            )
        if self._latest.has_run:
            raise Error(
                "cycleCount() is only supported on actual IPU hardware; getPerfCounters() has seconds"
            )
        raise Error("cycleCount() is for a model that has run: run the model at least once")

    forward = HostForward()

    # ---- as a Python object ------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return module_repr(self._wrapped.user)

    def __reduce__(self) -> Any:
        """Pickle an executor as its model, options and optimizer. Raises Error if it is compiled."""
        if self.isCompiled():
            raise Error(
                "a compiled executor can't be pickled or copied\n"
                "  fix: wrap a copy of its model, copy.deepcopy(executor.model); or write the executor to a file with"
                " save(filename), which poptorch.load reads"
            )
        kind: Any = type(self)
        make = functools.partial(kind, training=self._wrapped.training, optimizer=self._optimizer)
        return make, (self._user_model, self.options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and "_wrapped" not in self.__dict__:
            raise AttributeError(name)  # while the executor is being made
        value = getattr(self.model, name)
        if getattr(value, "__self__", None) is self.model:
            return self._method_of_model(name, value)
        if isinstance(value, nn.Parameter) and name in self._wrapped.user._parameters:
            groupings = None if self.isCompiled() else self.per_replica_params
            return GroupableParameter.wrap(value, name, groupings)
        return value

    def _method_of_model(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of the model that returns the executor where the model's method returns the model, and raises
        Error where it would move the weights to an accelerator."""

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            kind = _device_of_move(name, args, kwargs)
            if kind not in (None, "cpu", "meta"):
                raise Error(
                    f"the weights of an executor stay in the host's memory, and .{name}(...) moves them to {kind!r}\n"
                    f'  fix: options.device("{kind}") before wrapping chooses where the model runs; leave .{name} out'
                )
            result = method(*args, **kwargs)
            return self if result is self.model else result

        return call

    # ---- private names that programs use -----------------------------------------------------------------

    per_replica_params = property(
        attrgetter("_wrapped.per_replica"), doc="By name, what `replicaGrouping` set."
    )
    _executable = property(attrgetter("_plans.executable"))
    _user_model = property(attrgetter("_wrapped.user"))
    _options = property(attrgetter("_wrapped.options"))
    _optimizer = property(attrgetter("_optimizer_link.optimizer"))
    _is_attached = property(isAttachedToDevice)

    def _debugGetPopartIR(self) -> str:
        """Raise Error: there is no PopART graph here."""
        raise Error("_debugGetPopartIR: this implementation has no PopART graph to show")


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
