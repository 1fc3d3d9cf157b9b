"""The executor: a wrapped model, which its first call compiles and attaches to its devices. A call:

    bind the arguments ─► split into runs ─► for each run: find or compile its plan, engine.run ─► outputs

Its parts: calls (`calls.py`), compilation and modes (`compilation.py`), plans and engines (`loaded_plans.py`), the
optimizer (`optimizer_link.py`), the model (`wrapped_model.py`), files (`executable_file.py`).
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from datetime import timedelta
from operator import attrgetter
from typing import Any, Self, final

from torch import Tensor

from popengine.compile.recording.user_code import user_line
from popengine.errors import Error, without_internal_frames
from popengine.run.instances.connections import InstancesDiffer, PeerFailed, PeerLost
from popengine.run.instances.process_group import current
from popengine.settings import Counts

from ..annotating.blocks import module_repr
from ..compiling.compilation_log import Overview
from ..logs import logger
from ..options import Options
from . import executable_file, wrapped_model
from .calls import Calls, Latency, LatestCall, Times, run_methods_outside_inference_mode
from .compilation import Compilation
from .loaded_plans import LoadedPlans
from .optimizer_link import OptimizerLink, default_optimizer


@final
@without_internal_frames
@run_methods_outside_inference_mode
class PoplarExecutor:
    """A wrapped model, which `trainingModel`, `inferenceModel` and `load` return. Call it like the model.

    >>> trainer = poptorch.trainingModel(model, options, optimizer)
    >>> loss = trainer(images, labels)  # the first call compiles the model
    >>> trainer.setOptimizer(optimizer)  # after a change of the learning rate
    >>> trainer.save("trainer.poptorch")
    """

    def __init__(self, model: Any, options: Options | None, *, training: bool, optimizer: Any = None) -> None:
        with _failing_together(options, training):
            self._wrapped = wrapped = wrapped_model.wrap(model, options, training)
            self._plans = LoadedPlans(wrapped.options, wrapped.user)
            if wrapped.options.Distributed.instances_per_replica > 1:
                wrapped_model.share_out(wrapped.user, self._plans)
            self._optimizer_link = OptimizerLink(wrapped, self._plans)
            self._compilation = Compilation(wrapped, self._plans, self._optimizer_link)
            self._calls = Calls(self._compilation)
            self._lock = threading.RLock()  # calls in several threads run one by one
            self._host_weights_version = 0  # calls of `copyWeightsToHost`; programs for PopTorch read it
            if training:
                wrapped_model.check_buffer_classes(wrapped.user)
                self.setOptimizer(default_optimizer(wrapped.user) if optimizer is None else optimizer)
                self._mark_model()

    def _mark_model(self) -> None:
        """Mark the model as one that this executor trains; `destroy` removes the mark."""
        if self._wrapped.training:
            wrapped_model.mark_model(self._wrapped.user, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on one combined batch (all device iterations), and return its outputs.

        The first call compiles the model; with `Options.allowNewShapes` so does a call with new shapes.

        Raises:
            AssertionError: the connection type is Never, or forward's signature or a batch size doesn't fit
            Error: the model can't be compiled, the batch is not what was compiled for, or the run failed;
                the weights are then those of the last finished update (see `finished_updates`), and the model
                can be called again
        """
        with self._lock, _failing_together(self.options, self._wrapped.training):
            if not self._plans.loaded:
                self._mark_model()
            return self._calls.run(args, kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the model for these arguments; attach it to devices, unless the connection type is Never.

        Nothing runs. If the model is compiled already, without `allowNewShapes`, this only logs a warning.
        """
        if self.isCompiled() and not self._compilation.most_plans:
            logger.warning("Call to compile() ignored: the model is compiled already")
            return
        with self._lock, _failing_together(self.options, self._wrapped.training):
            self._mark_model()
            for run in self._calls.split(self._calls.bind(args, kwargs)):
                if self._plans.find_plan(run) is None:
                    self._compilation.compile(run)

    # ---- devices -----------------------------------------------------------------------------------------

    def attachToDevice(self) -> None:
        """Start the devices' threads.

        A model from a file is compiled and attached at its first call: until then this does nothing.

        Raises: Error, if the model is not compiled, or is attached already; AssertionError for ConnectionType.Never
        """
        if not self._plans.waits_for_first_call:
            with _failing_together(self.options, self._wrapped.training):
                self._compilation.attach()

    def detachFromDevice(self) -> None:
        """Release the devices. The state stays. If a replica spans several processes, each gets all weights, so all
        must call this or `destroy`. Raises: Error, if the model is not compiled or not attached"""
        if self._plans.waits_for_first_call:
            return
        self._plans.require_executable()
        if self._plans.engine is None:
            raise Error("Device is not attached\n  fix: leave this call out")
        self._plans.fill_elsewhere()
        self._plans.detach()

    def destroy(self) -> None:
        """Free devices and plans. Afterwards the model is an ordinary module, and the next call compiles again. If a
        replica spans several processes, each gets all weights, as by `detachFromDevice`."""
        try:
            self._plans.fill_elsewhere()
        except Error as error:
            logger.warning("the weights of other processes' ipus could not be read: %s", error)
        self._release()

    def _release(self) -> None:
        self._compilation.release()
        self._calls.latest = LatestCall()
        if wrapped_model.executor_of(self._user_model) in (self, None):  # None already when `__del__` runs
            wrapped_model.unmark_model(self._user_model)

    def __del__(self) -> None:
        # At the interpreter's exit the globals of this module and parts of torch may be None already.
        try:  # noqa: SIM105
            self._release()
        except Exception:
            pass

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
        if not self._plans.waits_for_first_call:
            engine = self._plans.require_engine()
            engine.state.bind()
            engine.state.train_state.move_to_host()
            self._plans.fill_elsewhere()
        self._host_weights_version += 1

    def copyWeightsToDevice(self) -> None:
        """Check that the model is attached, and its weights. Each call uses the model's current weights.

        Raises: Error, if the model is not compiled or not attached, or its weights do not fit any more
        """
        if not self._plans.waits_for_first_call:
            self._plans.require_engine().state.bind()

    def copyNamedBuffersToDevice(self) -> None:
        """Check `Options.updatableNamedBuffers`. Each call uses the model's current buffers.

        Raises: Error, if the option names none, or the model is not compiled or not attached
        """
        self._plans.require_engine()
        self._wrapped.updatable_buffers(are_needed=True)

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Copy the weights to the host if an accelerator has them, as `copyWeightsToHost`; return whether one had."""
        return self._plans.engine is not None and self._plans.engine.state.train_state.move_to_host()

    def averageRunningStatistics(self) -> None:
        """*Pando*: replace running statistics by their mean over the replicas of all instances.

        Each replica processes different rows, and the model has the buffers of this instance's first replica: call this
        before a validation or a checkpoint, in all instances. It averages floating point buffers that forward changes.

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
        self._require_state()
        return list(self._plans.random_state)

    @rng_state.setter
    def rng_state(self, state: list[int]) -> None:
        self._require_state()
        self._plans.random_state = state

    def _require_state(self) -> None:
        """Raise Error before compilation, unless the state is that of a file."""
        if not self._plans.waits_for_first_call:
            self._plans.require_executable()

    # ---- the model and its compilation -------------------------------------------------------------------

    @property
    def model(self) -> Any:
        """Return the user's model; in inference a shallow copy, which shares weights and submodules. Forward
        is compiled with the flags of this copy, such as `training`."""
        return self._wrapped.user if self._wrapped.training else self._compilation.flags.own_model

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the model and its submodules, and return the executor.

        In training these are the user's, but the top-level module is compiled in the mode that it had when it was
        wrapped. In inference they are the executor's own. Compilation fixes all modes: a later `train` logs a
        warning, and calls compute as before, until `destroy`.
        """
        if self._compilation.flags.set_mode(mode) and self.isCompiled():
            logger.warning(
                "%s: train() and eval() come too late: the model is compiled, and its mode with it\n"
                "  fix: set the mode before the first call; or destroy(), then the mode, and call again",
                user_line(),
            )
        return self

    def eval(self) -> Self:
        """Set evaluation mode, as `train(False)`; return the executor."""
        return self.train(False)

    @property
    def options(self) -> Options:
        """Return the executor's frozen copy of the options, with the default output mode resolved."""
        return self._wrapped.options

    @property
    def plan_count(self) -> int:
        """Return the number of plans that the executor holds: one for each combination of shapes and of the values that
        forward reads, if they change its graph. 0 before compilation."""
        return len(self._plans.loaded)

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
        if self._compilation.seconds is None:
            raise Error(
                "compile the model before obtaining compilation time: trainer(*batch), or trainer.compile(*batch)"
            )
        return timedelta(seconds=self._compilation.seconds)

    def getTensorNames(self) -> list[str]:
        """Return all names that `Options.anchorTensor` accepts. Raises: AssertionError, before compilation"""
        if not self.isCompiled():
            raise AssertionError(
                "getTensorNames() needs a compiled model: trainer(*batch), or trainer.compile(*batch)"
            )
        return list(self._executable.anchor_names)

    # ---- the latest call ---------------------------------------------------------------------------------

    def getPerfCounters(self) -> dict[str, Times]:
        """Return when inputs and outputs of the latest call were copied: {key: [tensor][micro-batch]}, in seconds.

        "input" and "input_complete": when the copy of a micro-batch's input began and ended; "output" and
        "output_complete": of an output that the output mode keeps. The host's clock has an arbitrary zero.
        """
        return self._calls.latest.counters()

    def getLatency(self) -> Latency:
        """Return (min, max, mean) seconds of the latest call's micro-batches, from first input to last output."""
        return self._calls.latest.latency("input", min, "output_complete")

    def getHostIpuLatency(self) -> Latency:
        """Return (min, max, mean) seconds in which the inputs of a micro-batch were copied, as `getLatency`."""
        return self._calls.latest.latency("input", min, "input_complete")

    def getComputeLatency(self) -> Latency:
        """Return (min, max, mean) seconds from a micro-batch's last input to its first output, as `getLatency`."""
        return self._calls.latest.latency("input_complete", max, "output")

    def getIpuHostLatency(self) -> Latency:
        """Return (min, max, mean) seconds in which the outputs of a micro-batch were copied, as `getLatency`."""
        return self._calls.latest.latency("output", min, "output_complete")

    def getAnchoredTensor(self, short_name: str) -> Tensor:
        """Return the latest call's values of the tensor that `Options.anchorTensor` calls `short_name`: those of
        the micro-batches that the anchor's output mode keeps, concatenated along dimension 0.

        Raises: AssertionError, if the latest call has no such tensor, or there was no call
        """
        anchored = self._calls.latest.anchored
        if short_name not in anchored:
            raise AssertionError(
                f"No tensor with name {short_name} found. Known now: {', '.join(anchored) or 'none'}\n"
                "  fix: options.anchorTensor(short_name, long_name) before wrapping, and call the model"
            )
        return anchored[short_name]

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
        return list(self._calls.latest.notes)

    def cycleCount(self) -> int:
        """Raise Error: there are no cycles to count here."""
        if not self.options._Popart("instrumentWithHardwareCycleCounter"):
            raise Error(
                "Cycle count logging is disabled (options.logCycleCount), and there are no cycles to count here\n"
                "  fix: executor.getPerfCounters() and executor.getLatency() have seconds"
            )
        why = "for a model that has run: run the model at least once"
        if self._compilation.calls:
            why = "only supported on actual IPU hardware; getPerfCounters() has seconds"
        raise Error(f"cycleCount() is {why}")

    forward = wrapped_model.HostForward()

    def __repr__(self) -> str:
        return module_repr(self._wrapped.user)

    @without_internal_frames
    def __reduce__(self) -> Any:
        """Pickle an executor as its model, options and optimizer. Raises Error if it is compiled."""
        if self.isCompiled():
            raise Error(
                "a compiled executor can't be pickled or copied\n"
                "  fix: wrap a copy of its model, copy.deepcopy(executor.model); or save(filename) and poptorch.load"
            )
        cls: Any = type(self)
        make = functools.partial(cls, training=self._wrapped.training, optimizer=self._optimizer)
        return make, (self._user_model, self.options)

    @without_internal_frames
    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and "_wrapped" not in self.__dict__:
            raise AttributeError(name)  # while the executor is being made
        return wrapped_model.attribute_of_model(self, name)

    # ---- private names that programs use -----------------------------------------------------------------

    per_replica_params = property(attrgetter("_wrapped.per_replica"))  # by name, what `replicaGrouping` set
    _executable = property(attrgetter("_plans.executable"))
    _user_model = property(attrgetter("_wrapped.user"))
    _options = property(attrgetter("_wrapped.options"))
    _optimizer = property(attrgetter("_optimizer_link.optimizer"))
    _is_attached = property(isAttachedToDevice)

    def _debugGetPopartIR(self) -> str:
        """Raise Error: there is no PopART graph here."""
        raise Error("_debugGetPopartIR: this implementation has no PopART graph to show")

    # ---- files -------------------------------------------------------------------------------------------

    def compileAndExport(self, filename: str, *args: Any, export_model: bool = True, **kwargs: Any) -> None:
        """Compile the model for these arguments, as `compile`, and write a file, as `save`."""
        self.compile(*args, **kwargs)
        self.save(filename, export_model=export_model)

    def save(self, filename: str, export_model: bool = True, save_rng_state: bool = True) -> None:
        """Write the model, its options and its state to a file, or to `model.poptorch` in a folder. If a replica spans
        several processes, all must call this, each with a file of its own.

        Args:
            export_model:   also write the user's model and its optimizer, for `poptorch.load`
            save_rng_state: also write the random state
        Raises:
            AssertionError: the file's folder is a file
            Error: the model is not compiled, or can't be pickled
        """
        self._require_state()
        executable_file.write_file(filename, executable_file.saved(self, export_model, save_rng_state))

    def loadExecutable(self, filename: str) -> None:
        """Load the optimizer state and the random state that `save` wrote for the same model.

        Frees the plans of this executor first. Its next call compiles the model, and attaches it to its devices.

        Raises: Error, if the file is missing or damaged, or of another version, mode, model or optimizer
        """
        saved = executable_file.read_file_for(filename, self)
        self.destroy()
        self._restore(saved)

    def _restore(self, saved: executable_file.SavedExecutor) -> None:
        """Load the state of a file into an executor that has no plans."""
        self._mark_model()
        self._plans.load(saved.state)
        self.per_replica_params.clear()
        self.per_replica_params.update(saved.per_replica_params)
        self._plans.has_file_state = True


@contextlib.contextmanager
def _failing_together(options: Options | None, training: bool) -> Iterator[None]:
    """After an error inside the `with`, let the processes that run the model with this one raise an error, too."""
    counts = options._counts() if isinstance(options, Options) else Counts()
    group = current() if counts.parts > 1 or (training and counts.instances > 1) else None
    number = -1 if group is None else group.number
    try:
        yield
    except Exception as error:  # after Ctrl-C the engine has told the others, unless the call is whole
        if group is not None and not isinstance(error, (PeerFailed, PeerLost, InstancesDiffer)):
            group.abort(f"failed: {error or type(error).__name__}", number)
        raise
