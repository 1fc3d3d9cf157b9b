"""The executor: a wrapped model that compiles itself at its first call, and runs on its devices.

It turns arguments into batches for the engine and results into outputs. What it has parts for is asked of them: the
lease of its devices, its weights, its optimizer, its latest call.
"""

import contextlib
import functools
import inspect
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, final

from torch import Tensor, nn

from popengine.errors import Error
from popengine.settings import Counts, Settings

from ..annotating.blocks import module_repr
from ..annotating.replica_groups import GroupableParameter, groups_of
from ..compiling import arguments
from ..compiling.compilation_log import announce, progress
from ..compiling.executable import compile_model
from ..compiling.outputs import returned
from ..data.loader import counts_of
from ..enums import ConnectionType
from ..logs import logger, repeats
from ..optim import SGD
from ..options import Options
from ..options.freeze_options import freeze, resolved
from ..reporting.overview import Overview, overview
from ..reporting.planned import exit_if_only_planning
from ..reporting.reporter import reporter_for
from . import executable_file, marked_model
from .device_lease import DeviceLease
from .latest_call import LatestCall, latest_call
from .optimizer_link import OptimizerLink
from .torch_modes import methods_with_torch_modes
from .weight_sync import WeightSync
from .wrapped_model import WrappedModel

P = ParamSpec("P")
R = TypeVar("R")


