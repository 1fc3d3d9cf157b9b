"""Calls of an executor: bind the arguments, split them into runs, run each with its plan, and join the results."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from popengine.errors import Error
from popengine.run.call import Results
from popengine.settings import Outputs

from ..compiling import arguments
from ..compiling.outputs import refuse_backward_of
from ..compiling.runs import Run, split_into_runs, synthetic_inputs
from .compilation import Compilation
from .loaded_plans import LoadedPlan
from .wrapped_model import refuse_reads_if_lost

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def outside_inference_mode(function: Callable[P, R]) -> Callable[P, R]:
    """Return a wrapper that calls `function` outside inference mode, and restores grad mode after Ctrl-C."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True  # notebooks and pytest leave this frame out, too
        if torch.is_inference_mode_enabled():
            # Tensors made in inference mode can't be a model's: no gradients, and read-only after it.
            with torch.inference_mode(False), torch.no_grad():
                return call(*args, **kwargs)
        takes_gradients = torch.is_grad_enabled()
        try:
            return function(*args, **kwargs)
        except KeyboardInterrupt:
            # An interrupt just before the end of a `with torch.no_grad()` keeps it from restoring the mode.
            torch.set_grad_enabled(takes_gradients)
            raise

    return call


def run_methods_outside_inference_mode(cls: type[T]) -> type[T]:
    """Replace `__call__` and public methods of a class by `outside_inference_mode` ones; return the class."""
    for name, member in list(vars(cls).items()):
        if isinstance(member, FunctionType) and (name == "__call__" or not name.startswith("_")):
            setattr(cls, name, outside_inference_mode(member))
    return cls


class Calls:
    """The calls of an executor, of which `latest` has the results."""

    def __init__(self, compilation: Compilation) -> None:
        self._compilation, self._plans, self._link = compilation, compilation.plans, compilation.link
        self._model, options = compilation.model, compilation.model.options
        self.latest = LatestCall()
        self._counts, self._synthetic = options._counts(), options._Popart("syntheticDataMode")
        self._batch_dims = options("batch_dims") if options.exists("batch_dims") else None
        # Parameters and optimizer groups of the latest call, and the fields of its runs that depend on them.
        self._present: Any = None
        self._of_weights: dict[str, Any] = {}

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a call with these arguments, and return its outputs."""
        if self._compilation.is_offline:
            raise AssertionError(
                "Trying to run a model on an offline device (ConnectionType.Never)\n"
                "  fix: use model.compile(...) or compileAndExport(...) only, or another connection type"
            )
        self._compilation.flags.warn_of_evaluation()
        call, most = self.bind(args, kwargs), self._compilation.most_plans
        self._plans.state.updates = 0
        finished: list[tuple[Run, LoadedPlan, Results]] = []
        for run in self.split(call):
            plan, results = self._execute(run)
            finished.append((run, plan, results))
        if most:
            self._plans.remove_oldest([plan for _, plan, _ in finished], most)
        self.latest, result = join_results(finished, call)
        return result

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> arguments.BoundCall:
        """Bind arguments to the signature of forward, which before compilation is the one of now."""
        compilation = self._compilation
        if not self._plans.loaded:
            compilation.prepare_first()
        return arguments.bind(compilation.signature, args, kwargs)

    def split(self, call: arguments.BoundCall) -> list[Run]:
        """Return the runs of a call: one run; with `allowNewShapes` several runs for an incomplete batch."""
        first, most = self._plans.first, self._compilation.most_plans
        if self._batch_dims is not None:
            call = call.rows_first(self._batch_dims, self._counts.product)
        present = *self._compilation.flags.present_parameters(), self._link.follow_optimizer()
        if not present[0] or present != self._present:
            self._of_weights = {"tied": self._model.tied_parameters()}
            if self._model.training:
                parameters = self._model.user.named_parameters()
                self._of_weights["frozen"] = tuple(n for n, value in parameters if not value.requires_grad)
                self._link.follow_parameters()
            self._present = present
        run = Run(call, self._counts, **self._of_weights)
        if not most or call.rearranged:
            return [run]
        like = None if first is None or self._plans.plans_of(run.key) else first.inputs
        return split_into_runs(run, self._model.options, self._model.training, like)

    def _execute(self, run: Run) -> tuple[LoadedPlan, Results]:
        """Execute a run of a call, and return its plan and results. Inputs that forward changes in place are
        copied to the caller's tensors. A plan that is compiled here is removed if no update succeeds."""
        plans, compilation, before = self._plans, self._compilation, self._plans.current
        plan, number = plans.find_plan(run), compilation.count
        if plan is not None:
            compilation.check_recording(plan, run)
        if plan is None and (first := plans.first) is not None and not plans.plans_of(run.key):
            first.inputs.check_call(run.call, first.recordings[0].unread, compilation.most_plans > 0)
        if plan is None:
            plan = compilation.compile(run)
        elif plan is not before:
            plans.make_current(plan)
        plan.calls += 1
        compilation.calls += 1
        try:
            if plan.engine is None:
                compilation.attach()
            compilation.flags.check_changes()
            engine, recorder = plans.require_engine(), plan.reporter and plan.reporter.recorder
            inputs = plan.synthetic
            if inputs is None:
                inputs = arguments.tensors_for_engine(run.call, plan.executable.inputs.has_float64)
                if self._synthetic:
                    counts = plan.executable.settings.counts
                    inputs = plan.synthetic = synthetic_inputs(inputs, self._synthetic, counts)
            results = engine.run(inputs, self._link.hyper, recorder)
        except Exception:
            if plans.state.commit.state == "lost":
                refuse_reads_if_lost(self._model.user, plans.state)
            # The inputs may have caused the error: remove the plan, so that others can be compiled for.
            if number < compilation.count and not (plans.engine is not None and plans.state.updates):
                plans.replace_plan(plan, before)
            raise
        if plan.reporter is not None:
            plan.reporter.after_call()
        if written := results.written_inputs():
            arguments.write_back_inputs(run.call, written)
        return plan, results


