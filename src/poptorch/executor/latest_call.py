"""The results of an executor's latest call: outputs, times, anchors and notes."""

import copy
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

    def getPerfCounters(self) -> dict[str, Times]:
        """Return the times of the latest call, by key: for each input or output tensor a list of seconds.

        "input" and "input_complete": when staging of each micro-batch began and ended. "output" and
        "output_complete": when each output that the output mode keeps began to arrive, and had arrived.
        The times are those of the host's clock, with an arbitrary zero.
        """
        return copy.deepcopy(self.counters)

    def getLatency(self) -> Latency:
        """Return (min, max, mean) seconds from the staging of a micro-batch to the arrival of its outputs."""
        return self._latency("input", min, "output_complete")

    def getHostIpuLatency(self) -> Latency:
        """Return (min, max, mean) seconds of staging a micro-batch."""
        return self._latency("input", min, "input_complete")

    def getComputeLatency(self) -> Latency:
        """Return (min, max, mean) seconds between the staging of a micro-batch and its first output."""
        return self._latency("input_complete", max, "output")

    def getIpuHostLatency(self) -> Latency:
        """Return (min, max, mean) seconds that the outputs of a micro-batch took to arrive."""
        return self._latency("output", min, "output_complete")

    def _latency(self, start: str, first: Callable[..., float], end: str) -> Latency:
        """Return (min, max, mean) seconds between two keys of `counters`; zeros if nothing was measured.

        A span starts at the `first` (min or max) of the tensors' times of `start`, and ends at the last of
        `end`. If there are k times as many starts as ends, k consecutive starts belong to one end.
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

    def getAnchoredTensor(self, short_name: str) -> Tensor:
        """Return the latest call's value of the tensor that `Options.anchorTensor` has named `short_name`."""
        assert short_name in self.anchored, (
            f"No tensor with name {short_name} found. Known now: {', '.join(self.anchored) or 'none'}\n"
            "  fix: options.anchorTensor(short_name, long_name) before wrapping, and call the model"
        )
        return self.anchored[short_name]


def latest_call(executable: Executable, results: Results, synthetic_inputs: int | None) -> LatestCall:
    """Return the results of one run of a plan.

    Args: synthetic_inputs: the number of synthetic inputs, which have no times; None: inputs are the user's
    """
    arrivals = results.arrivals()[: executable.outputs]
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
    """Return the results of a call from those of its runs.

    Args: executable: of any of the runs
    Raises:
        Error: the output mode is Sum, and micro-batches differ in size
    """
    if len(calls) == 1:
        return calls[0]
    counters = {
        key: [
            [*itertools.chain(*times)] for times in zip(*(call.counters[key] for call in calls), strict=True)
        ]
        for key in _KEYS
    }
    mode = executable.settings.outputs
    replicas_of = [run.counts.replicas for run in runs]
    outputs = [_joined(v, mode, replicas_of) for v in zip(*(call.outputs for call in calls), strict=True)]
    anchored = {}
    for name, anchor in executable.anchors.by_name.items():
        # An anchor of a weight has one value in a step: that of the run which ends the step.
        whole = [
            call.anchored[name]
            for call, run in zip(calls, runs, strict=True)
            if run.part.ends_step or anchor is None or not anchor.is_weight
        ]
        anchored[name] = whole[-1] if anchor is None else _joined(whole, anchor.outputs, replicas_of)
    notes = [
        (
            parts[0][0],
            with_tensors(parts[0][1], map(_in_a_row, zip(*(tensors_of(p[1]) for p in parts), strict=True))),
        )
        for parts in zip(*(call.notes for call in calls), strict=True)
    ]
    return LatestCall(counters, anchored, notes, True, outputs)


def _joined(values: Sequence[Tensor], mode: Outputs, replicas_of: Sequence[int]) -> Tensor:
    """Return one tensor from the values of all runs: concatenated, or by `mode` their last or their sum.

    Args: replicas_of: the number of replicas of each run
    Raises: Error, if values of different shapes would be added
    """
    if mode == "final":
        return values[-1]
    if mode != "sum":
        return _in_a_row(values)
    total = values[0].clone()
    for value, replicas in zip(values[1:], replicas_of[1:], strict=True):
        value = value.reshape(1) if total.dim() > value.dim() else value
        # A later run may have fewer replicas, and so fewer rows.
        part = total[: len(value)] if total.dim() else total
        is_other = total.dim() > 0 and len(value) * replicas_of[0] != len(total) * replicas
        if is_other or part.shape != value.shape:
            raise Error(
                "OutputMode.Sum adds outputs of all micro-batches, and the last one of this batch has another size\n"
                "  fix: another output mode, or poptorch.DataLoader(..., drop_last=True)"
            )
        part += value
    return total


def _in_a_row(values: Sequence[Tensor]) -> Tensor:
    return torch.cat([value.reshape(1) if not value.dim() else value for value in values])
