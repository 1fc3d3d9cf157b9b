"""The executor: a wrapped model, which its first call compiles and attaches to its devices. A call:

    bind the arguments ─► split into runs ─► for each run: find or compile its plan, engine.run ─► outputs

Its parts: plans and engines (`loaded_plans.py`), the model's flags (`model_flags.py`), the optimizer
(`optimizer_link.py`), the latest call's results (`latest_call.py`), all other methods (`public_names.py`).
"""

import contextlib
import inspect
from dataclasses import replace
from typing import Any, final

from torch import Tensor

from popengine.errors import Error
from popengine.run.call import Results
from popengine.settings import Settings

from ..annotating.replica_groups import make_replica_groups
from ..compiling import arguments
from ..compiling.compilation_log import log_plan, progress
from ..compiling.executable import compile_model, record_model
from ..compiling.outputs import fill_outputs
from ..compiling.runs import Run, split_into_runs, synthetic_inputs
from ..enums import ConnectionType
from ..logs import listed, logger
from ..options import Options
from ..options.freeze_options import chosen_devices, engine_settings
from ..planning import exit_if_only_planning
from ..reporter import Reporter, start_reporter
from . import executable_file, wrapped_model
from .latest_call import LatestCall, join_results
from .loaded_plans import LoadedPlan
from .optimizer_link import default_optimizer
from .public_names import PublicNames, run_methods_outside_inference_mode


