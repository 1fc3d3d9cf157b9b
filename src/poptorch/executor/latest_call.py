"""What an executor keeps of its latest call, for whoever asks: its times, its anchors and its notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from popengine.run.state.results import Results

from ..compiling.executable import Executable
from ..reporting.perf_counters import Counters, counters_of


@dataclass(frozen=True)
class LatestCall:
    """Without arguments: nothing has run yet."""

    counters: Counters = field(default_factory=Counters)
    anchored: Mapping[str, Tensor] = field(default_factory=dict)  # by short name
    notes: Sequence[tuple[Any, Any]] = ()
    has_run: bool = False


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