def _part(name: str, method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """A method that the executor's part of this name has, as a method of the executor."""

    @functools.wraps(method)
    def ask(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(getattr(self, name), *args, **kwargs)

    return ask


class _Function(nn.Module):
    """A plain function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


@final
@methods_with_torch_modes
class PoplarExecutor:
    """A wrapped model. Compiled once, at the first call or `compile`; holds the devices until `destroy`."""

    def __init__(self, model: Any, options: Options | None, *, training: bool, optimizer: Any = None) -> None:
        if options is not None and not isinstance(options, Options):
            raise Error(
                f"Invalid type: 'options' is {type(options)}, expected {Options}\n"
                "  fix: options = poptorch.Options()"
            )
        given = Options() if options is None else options
        model = model if isinstance(model, nn.Module) else _Function(model)
        options = resolved(given, training, model)
        given._freeze()  # what a user sets from now on would reach no model
        repeats.restart(options.max_repeat_logs)
        # Flags of the top level are fixed now; everything below is shared with the user's model.
        self._wrapped = WrappedModel(model, marked_model.shallow_copy(model), options, training)
        self._signature = inspect.signature(self._wrapped.traced.forward)
        self._reporter = reporter_for(self, options, training)
        self._lease = DeviceLease(options, self._reporter)
        self._weights = WeightSync(self._wrapped, self._lease, self._reporter, weakref.ref(self))
        self._optimizer_link = OptimizerLink(self._wrapped, self._lease)
        self._latest = LatestCall()
        self._synthetic: list[Tensor] | None = None
        self._compiled_mode: bool | None = None  # of the user's model; None: not compiled, or not called yet
        self._has_warned_of_mode = False
        self._told_methods: set[str] = set()
        self._compilation_seconds: float | None = None
        if training:
            marked_model.check_buffers(model)
            self.setOptimizer(SGD(model.parameters(), lr=0.01) if optimizer is None else optimizer)
            marked_model.mark(model, self)

    forward = marked_model.HostForward()

    # ---- calling -----------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one combined batch: all device iterations. Compiles at the first call.

        Raises:
            Error: the model can't be compiled, the batch is not what was compiled for, or the run failed;
                the weights are then those of the last finished update (see `finished_updates`), and the model can be
                called again
        """
        assert self.options.connection_type != ConnectionType.Never, (
            "Trying to run a model on an offline device (ConnectionType.Never)\n"
            "  fix: use model.compile(...) or compileAndExport(...) only, or another connection type"
        )
        call = arguments.bind(self._signature, args, kwargs)
        arguments.check_kinds(call)
        lease = self._lease
        first = lease.executable is None
        if first:
            self._compile(call)
        executable = lease.need_executable()
        executable.inputs.check(call)
        if lease.engine is None:
            self.attachToDevice()
        if not self._wrapped.training:
            self._weights.refresh()
        self._weights.check_host()
        self._warn_of_mode()
        self._optimizer_link.check_unused()
        self._optimizer_link.upload()
        recorder = self._reporter.recorder if self._reporter is not None else None
        try:
            results = lease.need_engine().run(self._inputs(call), self._optimizer_link.hyper, recorder)
        except Exception:
            # It may be these inputs that do not fit, and the model is not to be bound to them.
            if first and not self.finished_updates:
                self._forget_executable()
            raise
        if self._reporter is not None:
            self._reporter.called()
        made_up = None if self._synthetic is None else len(self._synthetic)
        self._latest = latest_call(executable, results, made_up)
        arguments.write_back(call, executable.plan.partition.signature, results.inputs())
        outputs = results.outputs()[: executable.outputs]
        return returned(executable.template, outputs)

    def _warn_of_mode(self) -> None:
        """Warn once of `train()` or `eval()` of the trained model that came after its compilation."""
        mode = self._user_model.training
        if self._compiled_mode is None:
            self._compiled_mode = mode
        elif mode != self._compiled_mode and self._wrapped.training and not self._has_warned_of_mode:
            self._has_warned_of_mode = True
            logger.warning(
                "the model is in %s() mode now, and was compiled in %s() mode, in which this call trains it\n"
                "  fix: set the mode before the first call, or call destroy() on the executor; wrap the model with"
                " poptorch.inferenceModel to evaluate it",
                *(("train", "eval") if mode else ("eval", "train")),
            )

    def _inputs(self, call: arguments.BoundCall) -> list[Tensor]:
        mode = self.options._Popart.options.get("syntheticDataMode", 0)
        if mode and self._synthetic is not None:
            return self._synthetic
        executable = self._lease.need_executable()
        tensors = arguments.prepared(call, executable.inputs.wide)
        if mode:
            tensors = self._synthetic = arguments.synthetic_inputs(tensors, mode, executable.settings.counts)
        return tensors

    # ---- compiling ---------------------------------------------------------------------------------------

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile for these arguments, the same as those of a call, and load the weights; runs nothing."""
        if self.isCompiled():
            logger.warning("Call to compile() ignored: the model is compiled already")
            return
        self._compile(arguments.bind(self._signature, args, kwargs))

    isCompiled = _part("_lease", DeviceLease.isCompiled)

    def _compile(self, call: arguments.BoundCall) -> None:
        if self._wrapped.training and marked_model.owner_of(self._user_model) is not self:  # after destroy()
            marked_model.check_not_wrapped(self._user_model)
            marked_model.mark(self._user_model, self)
        options, model = self.options, self._wrapped.traced
        settings = self._settings_for(call, options)
        started = time.perf_counter()
        if self._reporter is not None:
            self._reporter.compiling()
        passed = self._reporter.passed if self._reporter is not None else None
        with progress(options._show_progress_bar, passed) as done:
            with arguments.noting_row_counts(call):
                found = compile_model(model, call, options, settings, done, together=True)
            announce(found.plan, found.settings)
            exit_if_only_planning(found.plan, found.settings, found.graph)
            self._lease.executable = found
            try:
                if options.connection_type != ConnectionType.Never:
                    self.attachToDevice()
            except BaseException:
                self._lease.executable = None
                raise
            self._compiled_mode = self._user_model.training
            executable_file.leave_in_folder(found, options, self.per_replica_params)
            done("load")
        self._compilation_seconds = time.perf_counter() - started

    def _settings_for(self, call: arguments.BoundCall, options: Options) -> Settings:
        """What to compile with. Raises: Error or AssertionError, where arguments or options do not fit."""
        model, training = self._wrapped.traced, self._wrapped.training
        groups = groups_of(model, self.per_replica_params, options.replication_factor)
        settings = freeze(options, training, self._optimizer_link.frozen if training else None, groups)
        arguments.check_kinds(call)
        self._warn_of_other_counts(call, settings.counts)
        arguments.check_batch(call, settings.counts)
        arguments.warn_about(call, arguments.is_wide(model))
        options._Popart.check_names()
        self._wrapped.updatable_buffers()
        return settings

    def _warn_of_other_counts(self, call: arguments.BoundCall, counts: Counts) -> None:
        """Warn of inputs that a loader has made for other options than the model's."""
        for tensor in call.tensors:
            loaded = counts_of(tensor)
            names = ("iterations", "accumulation", "groups")
            if loaded is not None and any(getattr(loaded, n) != getattr(counts, n) for n in names):
                logger.warning(
                    "the DataLoader and the model have different options: batches are loaded for %s, and the model"
                    " reads them as %s\n"
                    "  fix: give poptorch.DataLoader the options of the model that it loads for",
                    arguments.factors(loaded),
                    arguments.factors(counts),
                )
                return

    @property
    def plan(self) -> Overview:
        """What runs: stages, ipus, parameters, the bytes between them, the schedule and the code. Print it, or let
        a notebook show it; `poptorch.describe` makes one before the first call.
        """
        executable = self._lease.need_executable()
        return overview(executable.plan, executable.settings, executable.graph)

    def _described(self, options: Options | None, *args: Any, **kwargs: Any) -> Overview:
        """Return what `plan` would be after a call with these arguments, and with these options in place of the
        executor's own, if there are any; nothing is kept of the compilation."""
        options = (
            self.options if options is None else resolved(options, self._wrapped.training, self._user_model)
        )
        call = arguments.bind(self._signature, args, kwargs)
        settings = self._settings_for(call, options)
        found = compile_model(self._wrapped.traced, call, options, settings, lambda name: None)
        return overview(found.plan, found.settings, found.graph)

    # ---- devices -----------------------------------------------------------------------------------------

    def attachToDevice(self) -> None:
        """Take the devices: start their threads, upload weights, optimizer state and the random state."""
        self._lease.check_free()
        weights = self._weights.begin()
        self._optimizer_link.join()
        self._lease.take(weights)

    isAttachedToDevice = _part("_lease", DeviceLease.isAttachedToDevice)

    def detachFromDevice(self) -> None:
        """Release the devices; weights, optimizer state and the random state stay on the host."""
        self._lease.need_executable()
        if self._lease.engine is None:
            raise Error("Device is not attached")
        self._let_go()

    def _let_go(self) -> None:
        if self._wrapped.training and not self._lease.forked:
            self.copyWeightsToHostIfNeeded()
        self._lease.let_go()

    def destroy(self) -> None:
        """Free the devices and the compiled program; the user's model is plain again, with its weights."""
        if not self.isCompiled():
            return
        if self.isAttachedToDevice():
            self._let_go()
        self._optimizer_link.release()  # while it is known what its state is the state of
        self._forget_executable()
        self._unmark()

    def _forget_executable(self) -> None:
        if self.isAttachedToDevice():
            self._let_go()
        self._lease.executable = self._synthetic = self._compiled_mode = None
        self._latest = LatestCall()

    def _unmark(self) -> None:
        # While an executor dies its model sees no owner any more.
        if self._wrapped.training and marked_model.owner_of(self._user_model) in (self, None):
            marked_model.unmark(self._user_model)

    def _release(self) -> None:
        """Leave nothing of this executor behind."""
        self.destroy()
        self._optimizer_link.release()
        self._unmark()

    def __del__(self) -> None:
        # Nobody can ask for newer weights from now on: leave them with the model. At the interpreter's exit
        # parts of torch may be gone already.
        with contextlib.suppress(Exception):
            self._release()

    @property
    def finished_updates(self) -> int:
        """*Ours*: the weight updates that the latest call has finished: fewer than `deviceIterations` after an error or
        Ctrl-C. The weights are those after the last of them."""
        return self._lease.engine.updates_done if self._lease.engine is not None else 0

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

    # ---- weights and optimizer ---------------------------------------------------------------------------

    copyWeightsToHost = _part("_weights", WeightSync.copyWeightsToHost)
    copyWeightsToDevice = _part("_weights", WeightSync.copyWeightsToDevice)
    copyNamedBuffersToDevice = _part("_weights", WeightSync.copyNamedBuffersToDevice)
    averageRunningStatistics = _part("_weights", WeightSync.averageRunningStatistics)
    hostWeightsChanged = _part("_weights", WeightSync.hostWeightsChanged)
    setOptimizer = _part("_optimizer_link", OptimizerLink.setOptimizer)

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Copy the weights to the host if the devices have newer ones; whether they had."""
        is_stale = self._weights.stale
        if is_stale:
            self.copyWeightsToHost()
        return is_stale

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The user model's, with the newest weights."""
        return self._user_model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
        """Load into the user's model, and upload if attached; returns missing and unexpected keys."""
        self.copyWeightsToHostIfNeeded()  # what the dictionary lacks keeps its newest value
        keys = self._user_model.load_state_dict(state_dict, strict)
        if self.isAttachedToDevice():
            self.copyWeightsToDevice()
        return keys

    # ---- files -------------------------------------------------------------------------------------------

    def compileAndExport(self, filename: str, *args: Any, export_model: bool = True, **kwargs: Any) -> None:
        """`compile` for these arguments, then `save`."""
        self.compile(*args, **kwargs)
        self.save(filename, export_model=export_model)

    def save(self, filename: str, export_model: bool = True, save_rng_state: bool = True) -> None:
        """Write the compiled model, its options, its state and (export_model) the model with its optimizer.

        Raises:
            AssertionError: the file's folder is a file
        """
        executable = self._lease.need_executable()
        self.copyWeightsToHostIfNeeded()
        saved = executable_file.Saved(
            executable.without_graph(),
            self.options,
            self._wrapped.training,
            self._user_model if export_model else None,
            self._optimizer if export_model else None,
            self._lease.to_keep(save_rng_state, whole=True),
            self.per_replica_params,
        )
        executable_file.write(filename, saved)

    def loadExecutable(self, filename: str) -> None:
        """Take over what was compiled for the same model and options, and its optimizer and random state.

        Raises:
            Error: no such file, one of another version, or one of another model
        """
        try:
            saved = executable_file.read(filename)
        except AssertionError as error:
            raise Error(str(error)) from error
        executable_file.check_fits(filename, saved, self._wrapped)
        self.destroy()
        self._restore(saved)

    def _restore(self, saved: executable_file.Saved) -> None:
        if self._wrapped.training and marked_model.owner_of(self._user_model) is not self:
            marked_model.mark(self._user_model, self)
        self._lease.executable, self._lease.kept = saved.executable, saved.kept
        self.per_replica_params.clear()
        self.per_replica_params.update(saved.per_replica_params)
        if self.options.connection_type == ConnectionType.Always:
            self.attachToDevice()

    # ---- answers -----------------------------------------------------------------------------------------

    @property
    def model(self) -> Any:
        """The user's model; of an executor for inference, its own copy of the top level: weights and parts are
        shared, and its flags are what forward finds when it is compiled."""
        return self._user_model if self._wrapped.training else self._wrapped.traced

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the model (in training: of its parts; what forward finds at the top is as at wrapping).

        The compilation has the modes of its moment for good; afterwards this is a warning, until `destroy`.
        """
        if self.isCompiled():
            logger.warning("train() and eval() come too late: the model is compiled, and its mode with it")
        self.model.train(mode)
        self._compiled_mode = None
        return self

    def eval(self) -> Self:
        """`train(False)`."""
        return self.train(False)

    @property
    def options(self) -> Options:
        """The executor's own frozen options, with an output mode picked."""
        return self._wrapped.options

    @property
    def memory_format(self) -> str:
        """*Ours*: the layout of the compiled model's convolutions, "preserve" or "channels_last": what "auto" chose.

        Raises: Error, before compilation.
        """
        return self._lease.need_executable().memory_format

    getPerfCounters = _part("_latest", LatestCall.getPerfCounters)
    getLatency = _part("_latest", LatestCall.getLatency)
    getHostIpuLatency = _part("_latest", LatestCall.getHostIpuLatency)
    getComputeLatency = _part("_latest", LatestCall.getComputeLatency)
    getIpuHostLatency = _part("_latest", LatestCall.getIpuHostLatency)
    getAnchoredTensor = _part("_latest", LatestCall.getAnchoredTensor)

    def compilationTime(self) -> timedelta:
        """How long the compilation took."""
        if not self.options._show_progress_bar:
            raise Error("compilationTime() needs options.showCompilationProgressBar(True)")
        if self._compilation_seconds is None:
            raise Error(
                "compile the model before obtaining compilation time: call it, or model.compile(*inputs)"
            )
        return timedelta(seconds=self._compilation_seconds)

    def cycleCount(self) -> int:
        """Refused: there are no cycles to count here."""
        if not self.options._Popart.options.get("instrumentWithHardwareCycleCounter"):
            raise Error("Cycle count logging is disabled\n  fix: options.logCycleCount(True)")
        if self._latest.has_run:
            raise Error(
                "cycleCount() is only supported on actual IPU hardware; getPerfCounters() has seconds"
            )
        raise Error("cycleCount() is for a model that has run: run the model at least once")

    def getTensorNames(self) -> list[str]:
        """The names of tensors, all of which `Options.anchorTensor` takes."""
        executable = self._executable
        assert executable is not None, (
            "getTensorNames() needs a compiled model: call it, or model.compile(*inputs), before"
        )
        return list(executable.anchors.names)

    @property
    def notes(self) -> list[tuple[Any, Any]]:
        """What the forward has noted (`poptorch.notes`), with the latest call's values."""
        return list(self._latest.notes)

    def __repr__(self) -> str:
        return module_repr(self._user_model)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and "_wrapped" not in self.__dict__:
            raise AttributeError(name)  # while the executor is being made
        value = getattr(self.model, name)
        if name not in self._told_methods:
            self._told_methods.add(name)
            marked_model.announce_host_method(self.model, name, value)
        if isinstance(value, nn.Parameter) and name in self._user_model._parameters:
            groupings = None if self.isCompiled() else self.per_replica_params
            return GroupableParameter.of(value, name, groupings)
        return value

    def __reduce__(self) -> Any:
        """An executor that is not compiled pickles as what it was made of."""
        if self.isCompiled():
            raise Error("a compiled executor can't be pickled\n  fix: write it to a file with save(filename)")
        make = functools.partial(PoplarExecutor, training=self._wrapped.training, optimizer=self._optimizer)
        return make, (self._user_model, self.options)

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
