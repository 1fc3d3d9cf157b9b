"""The sharded order: one micro-batch after another, and within it one stage after another.

ipu 0 | F0 .. .. B0 F1 .. .. B1
ipu 1 | .. F0 B0 .. .. F1 B1 ..
"""

from __future__ import annotations

from collections.abc import Sequence

from ...ir import Action, Schedule


def sharded(ipus: Sequence[int], micro_batches: int, training: bool) -> Schedule:
    """Return the order of one step's actions; `ipus` holds the ipu of each stage."""
    rows: dict[int, list[Action]] = {ipu: [] for ipu in sorted(set(ipus))}
    for micro_batch in range(micro_batches):
        for stage in range(len(ipus)):
            rows[ipus[stage]].append(Action("F", stage, micro_batch))
        for stage in reversed(range(len(ipus) if training else 0)):
            rows[ipus[stage]].append(Action("B", stage, micro_batch))
    found = {ipu: tuple(row) for ipu, row in rows.items()}
    return Schedule(found, len(ipus), micro_batches, training, 1, "in turns")