@final
@run_methods_outside_inference_mode
class PoplarExecutor(PublicNames):
    """A wrapped model, which `trainingModel`, `inferenceModel` and `load` return. Call it like the model.

    >>> trainer = poptorch.trainingModel(model, options, optimizer)
    >>> loss = trainer(images, labels)  # the first call compiles the model
    >>> trainer.setOptimizer(optimizer)  # after a change of the learning rate
    >>> trainer.save("trainer.poptorch")

    The first call or `compile` compiles the model for the shapes of its batch, and attaches it to its devices.
    """

    def __init__(self, model: Any, options: Options | None, *, training: bool, optimizer: Any = None) -> None:
        super().__init__(wrapped_model.wrap(model, options, training))
        model, options = self._user_model, self.options
        self._signature = inspect.signature(self._wrapped.traced.forward)
        self._most_plans = options("new_shapes") if options.exists("new_shapes") else 0  # 0: shapes are fixed
        self._counts, self._synthetic = options._counts(), options._Popart("syntheticDataMode")
        self._batch_dims = options("batch_dims") if options.exists("batch_dims") else None
        self._is_offline = options.connection_type == ConnectionType.Never
        # Made before the first plan, to record the waits for a loader from now on.
        self._next_reporter = start_reporter(self, options, training, 1)
        # Parameters and optimizer groups of the latest call, and the fields of its runs that depend on them.
        self._present: Any = None
        self._of_weights: dict[str, Any] = {}
        self._unread: frozenset[str] = frozenset()  # paths of arguments whose values do not matter
        self._compiled_plans = 0  # dropped ones included
        self._return_hook: Any = None  # see `return_weights_before_calls`
        if training:
            wrapped_model.check_buffer_classes(model)
            self.setOptimizer(default_optimizer(model) if optimizer is None else optimizer)
            wrapped_model.mark_model(model, self)

    # ---- calling -----------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on one combined batch (all device iterations), and return its outputs.

        The first call compiles the model; with `Options.allowNewShapes` so does a call with new shapes.

        Raises:
            AssertionError: the connection type is Never, or forward's signature or a batch size doesn't fit
            Error: the model can't be compiled, the batch is not what was compiled for, or the run failed;
                the weights are then those of the last finished update (see `finished_updates`), and the model
                can be called again
        """
        if self._is_offline:
            raise AssertionError(
                "Trying to run a model on an offline device (ConnectionType.Never)\n"
                "  fix: use model.compile(...) or compileAndExport(...) only, or another connection type"
            )
        with self._lock:
            call = self._bind(args, kwargs)
            self._plans.state.updates = 0
            finished: list[tuple[Run, LoadedPlan, Results]] = []
            for run in self._split_call(call):
                plan, results = self._execute_run(run)
                finished.append((run, plan, results))
            if self._most_plans:
                self._plans.remove_oldest([plan.executable.key for _, plan, _ in finished], self._most_plans)
            self._latest, outputs = join_results(finished)
            return fill_outputs(finished[0][1].executable.template, outputs)

    def _bind(self, args: Any, kwargs: Any) -> arguments.BoundCall:
        """Bind arguments to the signature of forward, which before compilation is the one of now."""
        self._flags.take()
        if not self._plans.by_key:
            self._flags.choose_modes()
            if self._return_hook is None and chosen_devices(self.options, self._wrapped.training)[0] != "cpu":
                self._return_hook = wrapped_model.return_weights_before_calls(self._user_model)
            self._optimizer_link.freeze_again()
            self._signature = inspect.signature(self._wrapped.traced.forward)
        call = arguments.bind(self._signature, args, kwargs)
        first = self._plans.first
        return replace(call, unread=self._unread, like=first and first.inputs.kind) if self._unread else call

    def _split_call(self, call: arguments.BoundCall) -> list[Run]:
        """Return the runs of a call: one run; with `allowNewShapes` several runs for an incomplete batch."""
        first = self._plans.first
        if self._batch_dims is not None:
            call = call.rows_first(self._batch_dims, self._counts.product)
        present = *self._flags.present_parameters(), self._optimizer_link.follow_optimizer()
        if not present[0] or present != self._present:
            self._of_weights = {"tied": self._wrapped.tied_parameters()}
            if self._wrapped.training:
                parameters = self._wrapped.traced.named_parameters()
                self._of_weights["frozen"] = tuple(n for n, value in parameters if not value.requires_grad)
                self._of_weights["group_of"] = self._optimizer_link.follow_parameters()
            self._present = present
        run = Run(call, self._counts, **self._of_weights)
        if not self._most_plans or call.rearranged:
            return [run]
        like = None if first is None or self._plans.plans_of(run.key) else first.inputs
        return split_into_runs(run, self.options, self._wrapped.training, like)

    def _execute_run(self, run: Run) -> tuple[LoadedPlan, Results]:
        """Execute a run of a call, and return its plan and results. Inputs that forward changes in place are
        copied to the caller's tensors. A plan that is compiled here is removed if no update succeeds."""
        plans, before = self._plans, self._plans.current
        plan, number = plans.find_plan(run.key), self._compiled_plans
        if plan is None and plans.first is not None and not plans.plans_of(run.key):
            plan = self._plan_for_other_constants(run, plans.first.inputs)
            if plan is None:
                plans.first.inputs.check_call(run.call, any_shape=self._most_plans > 0)
        if plan is None:
            plan = self._compile_plan(run)
        else:
            plans.make_current(plan)
        try:
            if plans.engine is None:
                self.attachToDevice()
            self._flags.check_changes()
            engine, recorder = plans.require_engine(), plan.reporter and plan.reporter.recorder
            inputs = self._engine_inputs(run.call, plan)
            results = engine.run(inputs, self._optimizer_link.hyper, recorder)
        except Exception:
            if plans.state.commit.state == "lost":
                wrapped_model.refuse_reads_if_lost(self._user_model, plans.state)
            # The inputs may have caused the error: remove the plan, so that others can be compiled for.
            if number < self._compiled_plans and not self.finished_updates:
                self._remove_plan(plan.executable.key, before)
            raise
        if plan.reporter is not None:
            plan.reporter.after_call()
        arguments.write_back_inputs(run.call, results.written_inputs())
        return plan, results

    def _engine_inputs(self, call: arguments.BoundCall, plan: LoadedPlan) -> list[Tensor]:
        """Return the call's tensors, converted for the engine; for `enableSyntheticData` synthetic ones."""
        if plan.synthetic is None:
            tensors = arguments.tensors_for_engine(call, plan.executable.inputs.has_float64)
            if not self._synthetic:
                return tensors
            plan.synthetic = synthetic_inputs(tensors, self._synthetic, plan.executable.settings.counts)
        return plan.synthetic

    # ---- compiling ---------------------------------------------------------------------------------------

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the model for these arguments; attach it to devices, unless the connection type is Never.

        Nothing runs. If the model is compiled already, without `allowNewShapes`, this only logs a warning.
        """
        if self.isCompiled() and not self._most_plans:
            logger.warning("Call to compile() ignored: the model is compiled already")
            return
        with self._lock:
            call = self._bind(args, kwargs)
            for run in self._split_call(call):
                if self._plans.find_plan(run.key) is None:
                    self._compile_plan(run)

    def _compile_plan(self, run: Run) -> LoadedPlan:
        """Compile a plan for a run, make it current, and attach it; under `popvision plan` write profiles and
        exit."""
        if self._wrapped.training:
            wrapped_model.mark_model(self._user_model, self)  # destroy() unmarks the model
        options, model, plans = self.options, self._wrapped.traced, self._plans
        settings = self._checked_settings(run, options)
        exit_if_only_planning(model, run, options, settings, self._optimizer_link.hyper)
        before, number = plans.current, self._compiled_plans + 1
        reporter = self._make_reporter(number)
        times = {} if reporter is None else reporter.passes
        with progress(options._show_progress_bar, times) as done:
            others = plans.plans_of(run.key)
            changes = others[-1].executable.changes() if others else ""
            with self._flags.as_compiled():
                earlier = [plan.executable for plan in plans.by_key.values()]
                found = compile_model(model, run, options, settings, done, earlier=earlier)
            self._flags.fix(any(piece.draws for piece in found.plan.partition.pieces))
            for plan in others:
                if plan.executable is found:
                    logger.info("recorded again, with an equal graph: %s", changes or "a plan of a file")
                    plans.make_current(plan)
                    return plan
            log_plan(found.plan, found.settings)
            plan = LoadedPlan(found, reporter)
            plans.add_plan(plan)
            try:
                if before is not None:
                    plans.make_current(plan)
                elif not self._is_offline:
                    self.attachToDevice()
            except BaseException:
                self._remove_plan(found.key, before)
                raise
            executable_file.write_to_cache_folder(found, options, self.per_replica_params)
            done("load")
        self._compiled_plans, self._compilation_seconds = number, sum(times.values())
        if before is not None:
            what = f"inputs {', '.join(str(list(tensor.shape)) for tensor in run.call.tensors)}"
            if others:
                what = changes
            elif run.key[0] == earlier[-1].key[0][0]:
                what = "other parameters that are trained"
            logger.info("plan %d, for %s, took %.2f s", number, what, self._compilation_seconds)
        return plan

    def _plan_for_other_constants(self, run: Run, compiled: arguments.CompiledInputs) -> LoadedPlan | None:
        """Record a call again whose arguments without tensors have other values than at the compilation. If the
        graph is equal, compare these values no more, and return its plan; else None."""
        unread = run.call.changed_constants(compiled.kind)
        if not unread:
            return None
        like = replace(run.call, unread=self._unread | unread, like=compiled.kind)
        plans = self._plans.plans_of(replace(run, call=like).key)
        settings = self._checked_settings(run, self.options)
        with self._flags.as_compiled(), contextlib.suppress(Error):
            new = record_model(
                self._wrapped.traced, run, self.options, settings, [p.executable for p in plans]
            )
            for plan in plans:
                if plan.executable.graph_code() == new.graph_code():
                    logger.info(
                        "recorded again, with an equal graph, for other values of %s", listed(sorted(unread))
                    )
                    self._unread |= unread
                    plan.executable.add_recording(new)
                    return plan
        return None

    def _make_reporter(self, number: int) -> Reporter | None:
        """Return a reporter for the plan with this number (from 1); None if no profile is requested."""
        reporter, self._next_reporter = self._next_reporter, None
        return reporter or start_reporter(self, self.options, self._wrapped.training, number)

    def _checked_settings(self, run: Run, options: Options) -> Settings:
        """Return the engine's settings for complete batches, after checks of arguments, buffers and options."""
        model, training, call = self._wrapped.traced, self._wrapped.training, run.call
        groups = make_replica_groups(model, self.per_replica_params, options.replication_factor)
        if groups and run.counts.replicas != options.replication_factor:
            raise Error(
                "an incomplete batch has not a micro-batch for each replica, and the model has parameters with a value"
                f" for each: {', '.join(groups)}\n  fix: poptorch.DataLoader(..., drop_last=True)"
            )
        optimizer = self._optimizer_link.frozen
        if optimizer is not None:
            optimizer = replace(optimizer, group_of=dict(run.group_of))
        settings = engine_settings(options, training, optimizer, groups)
        self._optimizer_link.check_own_step(settings)
        arguments.check_batch(call, run.counts)
        if not self._plans.by_key:
            arguments.warn_about_inputs(call, settings.counts, arguments.has_float64_weights(model))
        options._Popart.check_names()
        self._wrapped.updatable_buffers()
        return settings

    # ---- devices -----------------------------------------------------------------------------------------

    def attachToDevice(self) -> None:
        """Start the devices' threads.

        Raises: Error, if the model is not compiled, or is attached already; AssertionError for ConnectionType.Never
        """
        self._plans.require_executable()
        if self.isAttachedToDevice():
            raise Error("Device is already attached")
        if self._is_offline:
            raise AssertionError("Trying to attach a model to an offline device (ConnectionType.Never)")
        self._optimizer_link.connect_optimizer()
        self._plans.attach()

    def detachFromDevice(self) -> None:
        """Release the devices. The state stays. If a replica spans several processes, each gets all weights, so all
        must call this or `destroy`. Raises: Error, if the model is not compiled or not attached"""
        self._plans.require_executable()
        if self._plans.engine is None:
            raise Error("Device is not attached")
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
        self._plans.clear_plans()
        self._unread = frozenset()
        self._optimizer_link.release_optimizer()
        self._latest = LatestCall()
        if self._return_hook is not None:
            self._return_hook = self._return_hook.remove()
        # The model's weak reference to this executor is None already when `__del__` runs.
        if self._wrapped.training and wrapped_model.executor_of(self._user_model) in (self, None):
            wrapped_model.unmark_model(self._user_model)

    def _remove_plan(self, key: Any, previous: LoadedPlan | None) -> None:
        """Remove the plan of `key` and make `previous` current; if there is none, detach, and remove all."""
        if previous is None:
            self._plans.clear_plans()
        else:
            self._plans.make_current(previous)
            self._plans.remove_plan(key)

    def __del__(self) -> None:
        # At the interpreter's exit the globals of this module (so `contextlib` too) and parts of torch may be None
        # already.
        try:  # noqa: SIM105
            self._release()
        except Exception:
            pass

    # ---- files -------------------------------------------------------------------------------------------

    def compileAndExport(self, filename: str, *args: Any, export_model: bool = True, **kwargs: Any) -> None:
        """Compile the model for these arguments, as `compile`, and write it to a file, as `save`."""
        self.compile(*args, **kwargs)
        self.save(filename, export_model=export_model)

    def save(self, filename: str, export_model: bool = True, save_rng_state: bool = True) -> None:
        """Write the compiled model, its options and its state to a file, or to `model.poptorch` in a folder. If a
        replica spans several processes, all must call this, each with a file of its own.

        Args:
            export_model:   also write the user's model and its optimizer, for `poptorch.load`
            save_rng_state: also write the random state
        Raises:
            AssertionError: the file's folder is a file
            Error: the model is not compiled, or can't be pickled
        """
        executable_file.write_file(filename, executable_file.saved(self, export_model, save_rng_state))

    def loadExecutable(self, filename: str) -> None:
        """Load the compiled plans, optimizer state and random state that `save` wrote for the same model.

        Frees the plans of this executor first; attaches to devices if the connection type is Always.

        Raises: Error, if the file is missing or damaged, or of another version, mode or model
        """
        try:
            saved = executable_file.read_file(filename)
        except AssertionError as error:
            raise Error(str(error)) from None
        executable_file.check_same_model(filename, saved, self._wrapped)
        self.destroy()
        self._restore(saved)

    def _restore(self, saved: executable_file.SavedExecutor) -> None:
        """Add a file's plans and state to an executor that has no plans. Attach for ConnectionType.Always."""
        if self._wrapped.training:
            wrapped_model.mark_model(self._user_model, self)
        self._flags.take()
        self._flags.choose_modes()
        self._flags.fix(any(piece.draws for piece in saved.executables[0].plan.partition.pieces))
        self._compiled_plans = len(saved.executables)
        for number, executable in enumerate(saved.executables, 1):
            self._plans.add_plan(LoadedPlan(executable, self._make_reporter(number)))
        self._plans.load(saved.state)
        self.per_replica_params.clear()
        self.per_replica_params.update(saved.per_replica_params)
        if self.options.connection_type == ConnectionType.Always:
            self.attachToDevice()
