"""Compilation of an executor's plans, and when a plan can be used for other values of what forward reads."""

import contextlib
import functools
import inspect
import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn

from popengine.compile.recording.current_capture import interrupts_delayed
from popengine.compile.recording.user_code import user_line
from popengine.errors import Error
from popengine.settings import Settings

from ..annotating.replica_groups import make_replica_groups
from ..compiling import arguments
from ..compiling.compilation_log import log_plan, progress
from ..compiling.executable import Executable, compile_model, record_model
from ..compiling.runs import Run
from ..enums import ConnectionType
from ..logs import listed, logger, without_warnings
from ..options import Options
from ..options.freeze_options import chosen_devices, engine_settings
from ..reporter import start_reporter
from .loaded_plans import LoadedPlan, LoadedPlans
from .optimizer_link import OptimizerLink
from .wrapped_model import WrappedModel, return_weights, with_own_modes

_CHECKED = {8**power for power in range(1, 20)}
_EQUAL_RECORDINGS = 3


class Compilation:
    """The compilation of an executor's model."""

    def __init__(self, model: WrappedModel, plans: LoadedPlans, link: OptimizerLink) -> None:
        self.model, self.plans, self.link, self.flags = model, plans, link, ModelFlags(model)
        options = model.options
        self.most_plans: int = options("new_shapes") if options.exists("new_shapes") else 0  # 0: fixed shapes
        self.is_offline = options.connection_type == ConnectionType.Never
        self.signature = inspect.signature(model.user.forward)
        self.count = 0  # of compiled plans, dropped ones included
        self.calls = 0  # runs of plans
        # Paths of values that changed in the latest calls, with the number of equal recordings one after another.
        self._streaks: dict[str, int] = {}
        self._equal_at = 0  # number of the call with the latest of them
        self._ignored: set[str] = set()  # paths of values that are compared no more
        self.seconds: float | None = None  # of the latest compilation
        self._return_hook: Any = None  # the handle of `return_weights`
        # Made before the first plan, to record the waits for a loader from now on.
        self._next_reporter = start_reporter(self, options, model.training, 1)

    def prepare_first(self) -> None:
        """Take over modes, signature and optimizer of now for the first compilation."""
        self.flags.choose_modes()
        if self._return_hook is None and chosen_devices(self.model.options, self.model.training)[0] != "cpu":
            register = self.model.user.register_forward_pre_hook
            self._return_hook = register(return_weights, prepend=True, with_kwargs=True)
        self.link.freeze_again()
        self.signature = inspect.signature(self.model.user.forward)

    def compile(self, run: Run) -> LoadedPlan:
        """Compile a plan for a run, make it current, and attach it."""
        options, model, plans = self.model.options, self.model.user, self.plans
        settings = self.settings_of(run, options)
        before, number = plans.current, self.count + 1
        reporter, self._next_reporter = self._next_reporter, None
        reporter = reporter or start_reporter(self, options, self.model.training, number)
        times = {} if reporter is None else reporter.passes
        with progress(options._show_progress_bar, times) as done:
            of_key = plans.plans_of(run.key)
            latest = of_key[-1].executable.recordings[0] if of_key else None
            changes, paths = ("", set[str]()) if latest is None else latest.changes(run.call)
            with self.flags.as_compiled():
                earlier = [plan.executable for plan in plans.loaded]
                executable = compile_model(model, run, options, settings, done, earlier=earlier)
            self.flags.fix(executable)
            executable.recordings[0].reads.drop(self._ignored)
            for plan in of_key:
                if plan.executable is executable:
                    logger.info("recorded again, with an equal graph: %s", changes)
                    self._note_equal_recording(paths if executable.recordings[0].is_known else set())
                    plans.make_current(plan)
                    return plan
            log_plan(executable.plan, executable.settings)
            plan = LoadedPlan(executable, reporter)
            plans.add_plan(plan)
            try:
                if before is not None:
                    plans.make_current(plan)
                elif not self.is_offline:
                    self.attach()
            except BaseException:
                plans.replace_plan(plan, before)
                raise
            done("load")
        self.count, self.seconds = number, sum(times.values())
        if before is not None:
            what = f"inputs {', '.join(str(list(tensor.shape)) for tensor in run.call.tensors)}"
            if of_key:
                what = changes
            elif run.key[0] == earlier[-1].key[0]:
                what = "other parameters that are trained"
            logger.info("plan %d, for %s, took %.2f s", number, what, self.seconds)
        return plan

    def _note_equal_recording(self, paths: set[str]) -> None:
        """Compare values no more that have changed in the latest three calls and gave equal recordings. `paths`: of the
        values that have changed in this one."""
        is_next, self._equal_at = self.calls == self._equal_at + 1, self.calls
        self._streaks = {path: 1 + self._streaks.get(path, 0) * is_next for path in paths}
        if ignored := {path for path, count in self._streaks.items() if count == _EQUAL_RECORDINGS}:
            logger.info(
                "compared no more, since forward recorded the same three times: %s", listed(sorted(ignored))
            )
            self._ignored |= ignored
            for recording in (r for plan in self.plans.loaded for r in plan.executable.recordings):
                recording.reads.drop(ignored)

    def check_recording(self, plan: LoadedPlan, run: Run) -> None:
        """In calls 8, 64, 512, ... of a plan record forward again. Raise Error, and remove all plans, if it differs."""
        options, recording = self.model.options, plan.executable.recordings[0]
        mode: Any = options.check_recording if options.exists("check_recording") else True
        if not mode or recording.reads.has_draws or (mode is True and plan.calls + 1 not in _CHECKED):
            return
        with interrupts_delayed(), without_warnings(), self.flags.as_compiled():
            settings = self.settings_of(run, options)
            new = record_model(self.model.user, run, options, settings, [plan.executable])
        try:
            plan.executable.check_recording(new)
        except Error:
            self.plans.clear_plans()
            raise

    def settings_of(self, run: Run, options: Options) -> Settings:
        """Return the engine's settings for complete batches, after checks of arguments, buffers and options."""
        model, call = self.model.user, run.call
        groups = make_replica_groups(model, self.model.per_replica, options.replication_factor)
        if groups and run.counts.replicas != options.replication_factor:
            raise Error(
                "an incomplete batch has not a micro-batch for each replica, and the model has parameters with a value"
                f" for each: {', '.join(groups)}\n  fix: poptorch.DataLoader(..., drop_last=True)"
            )
        settings = engine_settings(options, self.model.training, self.link.frozen, groups)
        if settings.counts.parts > 1:
            settings = replace(settings, holders=self.plans.state.holders())
        arguments.check_batch(call, run.counts)
        if not self.plans.loaded:
            arguments.warn_about_inputs(call, settings.counts, arguments.has_float64_weights(model))
        options._Popart.check_names()
        self.model.updatable_buffers()
        return settings

    def attach(self) -> None:
        """Attach the current plan to its devices; raise the errors of `attachToDevice`."""
        self.plans.require_executable()
        if self.plans.engine is not None:
            raise Error("Device is already attached\n  fix: leave this call out")
        if self.is_offline:
            raise AssertionError("Trying to attach a model to an offline device (ConnectionType.Never)")
        self.link.connect_optimizer()
        self.plans.attach()

    def release(self) -> None:
        """Free devices and plans; the next call compiles again."""
        self.plans.clear_plans()
        self.plans.has_file_state = False
        self.link.release_optimizer()
        if self._return_hook is not None:
            self._return_hook = self._return_hook.remove()


