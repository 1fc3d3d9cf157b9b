"""`trainingModel`, `inferenceModel` and the executor behind both: compiles a model at its first call, runs it.

The executor turns the user's arguments into batches for the engine and its results into the user's outputs.
Its other concerns have files of their own: weights, optimizing, counters, anchors, saving, caching.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from tqdm import tqdm

from popengine.errors import Error
from popengine.settings import Settings

from ..annotating.replica_groups import groups_of
from ..compiling import executable_cache
from ..compiling.compilation_log import Passes, announce
from ..compiling.executable import compile_model
from ..enums import ConnectionType
from ..optim import SGD
from ..optim.guard import OptimizerGuard
from ..options import Options
from ..options.freeze_options import freeze, resolved
from ..reporting.logs import logger, repeats
from ..reporting.overview import Overview, overview
from ..reporting.reporter import reporter_for
from ..reporting.tracebacks import face, shown_at_the_users_lines
from . import arguments, marked_model, saved_file
from .inquiries import Inquiries
from .latest_call import LatestCall, latest_call
from .synthetic_data import synthetic_inputs
from .training_state import TrainingStateOwner

_PASSES = ("capture", "partition", "schedule", "lower", "load")


@shown_at_the_users_lines
def trainingModel(
    model: nn.Module | PoplarExecutor, options: Options | None = None, optimizer: Any = None
) -> PoplarExecutor:
    """Wrap a model whose forward computes a loss: calling it trains it.

    Args:
        optimizer: poptorch.optim's or torch.optim's; by default poptorch.optim.SGD with lr 0.01
    Raises:
        RuntimeError: the model is wrapped for training already
    """
    model = model._user_model if isinstance(model, PoplarExecutor) else model
    _check_not_wrapped(model)
    return PoplarExecutor(model, options, training=True, optimizer=optimizer)


@shown_at_the_users_lines
def inferenceModel(
    model: nn.Module | PoplarExecutor | Callable[..., Any], options: Options | None = None
) -> PoplarExecutor:
    """Wrap a model, or a function of tensors: calling it runs its forward."""
    model = model._user_model if isinstance(model, PoplarExecutor) else model
    return PoplarExecutor(model, options, training=False)


@shown_at_the_users_lines
def load(filename: str, edit_opts_fn: Callable[[Options], Any] | None = None) -> PoplarExecutor:
    """Build an executor from a file that `save` or `compileAndExport` wrote, and restore its state.

    The file is a pickle: load only files that you trust.

    Args:
        edit_opts_fn: may change the options before they are used
    Raises:
        AssertionError: no such file, one of another version, or one without the model
    """
    saved = saved_file.read(filename)
    assert saved.model is not None, (
        f"{filename} holds no model (export_model=False)\n"
        "  fix: wrap the model as it was wrapped then, and call loadExecutable(filename)"
    )
    options = saved.options
    if edit_opts_fn is not None:
        edit_opts_fn(options)
    executor = PoplarExecutor(saved.model, options, training=saved.training, optimizer=saved.optimizer)
    executor._restore(saved)
    return executor


@shown_at_the_users_lines
def describe(
    model: nn.Module | PoplarExecutor,
    options: Options | None = None,
    batch: Any = (),
    *,
    training: bool = True,
) -> Overview:
    """What would run: captures and cuts the model as its first call would, and loads nothing. (Not in PopTorch.)

    >>> print(poptorch.describe(model, options, (images, labels)))

    Args:
        model:    a module, or an executor, which has its own options and whether it trains
        batch:    a combined batch, as for a call: one tensor, a tuple or list of arguments, or a dictionary of them
        training: for a module: compile what `trainingModel` would, else what `inferenceModel` would
    Raises:
        Error: the model can't be compiled for such a batch
    """
    owner = model if isinstance(model, PoplarExecutor) else marked_model.owner_of(model) if training else None
    made = None
    if owner is None:
        options = None if options is None else options.clone()
        owner = made = PoplarExecutor(model, options, training=training)
    kwargs = batch if isinstance(batch, dict) else {}
    args = tuple(batch) if isinstance(batch, tuple | list) else () if kwargs else (batch,)
    try:
        return owner._described(arguments.bind(owner._signature, args, kwargs))
    finally:
        if made is not None:
            made._release_optimizer()
            made._unmark()


def _check_not_wrapped(model: Any) -> None:
    if marked_model.owner_of(model) is not None:
        raise RuntimeError(
            "this model has already been wrapped in 'poptorch.trainingModel'\n"
            "  fix: call model.destroy() to unwrap it first"
        )


class _Function(nn.Module):
    """A plain function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


