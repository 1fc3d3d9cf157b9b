"""How long one call took on its way: when each micro-batch was staged and each output arrived.

Measured by the workers on the host's clock, in seconds from an arbitrary zero; here they are only sorted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from popengine.run.state.results import Results

Times = list[list[float]]  # for each tensor, one entry for each micro-batch (or kept output)
Latency = tuple[float, float, float]  # min, max, mean, in seconds


@dataclass(frozen=True)
class Counters:
    """The times of the latest call, by the keys of `getPerfCounters()`."""

    input: Times = field(default_factory=lambda: [[]])
    input_complete: Times = field(default_factory=lambda: [[]])
    output: Times = field(default_factory=lambda: [[]])
    output_complete: Times = field(default_factory=lambda: [[]])

    @classmethod
    def without_times(cls, inputs: int, outputs: int) -> Counters:
        """An empty list for each tensor."""
        staged, arrived = [[[] for _ in range(count)] for count in (inputs, outputs)]
        return cls(staged, staged, arrived, arrived)

    def round_trip(self) -> Latency:
        return _latency(self.input, min, self.output_complete, max)

    def host_to_ipu(self) -> Latency:
        return _latency(self.input, min, self.input_complete, max)

    def compute(self) -> Latency:
        return _latency(self.input_complete, max, self.output, max)

    def ipu_to_host(self) -> Latency:
        return _latency(self.output, min, self.output_complete, max)


def counters_of(results: Results, outputs: int) -> Counters:
    """The times of a call whose forward returns so many tensors."""
    arrivals = results.arrivals()[:outputs]
    return Counters(
        results.load_started,
        results.loaded,
        [list(started) for started, _ in arrivals],
        [list(finished) for _, finished in arrivals],
    )


def _latency(starts: Times, first: Callable[..., float], ends: Times, last: Callable[..., float]) -> Latency:
    """Between two moments, each reduced over the tensors; (0, 0, 0) where nothing was measured.

    Where k times more micro-batches start than outputs end, k starts in a row lead to one end.
    """
    begun, ended = (
        [first(row) for row in zip(*starts, strict=True)],
        [last(r) for r in zip(*ends, strict=True)],
    )
    if not begun or not ended:
        return 0.0, 0.0, 0.0
    group = max(1, len(begun) // len(ended))
    begun = [min(begun[i : i + group]) for i in range(0, len(begun), group)]
    # A later stage may take its input after an earlier one gave its output: that is no negative time.
    spans = [max(0.0, end - start) for start, end in zip(begun, ended, strict=False)]
    return min(spans), max(spans), sum(spans) / len(spans)