# ---- modes ---------------------------------------------------------------------------------------------------


_CHILDREN, _PARAMETERS, _TRAINING = map(operator.itemgetter, ("_modules", "_parameters", "training"))


class ModelFlags:
    """The modes of a model, which the first compilation fixes.

    The mode of the top-level module (`top`) is the one that it had when it was wrapped. An executor for inference has
    modes of its own: it computes in eval mode what was in eval mode when it was wrapped or at its first call. Later
    changes of modes and of torch's seed have no effect, and one warning each. All else that forward reads is followed:
    `LoadedPlans.find_plan`.
    """

    def __init__(self, model: WrappedModel) -> None:
        self._model, self.top = model, model.user.training
        self._warned: set[str] = set()
        # By name, the mode to compile a layer in, unless its flag is no longer the one in `_seen`.
        self._modes = self._seen = _modes_of(model.user)
        self._compiled: dict[str, bool] = {}
        # By name, attributes of each compiled layer, and its flag `training` when the first plan was compiled.
        self._layers: dict[str, dict[str, Any]] = {}
        self._flags: dict[str, bool] = {}
        # Of each layer, its layers when the latest plan was compiled.
        self._children: list[dict[str, Any]] = []
        self._draws, self._seed = False, 0  # whether the model draws random numbers, and torch's seed
        self._evaluates = False  # whether the executor's `eval` was called last
        self._writing = set[str]()  # names of compiled layers whose buffers each call changes

    @functools.cached_property
    def own_model(self) -> Any:
        """The model of an executor for inference, with the executor's modes."""
        return with_own_modes(self._model.user, self)

    def set_mode(self, mode: bool) -> bool:
        """Set the mode in which layers are compiled. In inference the user's layers keep their flags. Return whether a
        layer is compiled in another mode."""
        user, self._evaluates = self._model.user, not mode
        if self._model.training:
            user.train(mode)
            wanted = _modes_of(user)
        else:
            before = _modes_of(user)
            type(user).train(self.own_model, mode)
            wanted = self._modes = {**_modes_of(user), "": self.top}
            set_modes(user, before)
            self._seen = before
        self._flags |= {name: flag for name, flag in _modes_of(user).items() if name in self._flags}
        return any(wanted.get(name, flag) != flag for name, flag in self._compiled.items())

    def modes(self) -> dict[str, bool]:
        """Return the modes of the layers at the first compilation, or of now before it, by name."""
        if not self._compiled:
            self.choose_modes()
        return dict(self._compiled)

    # ---- compiling ---------------------------------------------------------------------------------------

    def choose_modes(self) -> None:
        """Choose the modes of the first compilation, and forget what an earlier one has fixed."""
        self._layers, self._flags, self._children = {}, {}, []
        present, top = _modes_of(self._model.user), {"": self.top}
        if self._model.training:
            self._compiled = present | top
            if self.top and not present[""]:
                change = (
                    f"{user_line()}: the model was in train() mode when it was wrapped, and is in eval() mode"
                )
                effect = "trains without dropout, and with fixed statistics of batch norm"
                self._warn_once(change, effect, "model.train() before the first call")
            return
        modes, seen = self._modes | top, self._seen
        self._compiled = {
            name: modes[name] if flag == seen.get(name) else flag and modes.get(name, True)
            for name, flag in present.items()
        }

    @contextlib.contextmanager
    def as_compiled(self) -> Iterator[None]:
        """Set the modes of the model to those of the first compilation, inside the `with`."""
        user, now = self._model.user, _modes_of(self._model.user)
        self._compiled = now | self._compiled  # layers that are new keep their mode
        set_modes(user, self._compiled)
        try:
            yield
        finally:
            set_modes(user, now)

    def fix(self, executable: Executable) -> None:
        """Note what a compilation has fixed."""
        if not self._layers:
            self._draws = any(piece.draws for piece in executable.plan.partition.pieces)
            self._seed = torch.initial_seed()
            results = executable.graph.results
            self._writing = {result.key.rpartition(".")[0] for result in results if result.kind == "buffer"}
        self._flags = _modes_of(self._model.user) | self._flags
        self._layers = {name: vars(layer) for name, layer in self._model.user.named_modules()}
        self._children = [dict(attributes["_modules"]) for attributes in self._layers.values()]

    def present_parameters(self) -> tuple[list[Any], list[Any]]:
        """Return names and ids, and `requires_grad`, of the compiled layers' parameters; empty lists if layers were
        replaced."""
        layers = self._layers.values()
        if [*map(_CHILDREN, layers)] != self._children:
            return [], []
        values = [*chain.from_iterable(map(dict.values, map(_PARAMETERS, layers)))]  # some may be None
        names = chain.from_iterable(map(_PARAMETERS, layers))
        return [*names, *map(id, values)], [*map(getattr, values, repeat("requires_grad"), repeat(None))]

    # ---- changes after it --------------------------------------------------------------------------------

    def warn_of_evaluation(self) -> None:
        """Warn once of a training call in `torch.no_grad()`, or after the executor's `eval()`."""
        if self._model.training and (self._evaluates or not torch.is_grad_enabled()):
            change = "`eval()` was called" if self._evaluates else "gradients are off, as for an evaluation"
            fix = "poptorch.inferenceModel(model) evaluates it"
            self._warn_once(f"{user_line()}: {change}", "trains: each call updates the weights", fix)

    def check_changes(self) -> None:
        """Warn, once per kind, of changes of modes since the compilation and of torch's seed: calls ignore them. Raise
        Error if an inference would change buffers of a layer that is in eval mode now."""
        if [*map(_TRAINING, self._layers.values())] != [*map(self._flags.get, self._layers)]:
            self._warn_of_modes()
        if self._draws and self._seed != torch.initial_seed():
            change = "torch.manual_seed was called after the compilation"
            self._warn_once(change, "keeps its seed", "options.randomSeed(seed), before the first call")

    def _warn_of_modes(self) -> None:
        training = self._model.training
        changed = dict[bool, list[str]]()  # names of layers, by their present mode
        for name, attributes in self._layers.items():
            mode = attributes["training"]
            if mode not in (self._flags[name], self._compiled[name]) and (training or not mode):
                changed.setdefault(mode, []).append(name)
        writing = [name or "the model" for name in changed.get(False, ()) if name in self._writing]
        if writing and not training:
            raise Error(
                f"{listed(writing)} is in eval() mode now, and was compiled in train() mode: each call would change its"
                " running statistics\n"
                "  why: an executor has the modes of its first call\n"
                "  fix: call model.eval() before the first call, or destroy() on the executor; or wrap the model again"
            )
        for mode, names in changed.items():
            now, before = ("train", "eval") if mode else ("eval", "train")
            hint = "; wrap the model with poptorch.inferenceModel to evaluate it" if training else ""
            self._warn_once(
                f"{'the model' if '' in names else listed(names)} is in {now}() mode now, and was compiled in"
                f" {before}() mode",
                "trains it in that mode" if training else "computes it in that mode",
                f"set the mode before the first call, or call destroy() on the executor{hint}",
            )

    def _warn_once(self, change: str, effect: str, fix: str) -> None:
        """Log "`change`, and the compiled program `effect`" with a fix, unless `effect` was logged before."""
        if effect not in self._warned:
            self._warned.add(effect)
            logger.warning("%s, and the compiled program %s\n  fix: %s", change, effect, fix)


def _modes_of(model: nn.Module) -> dict[str, bool]:
    return {name: layer.training for name, layer in model.named_modules()}


def set_modes(model: nn.Module, modes: Mapping[str, bool]) -> None:
    """Set the flag `training` of the layers of a model that `modes` names."""
    for name, layer in model.named_modules():
        vars(layer)["training"] = modes.get(name, layer.training)
