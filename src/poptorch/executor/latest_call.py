"""The results of an executor's latest call: outputs, anchors, notes and times."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from popengine.errors import Error
from popengine.run.call import Results
from popengine.settings import Outputs

from ..compiling.runs import Run
from ..nested_values import tensors_of, with_tensors
from .loaded_plans import LoadedPlan

Times = list[list[float]]  # seconds, by [tensor][micro-batch, or returned value of an output]
Latency = tuple[float, float, float]  # min, max, mean, in seconds
_KEYS = ("input", "input_complete", "output", "output_complete")


@dataclass(frozen=True)
class LatestCall:
    """The results of a call, except outputs; `times`: of each run, the times for each key of `_KEYS`."""

    times: Sequence[Sequence[Times]] = (([[]],) * len(_KEYS),)
    anchored: Mapping[str, Tensor] = field(default_factory=dict)  # by short name
    notes: Sequence[tuple[Any, Any]] = ()
    has_run: bool = False

    @cached_property
    def counters(self) -> dict[str, Times]:
        """Return the times of all runs, by `_KEYS`."""
        return {
            key: [[*chain(*spans)] for spans in zip(*of_runs, strict=True)]
            for key, *of_runs in zip(_KEYS, *self.times, strict=True)
        }

    def latency(self, start: str, first: Callable[..., float], end: str) -> Latency:
        """Return (min, max, mean) seconds per micro-batch between events `start` and `end` of `counters`;
        zeros if nothing was measured. A micro-batch's `start` is `first` of the times of its tensors, its
        `end` the last."""
        begun = [first(times) for times in zip(*self.counters[start], strict=True)]
        ended = [max(times) for times in zip(*self.counters[end], strict=True)]
        if not begun or not ended:
            return 0.0, 0.0, 0.0
        group = max(1, len(begun) // len(ended))
        begun = [min(begun[i : i + group]) for i in range(0, len(begun), group)]
        # An input of a later stage may be staged after an output of an earlier one: this counts as 0 seconds.
        spans = [max(0.0, end - start) for start, end in zip(begun, ended, strict=False)]
        return min(spans), max(spans), sum(spans) / len(spans)


def join_results(
    runs_and_results: Sequence[tuple[Run, LoadedPlan, Results]],
) -> tuple[LatestCall, list[Tensor]]:
    """Return a call's results and its outputs, in the forward's order, from the results of its runs."""
    executable = runs_and_results[0][1].executable
    times = [_run_times(plan, results) for _, plan, results in runs_and_results]
    returned = zip(*(results.outputs(executable.outputs) for _, _, results in runs_and_results), strict=True)
    outputs = [_join_values(values, executable.settings.outputs) for values in returned]
    anchored = {}
    for name, anchor in executable.anchors.items():
        # A weight, and the loss scaling, has one value in a step: that of the run which ends the step.
        chosen = [each for each in runs_and_results if each[0].part.ends_step or anchor.is_output]
        values = [results.anchor_values(plan.executable.anchors[name]) for _, plan, results in chosen]
        anchored[name] = _join_values(values, anchor.outputs)
    notes = []
    for parts in zip(*(plan.executable.notes for _, plan, _ in runs_and_results), strict=True):
        values = [note.value(results) for note, (_, _, results) in zip(parts, runs_and_results, strict=True)]
        tensors = zip(*map(tensors_of, values), strict=True)
        joined = (_join_values(of_runs, "all") for of_runs in tensors)
        notes.append((parts[0].what, with_tensors(values[0], joined)))
    return LatestCall(times, anchored, notes, True), outputs


def _run_times(plan: LoadedPlan, results: Results) -> list[Times]:
    """Return, for each key of `_KEYS`, a run's times by tensor; empty lists if inputs are synthetic."""
    outputs = plan.executable.outputs
    if plan.synthetic is not None:
        return [[[]] * count for count in (*[len(plan.synthetic)] * 2, *[outputs] * 2)]
    return [results.load_started, results.loaded, *results.copy_times(outputs)]


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
