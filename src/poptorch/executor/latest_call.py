"""What an executor keeps of its latest call, for whoever asks: its times, its anchors and its notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from popengine.run.state.results import Results

from ..compiling.executable import Executable
from ..reporting.perf_counters import Counters, Latency, Times, counters_of


@dataclass(frozen=True)
class LatestCall:
    """Without arguments: nothing has run yet."""

    counters: Counters = field(default_factory=Counters)
    anchored: Mapping[str, Tensor] = field(default_factory=dict)  # by short name
    notes: Sequence[tuple[Any, Any]] = ()
    has_run: bool = False

    def getPerfCounters(self) -> dict[str, Times]:
        """When the latest call's micro-batches were staged and its outputs arrived.

        Keys input, input_complete, output, output_complete; for each tensor a list of seconds (host clock,
        arbitrary zero): one for each micro-batch, and one for each output that the output mode keeps.
        """
        return asdict(self.counters)

    def getLatency(self) -> Latency:
        """(min, max, mean) seconds from the staging of a micro-batch to the arrival of its outputs."""
        return self.counters.round_trip()

    def getHostIpuLatency(self) -> Latency:
        """(min, max, mean) seconds that it took to stage a micro-batch."""
        return self.counters.host_to_ipu()

    def getComputeLatency(self) -> Latency:
        """(min, max, mean) seconds between the staging of a micro-batch and its first output."""
        return self.counters.compute()

    def getIpuHostLatency(self) -> Latency:
        """(min, max, mean) seconds that it took outputs to arrive."""
        return self.counters.ipu_to_host()

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
    if synthetic_inputs is None:
        counters = counters_of(results, executable.outputs)
    else:
        counters = Counters.without_times(synthetic_inputs, executable.outputs)
    counts = executable.settings.counts
    return LatestCall(
        counters,
        executable.anchors.values(results),
        [(note.what, note.value(results, counts)) for note in executable.notes],
        has_run=True,
    )
