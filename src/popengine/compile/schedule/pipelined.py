"""The pipeline's order: one forward, one backward in training; a stream of forwards in inference.

ipu 0 | F0 F1 .. B0 F2 B1 .. B2        at most (stages - stage) micro-batches are between their
ipu 1 | .. F0 B0 F1 B1 F2 B2 ..        forward and their backward, whatever the accumulation
"""

from __future__ import annotations

from collections.abc import Sequence

from ...ir import Action, Schedule


def pipelined(ipus: Sequence[int], micro_batches: int, training: bool) -> Schedule:
    """Return the order of one step's actions, if each takes one tick: backward before forward, later stages before
    earlier ones, each action after those that it needs.

    Args:
        ipus: of each stage; several stages may share one
    """
    stages = len(ipus)
    forward, backward = [0] * stages, [0] * stages  # micro-batches done
    of_ipu = {ipu: [s for s in reversed(range(stages)) if ipus[s] == ipu] for ipu in sorted(set(ipus))}
    rows: dict[int, list[Action]] = {ipu: [] for ipu in of_ipu}
    left = stages * micro_batches * (2 if training else 1)

    def ready(stage: int, forward: list[int], backward: list[int]) -> Action | None:
        """Return the next action of a stage after the actions of earlier ticks; None, if it waits."""
        last = stage == stages - 1
        if training and backward[stage] < (forward[stage] if last else backward[stage + 1]):
            return Action("B", stage, backward[stage])
        arrived = forward[stage - 1] if stage else micro_batches
        room = not training or forward[stage] - backward[stage] < stages - stage
        return Action("F", stage, forward[stage]) if forward[stage] < arrived and room else None

    while left:
        before = forward.copy(), backward.copy()
        for ipu, own in of_ipu.items():
            choices = [action for stage in own if (action := ready(stage, *before))]
            if choices:
                action = min(choices, key=lambda action: action.phase)  # "B" before "F"
                (forward if action.phase == "F" else backward)[action.stage] += 1
                rows[ipu].append(action)
                left -= 1
    name = "one forward, one backward" if training else "a stream of forwards"
    found = {ipu: tuple(row) for ipu, row in rows.items()}
    return Schedule(found, stages, micro_batches, training, stages, name)
