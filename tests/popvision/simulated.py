"""Profiles of ideal devices: every action of a schedule costs what it is said to cost, and nothing else takes time."""

from collections import defaultdict
from collections.abc import Callable

from popengine.order import ORDERS, Action, After, StepActions, timeline
from popengine.profile import (
    Call,
    Memory,
    Operation,
    Option,
    Pass,
    Profile,
    ProfiledBlock,
    ProfiledInstruction,
    ProfiledPiece,
    Tensor,
    Tick,
    Track,
)

MS = 1_000_000


def simulated(
    stages: int = 4,
    micro_batches: int = 8,
    steps: int = 3,
    training: bool = True,
    cost: Callable[[str, int], int] = lambda phase, stage: MS,
    blocks: tuple[str, ...] | None = None,
    order="1f1b",
    gap: int = 0,
) -> Profile:
    """A profile of `steps` steps, one a call, `gap` ns between them.

    `blocks[i]` are the names of stage i's blocks, joined by ", ".
    """
    actions = actions_of(stages, training)
    tasks, ticks = timeline(actions, micro_batches, ORDERS[order])
    when = {tasks[number]: int(ticks.starts[number]) for number in ticks.order}
    blocks = blocks or tuple(f"block{stage}" for stage in range(stages))
    parts: dict[ProfiledInstruction, int] = {}
    programs, tracks, calls = {}, [], []
    timed = _timed(actions, list(when), order, cost)
    length = max(end for row in timed.values() for *_, end in row)
    for ipu, row in timed.items():
        program, durations, at = [], [], 0
        for action, micro_batch, start, end in row:
            for kind, lasted in (("receive", start - at), ("compute", end - start)):
                part = ProfiledInstruction(ipu, kind, action.phase, action.stage)
                program += [parts.setdefault(part, len(parts)), micro_batch]
                durations.append(lasted)
            at = end
        programs[ipu] = program
        tracks += [Track(step, step, 0, ipu, step * (length + gap), durations) for step in range(steps)]
    calls = [Call(step, step * (length + gap), step * (length + gap) + length, 1) for step in range(steps)]
    pieces = [
        ProfiledPiece(phase, stage, stage, "model.py:1")
        for phase in "FB"[: 1 + training]
        for stage in range(stages)
    ]
    operations = [
        Operation(
            i,
            f"mm_{i}_{j}",
            "mm",
            name,
            f"model.py:{j}",
            micro_batches,
            micro_batches * cost(p.phase, p.stage) // len(names),
            1000,
            4096,
            512,
        )
        for i, p in enumerate(pieces)
        for names in [blocks[p.stage].split(", ")]
        for j, name in enumerate(names)
    ]
    return Profile(
        "training" if training else "inference",
        training,
        blocks,
        tuple(range(stages)),
        {"micro_batch_size": 2, "iterations": 1, "accumulation": micro_batches, "replicas": 1, "groups": 1},
        {
            "mode": order,
            "schedule_length": max(when.values()) + 1,
            "schedule_actions": len(when),
            "schedule_micro_batches": micro_batches,
            "in_flight": ORDERS[order].in_flight(StepActions(tuple(actions), micro_batches)),
            "calls": steps,
            "failed_calls": 0,
            "steps": steps,
            "ns_in_calls": steps * length,
            "detailed_step": [0, 0],
            "capacity": {"bytes": 1 << 30, "of": "a device", "shared": False},
            "cores": 64,
            "device": "cpu",
            "versions": {"torch": "2"},
            "made": "today",
        },
        programs,
        (Pass("capture", 0.5), Pass("lower", 0.25)),
        tuple(
            ProfiledBlock(name, s, s, "model.py:1", 10)
            for s, names in enumerate(blocks)
            for name in names.split(", ")
        ),
        tuple(pieces),
        tuple(operations),
        tuple(parts),
        tuple(tracks),
        tuple(calls),
        (),
        tuple(Memory(0, ipu, 100, 0, 100, 200) for ipu in range(stages)),
        tuple(
            Tensor(ipu, "x", "activation", m, 1024, 2 * m, min(2 * m + 2, 2 * micro_batches - 1))
            for ipu in range(stages)
            for m in range(min(2, micro_batches))
        ),
        tuple(
            sorted(
                (Tick(actions[row].ipu, *actions[row][:2], m, tick) for (row, m), tick in when.items()),
                key=lambda t: (t.tick, t.ipu),
            )
        ),
        (Option("device_iterations", "3", "1"),),
    )


def actions_of(stages, training):
    """Each phase waits for the one before: F0 F1 ... B1 B0."""
    phases = [("F", stage) for stage in range(stages)]
    phases += [("B", stage) for stage in reversed(range(stages))] if training else []
    return [
        Action(phase, stage, stage, (After(row - 1),) if row else ())
        for row, (phase, stage) in enumerate(phases)
    ]


def _timed(actions, tasks, order, cost):
    """For each ipu its actions with their micro-batch, start and end, in the order in which they begin."""
    bounds = ORDERS[order].all_bounds(StepActions(tuple(actions), len(tasks)))
    after = [(*action.after, *bound) for action, bound in zip(actions, bounds, strict=True)]
    ends, free, rows = {}, defaultdict(int), defaultdict(list)
    for row, m in tasks:
        action = actions[row]
        needs = [ends[need.row, m - need.behind] for need in after[row] if m >= need.behind]
        start = max([free[action.ipu], *needs])
        ends[row, m] = free[action.ipu] = start + cost(action.phase, action.stage)
        rows[action.ipu].append((action, m, start, free[action.ipu]))
    return dict(rows)
