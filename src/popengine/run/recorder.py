"""Collects events while programs run. Without a recorder the workers measure nothing."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from ..ir import Compute
from ..profile import Event


class Recorder:
    """The events of the calls it was passed to; each worker appends to the one list (appending is atomic)."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def timed(
        self, run: Callable[[Any], None], instruction: Any, ipu: int, replica: int, step: int, places: Any
    ) -> None:
        """Run one instruction and note when."""
        start = perf_counter_ns()
        run(instruction)
        end = perf_counter_ns()
        phase, stage = places[instruction.piece] if isinstance(instruction, Compute) else ("", -1)
        kind = type(instruction).__name__.lower()
        micro_batch = getattr(instruction, "micro_batch", None)
        micro_batch = -1 if micro_batch is None else micro_batch
        self.events.append(Event(ipu, replica, kind, start, end, phase, stage, micro_batch, step))
