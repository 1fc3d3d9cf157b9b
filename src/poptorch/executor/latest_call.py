"""The results of an executor's latest call: outputs, times, anchors and notes."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from popengine.errors import Error
from popengine.run.call import Results
from popengine.settings import Outputs

from ..compiling.executable import Executable
from ..compiling.runs import Run
from ..nested_values import tensors_of, with_tensors

Times = list[list[float]]  # seconds: [tensor][micro-batch, or kept output]
Latency = tuple[float, float, float]  # min, max, mean, in seconds
_KEYS = ("input", "input_complete", "output", "output_complete")


@dataclass(frozen=True)
class LatestCall:
    """The results of a call; `LatestCall()`: no call so far. `counters` are those of `getPerfCounters`."""

    counters: dict[str, Times] = field(default_factory=lambda: {key: [[]] for key in _KEYS})
    anchored: Mapping[str, Tensor] = field(default_factory=dict)  # by short name
    notes: Sequence[tuple[Any, Any]] = ()
    has_run: bool = False
    outputs: Sequence[Tensor] = ()  # in the forward's order

    def latency(self, start: str, first: Callable[..., float], end: str) -> Latency:
        """Return (min, max, mean) seconds from times of the key `start` of `counters` to those of `end`.

        A span begins at the `first` (min or max) of the tensors' times, and ends at their latest time. If
        there are k begins for each end, the earliest of k counts. Zeros if nothing was measured.
        """
        begun = [first(row) for row in zip(*self.counters[start], strict=True)]
        ended = [max(row) for row in zip(*self.counters[end], strict=True)]
        if not begun or not ended:
            return 0.0, 0.0, 0.0
        group = max(1, len(begun) // len(ended))
        begun = [min(begun[i : i + group]) for i in range(0, len(begun), group)]
        # An input of a later stage may be staged after an output of an earlier one: this counts as 0 seconds.
        spans = [max(0.0, end - start) for start, end in zip(begun, ended, strict=False)]
        return min(spans), max(spans), sum(spans) / len(spans)


def latest_call(executable: Executable, results: Results, synthetic_inputs: int | None) -> LatestCall:
    """Return outputs, anchors, notes and times of one run of a plan, from the engine's results.

    Args: synthetic_inputs: their number; then inputs and outputs have no times. None: inputs are the user's
    """
    arrivals = results.copy_times()[: executable.outputs]
    started, finished = ([list(times[which]) for times in arrivals] for which in (0, 1))
    times = [results.load_started, results.loaded, started, finished]
    if synthetic_inputs is not None:
        times = [[[]] * count for count in (synthetic_inputs, synthetic_inputs, *[executable.outputs] * 2)]
    counts = executable.settings.counts
    return LatestCall(
        dict(zip(_KEYS, times, strict=True)),
        executable.anchors.values(results),
        [(note.what, note.value(results, counts)) for note in executable.notes],
        True,
        results.outputs()[: executable.outputs],
    )


def joined(calls: Sequence[LatestCall], runs: Sequence[Run], executable: Executable) -> LatestCall:
    """Return the results of a call, joined from `calls`, the results of its runs.

    Args: executable: that of any run
    Raises: Error, if the output mode is Sum, and micro-batches differ in size
    """
    if len(calls) == 1:
        return calls[0]
    counters = {
        key: [
            [*itertools.chain(*times)] for times in zip(*(call.counters[key] for call in calls), strict=True)
        ]
        for key in _KEYS
    }
    replicas = [run.counts.replicas for run in runs]
    values_of_outputs = zip(*(call.outputs for call in calls), strict=True)
    outputs = [_joined(values, executable.settings.outputs, replicas) for values in values_of_outputs]
    # A weight, and the loss scaling, has one value in a step: that of the run which ends the step.
    last = [i for i, run in enumerate(runs) if run.part.ends_step]
    anchored = {}
    for name, anchor in executable.anchors.by_name.items():
        chosen = last if anchor is None or anchor.is_weight else range(len(runs))
        values, mode = (
            [calls[i].anchored[name] for i in chosen],
            "final" if anchor is None else anchor.outputs,
        )
        anchored[name] = _joined(values, mode, [replicas[i] for i in chosen])
    notes = []
    for parts in zip(*(call.notes for call in calls), strict=True):
        (what, first), tensors = parts[0], zip(*(tensors_of(value) for _, value in parts), strict=True)
        notes.append((what, with_tensors(first, map(_concatenated, tensors))))
    return LatestCall(counters, anchored, notes, True, outputs)


def _joined(values: Sequence[Tensor], mode: Outputs, replicas: Sequence[int]) -> Tensor:
    """Return one tensor from the values of several runs: the last ("final"), the sum ("sum") or concatenated.

    Args: replicas: the number of replicas of each run
    Raises: Error, if values of different shapes would be added
    """
    if mode == "final":
        return values[-1]
    if mode != "sum":
        return _concatenated(values)
    total = values[0].clone()
    for value, count in zip(values[1:], replicas[1:], strict=True):
        value = value.reshape(1) if total.dim() > value.dim() else value
        # A later run may have fewer replicas, and so fewer rows.
        part = total[: len(value)] if total.dim() else total
        is_other = total.dim() > 0 and len(value) * replicas[0] != len(total) * count
        if is_other or part.shape != value.shape:
            raise Error(
                "OutputMode.Sum adds outputs of all micro-batches, and the last one of this batch has another size\n"
                "  fix: another output mode, or poptorch.DataLoader(..., drop_last=True)"
            )
        part += value
    return total


def _concatenated(values: Sequence[Tensor]) -> Tensor:
    return torch.cat([value.reshape(1) if not value.dim() else value for value in values])