# ---- the results of a call -------------------------------------------------------------------------------------

Times = list[list[float]]  # seconds, by [tensor][micro-batch, or returned value of an output]
Latency = tuple[float, float, float]  # min, max, mean, in seconds
_KEYS = ("input", "input_complete", "output", "output_complete")


@dataclass(frozen=True)
class LatestCall:
    """The results of a call, except outputs; `times`: of each run, the times for each key of `_KEYS`."""

    times: Sequence[Sequence[Times]] = (([[]],) * len(_KEYS),)
    anchored: Mapping[str, Tensor] = field(default_factory=dict)  # by short name
    notes: Sequence[tuple[Any, Any]] = ()

    def counters(self) -> dict[str, Times]:
        """Return a copy of the times of all runs, by `_KEYS`."""
        return {
            key: [[*chain(*spans)] for spans in zip(*of_runs, strict=True)]
            for key, *of_runs in zip(_KEYS, *self.times, strict=True)
        }

    def latency(self, start: str, first: Callable[..., float], end: str) -> Latency:
        """Return (min, max, mean) seconds per micro-batch between events `start` and `end` of `counters`;
        zeros if nothing was measured. A micro-batch's `start` is `first` of the times of its tensors, its
        `end` the last."""
        counters = self.counters()
        begun = [first(times) for times in zip(*counters[start], strict=True)]
        ended = [max(times) for times in zip(*counters[end], strict=True)]
        if not begun or not ended:
            return 0.0, 0.0, 0.0
        group = max(1, len(begun) // len(ended))
        begun = [min(begun[i : i + group]) for i in range(0, len(begun), group)]
        # An input of a later stage may be staged after an output of an earlier one: this counts as 0 seconds.
        spans = [max(0.0, end - start) for start, end in zip(begun, ended, strict=False)]
        return min(spans), max(spans), sum(spans) / len(spans)


def join_results(
    runs_and_results: Sequence[tuple[Run, LoadedPlan, Results]], call: arguments.BoundCall
) -> tuple[LatestCall, Any]:
    """Return a call's results and what forward returns, from the results of its runs."""
    executable = runs_and_results[0][1].executable
    mode: Any = executable.settings.outputs
    times, returned, noted = list[list[Times]](), list[list[Tensor]](), list[list[Tensor]]()
    for _, plan, results in runs_and_results:
        count, inputs = executable.outputs, plan.synthetic
        run_times = results.times(count)
        if inputs is not None:  # is not measured
            run_times = [[[]] * number for number in (len(inputs), len(inputs), count, count)]
        times.append(run_times)
        returned.append(results.outputs(count))
        noted.append([*map(results.rows, plan.executable.note_anchors)])
    outputs = [*map(_join_values, zip(*returned, strict=True), repeat(mode))]
    anchored = {}
    for name, anchor in executable.anchors.items():
        # A weight, and the loss scaling, has one value in a step: that of the run which ends the step.
        chosen = [entry for entry in runs_and_results if entry[0].part.ends_step or anchor.is_output]
        values = [results.anchor_values(plan.executable.anchors[name]) for _, plan, results in chosen]
        anchored[name] = _join_values(values, anchor.outputs)
    notes = [_join_values(values, "all") for values in zip(*noted, strict=True)]
    template = executable.recordings[0].template
    result, with_tensors = template.fill(map(refuse_backward_of, outputs), notes, call)
    return LatestCall(times, anchored, with_tensors), result


def _join_values(values: Sequence[Tensor], mode: Outputs) -> Tensor:
    """Return the last value, the sum or else the concatenation of an output's values in each run."""
    if mode == "final" or len(values) == 1:
        return values[-1]
    if mode != "sum":
        return torch.cat([value if value.dim() else value.reshape(1) for value in values])
    total = values[0].clone()
    for value in values[1:]:
        if value.shape != total.shape:
            raise Error(
                "OutputMode.Sum adds outputs of all micro-batches, and the last one of this batch has another size\n"
                "  fix: another output mode, or poptorch.DataLoader(..., drop_last=True)"
            )
        total += value
    return total