@face
class PoplarExecutor(TrainingStateOwner, Inquiries):
    """A wrapped model. Compiled once, at the first call or `compile`; holds the devices until `destroy`."""

    def __init__(self, model: Any, options: Options | None, *, training: bool, optimizer: Any = None) -> None:
        if options is not None and not isinstance(options, Options):
            raise Error(
                f"Invalid type: 'options' is {type(options)}, expected {Options}\n"
                "  fix: options = poptorch.Options()"
            )
        options = Options() if options is None else options
        self._options = resolved(options, training)
        repeats.restart(self._options.max_repeat_logs)
        options._freeze()
        self._training = training
        self._user_model = model if isinstance(model, nn.Module) else _Function(model)
        # Flags of the top level are fixed now; everything below is shared with the user's model.
        self._model = marked_model.shallow_copy(self._user_model)
        self._signature = inspect.signature(self._model.forward)
        self._executable = self._engine = self._compilation_seconds = None
        self._host_weights_version, self._seen_version = 0, None
        self._kept_rng = self._kept_state = self._kept_buffers = None
        self._kept_factor = 1.0
        self._optimizer = self._hyper = self._link = None
        self._loaded_states, self._host_writes = {}, []
        self._reporter = reporter_for(self, self._options, training)
        self._latest, self._synthetic = LatestCall(), None
        self.per_replica_params = {}
        if training:
            marked_model.check_buffers(self._user_model)
            scaling = bool(self._options._Popart.options.get("automaticLossScalingSettings.enabled", False))
            self._guard = OptimizerGuard(self._options._relax_optimizer_checks, scaling)
            if optimizer is None:
                optimizer = SGD(self._user_model.parameters(), lr=0.01)
            self.setOptimizer(optimizer)
            marked_model.mark(self._user_model, self)

    # ---- calling -----------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one combined batch: all device iterations. Compiles at the first call.

        Raises:
            Error: the model can't be compiled, the batch is not what was compiled for, or the run failed;
                weights are then as before the call, and the model can be called again
        """
        assert self._options.connection_type != ConnectionType.Never, (
            "Trying to run a model on an offline device (ConnectionType.Never)\n"
            "  fix: use model.compile(...) or compileAndExport(...) only, or another connection type"
        )
        call = arguments.bind(self._signature, args, kwargs)
        arguments.check_kinds(call)
        first = self._executable is None
        if self._executable is None:
            self._compile(call)
        executable = self._need_executable()
        executable.inputs.check(call)
        if self._engine is None:
            self.attachToDevice()
        if not self._training:
            self._refresh_from_trainer()
        self._upload_pending_state()
        recorder = self._reporter.recorder if self._reporter is not None else None
        try:
            results = self._need_engine().run(self._inputs(call), self._hyper, recorder)
        except Exception:
            if first:  # it may be these inputs that do not fit, and the model is not to be bound to them
                self._forget_executable()
            raise
        made_up = None if self._synthetic is None else len(self._synthetic)
        self._latest = latest_call(executable, results, made_up)
        arguments.write_back(call, executable.plan.partition.signature, results.inputs())
        outputs = results.outputs()[: executable.outputs]
        return arguments.returned(executable.template, [_marked_as_output(value) for value in outputs])

    def _inputs(self, call: arguments.Call) -> list[Tensor]:
        mode = self._options._Popart.options.get("syntheticDataMode", 0)
        if not mode:
            return arguments.prepared(call, self._need_executable().inputs.wide)
        if self._synthetic is None:
            executable = self._need_executable()
            tensors = arguments.prepared(call, executable.inputs.wide)
            self._synthetic = synthetic_inputs(tensors, mode, executable.settings.counts)
        return self._synthetic

    # ---- compiling ---------------------------------------------------------------------------------------

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile for these arguments, the same as those of a call, and load the weights; runs nothing."""
        if self._executable is not None:
            logger.warning("Call to compile() ignored: the model is compiled already")
            return
        self._compile(arguments.bind(self._signature, args, kwargs))

    def _compile(self, call: arguments.Call) -> None:
        if self._training and marked_model.owner_of(self._user_model) is not self:  # after destroy()
            _check_not_wrapped(self._user_model)
            marked_model.mark(self._user_model, self)
        options, settings = self._options, self._settings_for(call)
        started = time.perf_counter()
        if self._reporter is not None:
            self._reporter.compiling()
        with self._progress() as done:
            with executable_cache.cache(self._model, call, options, settings) as cache:
                found = cache.load(settings)
                if found is None:
                    with arguments.telling_of_rows(call):
                        found = compile_model(self._model, call, options, settings, done)
                    cache.store(found)
            announce(found.plan, found.settings)
            self._executable = found
            try:
                if options.connection_type != ConnectionType.Never:
                    self.attachToDevice()
            except BaseException:
                self._executable = None
                raise
            done("load")
        self._compilation_seconds = time.perf_counter() - started

    def _settings_for(self, call: arguments.Call) -> Settings:
        """What to compile with. Raises: Error or AssertionError, where arguments or options do not fit."""
        groups = groups_of(self._model, self.per_replica_params, self._options.replication_factor)
        optimizer = self._optimizer_settings if self._training else None
        settings = freeze(self._options, self._training, optimizer, groups)
        arguments.check_kinds(call)
        arguments.check_batch(call, settings.counts)
        arguments.warn_about(call, arguments.is_wide(self._model))
        self._options._Popart.check_names()
        self._updatable_buffers()
        return settings

    @property
    def plan(self) -> Overview:
        """What runs: stages, ipus, parameters, the bytes between them, the schedule and the code. Print it, or let
        a notebook show it; `poptorch.describe` makes one before the first call.
        """
        executable = self._need_executable()
        return overview(executable.plan, executable.settings, executable.graph)

    def _described(self, call: arguments.Call) -> Overview:
        """What `plan` would be after a call with these arguments; nothing is kept of the compilation."""
        found = compile_model(self._model, call, self._options, self._settings_for(call), lambda name: None)
        return overview(found.plan, found.settings, found.graph)

    @contextlib.contextmanager
    def _progress(self) -> Iterator[Callable[[str], None]]:
        shown = self._options._show_progress_bar
        passes = Passes(_PASSES)
        layout = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}]"
        with tqdm(total=len(_PASSES), desc="Graph compilation", disable=not shown, bar_format=layout) as bar:

            def done(name: str) -> None:
                passes.done(name)
                bar.update(_PASSES.index(name) + 1 - bar.n)
                if self._reporter is not None:
                    self._reporter.passed(name)

            try:
                yield done
            except Error as error:
                passes.locate(error)
                raise

    # ---- before compilation ------------------------------------------------------------------------------

    def __reduce__(self) -> Any:
        """An executor that is not compiled pickles as what it was made of."""
        if self._executable is not None:
            raise Error("a compiled executor can't be pickled\n  fix: write it to a file with save(filename)")
        return _wrapped, (self._user_model, self._options, self._training, self._optimizer)


def _wrapped(model: Any, options: Options, training: bool, optimizer: Any) -> PoplarExecutor:
    return PoplarExecutor(model, options, training=training, optimizer=optimizer)


def _marked_as_output(value: Tensor) -> Tensor:
    if value.is_floating_point():
        value.backward = _refuse_backward
        value.__getstate__ = _no_state  # so that a saved output is a plain tensor
    return value


def _no_state() -> None:
    return None


def _refuse_backward(*args: Any, **kwargs: Any) -> None:
    raise Error(
        "backward() cannot be called explicitly on a model's output: the call of the model has trained it\n"
        "  fix: leave it out; wrap the model with poptorch.trainingModel to have it trained"
    )
