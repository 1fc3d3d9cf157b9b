"""What an executor keeps of its latest call, for whoever asks: its times, its anchors and its notes."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from popengine.run.call import Results

from ..compiling.executable import Executable

Times = list[list[float]]  # for each tensor, one entry for each micro-batch (or kept output)
Latency = tuple[float, float, float]  # min, max, mean, in seconds
_KEYS = ("input", "input_complete", "output", "output_complete")


@dataclass(frozen=True)
class LatestCall:
    """Without arguments: nothing has run yet. `counters` are of `getPerfCounters`, and measured by the workers."""

    counters: dict[str, Times] = field(default_factory=lambda: {key: [[]] for key in _KEYS})
    anchored: Mapping[str, Tensor] = field(default_factory=dict)  # by short name
    notes: Sequence[tuple[Any, Any]] = ()
    has_run: bool = False

    def getPerfCounters(self) -> dict[str, Times]:
        """When the latest call's micro-batches were staged and its outputs arrived.

        Keys input, input_complete, output, output_complete; for each tensor a list of seconds (host clock,
        arbitrary zero): one for each micro-batch, and one for each output that the output mode keeps.
        """
        return copy.deepcopy(self.counters)

    def getLatency(self) -> Latency:
        """(min, max, mean) seconds from the staging of a micro-batch to the arrival of its outputs."""
        return self._latency("input", min, "output_complete")

    def getHostIpuLatency(self) -> Latency:
        """(min, max, mean) seconds that it took to stage a micro-batch."""
        return self._latency("input", min, "input_complete")

    def getComputeLatency(self) -> Latency:
        """(min, max, mean) seconds between the staging of a micro-batch and its first output."""
        return self._latency("input_complete", max, "output")

    def getIpuHostLatency(self) -> Latency:
        """(min, max, mean) seconds that it took outputs to arrive."""
        return self._latency("output", min, "output_complete")

    def _latency(self, start: str, first: Callable[..., float], end: str) -> Latency:
        """Between two moments: the `first` of the tensors' starts, and the last of their ends; (0, 0, 0) where nothing
        was measured. Where k times more micro-batches start than outputs end, k starts in a row lead to one end.
        """
        begun = [first(row) for row in zip(*self.counters[start], strict=True)]
        ended = [max(row) for row in zip(*self.counters[end], strict=True)]
        if not begun or not ended:
            return 0.0, 0.0, 0.0
        group = max(1, len(begun) // len(ended))
        begun = [min(begun[i : i + group]) for i in range(0, len(begun), group)]
        # A later stage may take its input after an earlier one gave its output: that is no negative time.
        spans = [max(0.0, end - start) for start, end in zip(begun, ended, strict=False)]
        return min(spans), max(spans), sum(spans) / len(spans)

    def getAnchoredTensor(self, short_name: str) -> Tensor:
        """The latest call's value of a tensor that `Options.anchorTensor(short_name, ...)` asked for."""
        assert short_name in self.anchored, (
            f"No tensor with name {short_name} found. Known now: {', '.join(self.anchored) or 'none'}\n"
            "  fix: options.anchorTensor(short_name, long_name) before wrapping, and call the model"
        )
        return self.anchored[short_name]


def latest_call(executable: Executable, results: Results, synthetic_inputs: int | None) -> LatestCall:
    """Of a call that has run.

    Args: synthetic_inputs: how many inputs were made up: none was staged then, and outputs mean nothing; or None
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
        has_run=True,
    )
