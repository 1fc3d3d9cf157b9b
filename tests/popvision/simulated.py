"""Profiles of an ideal host: as many cores as said share all ipus, each action costs what it is said to cost, and
nothing else takes time."""

from collections.abc import Callable

from popengine.order import ORDERS, Action, After, timeline
from popengine.profile import (
    Call,
    KeptBytes,
    Operation,
    Option,
    Pass,
    Profile,
    ProfiledBlock,
    TaskRun,
    Tensor,
    Tick,
)
from popengine.table import Instruction, Task

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
    cores: int = 1,
) -> Profile:
    """A profile of `steps` steps, one a call, `gap` ns between them.

    `blocks[i]` are the names of stage i's blocks, joined by ", ".
    """
    actions = actions_of(stages, training)
    scheduled, ticks = timeline(actions, micro_batches, ORDERS[order])
    when = {scheduled[number]: int(ticks.starts[number]) for number in ticks.order}
    blocks = blocks or tuple(f"block{stage}" for stage in range(stages))
    costs = [cost(action.phase, action.stage) for action in actions]
    shared, found = timeline(actions, micro_batches, ORDERS[order], cores, costs)
    length, runs = int(found.length), []
    for step in range(steps):
        for i in sorted(found.order, key=lambda number: found.ends[number]):
            begin, end = (step * (length + gap) + int(moments[i]) for moments in (found.starts, found.ends))
            runs.append(TaskRun(step, step, *shared[i], 0, found.devices[i], begin, end))
    calls = [Call(step, step * (length + gap), step * (length + gap) + length, 1) for step in range(steps)]
    words = {"F": "forward", "B": "backward"}
    operations, tasks = [], []
    for i, (action, ns) in enumerate(zip(actions, costs, strict=True)):
        names = blocks[action.stage].split(", ")
        share = micro_batches * ns // len(names)
        for j, name in enumerate(names):
            of_operation = f"mm_{i}_{j}", "mm", name, f"model.py:{j}", micro_batches, share, 1000, 4096, 512
            operations.append(Operation(i, *of_operation))
        place = words[action.phase], action.ipu, action.stage, action.phase
        tasks.append(Task(*place, after=action.after, piece=i, instructions=(Instruction("compute"),)))
    program = [Tick(actions[row].ipu, *actions[row][:2], m, tick) for (row, m), tick in when.items()]
    ends = [2 * stages - 1 - ipu if training else ipu for ipu in range(stages)]
    return Profile(
        name="training" if training else "inference",
        training=training,
        stages=blocks,
        ipus=tuple(range(stages)),
        counts={
            "micro_batch_size": 2,
            "iterations": 1,
            "accumulation": micro_batches,
            "replicas": 1,
            "groups": 1,
        },
        facts={
            **{"mode": order, "calls": steps, "failed_calls": 0, "steps": steps, "step_tasks": len(shared)},
            **{"schedule_length": max(when.values()) + 1, "schedule_actions": len(when)},
            **{"schedule_micro_batches": micro_batches, "ns_in_calls": steps * length},
            "detailed_step": [0, 0],
            **{"cores": 64, "threads": cores, "versions": {"torch": "2"}, "made": "today"},
            "capacity": 1 << 30,
        },
        passes=(Pass("capture", 0.5), Pass("lower", 0.25)),
        blocks=tuple(
            ProfiledBlock(name, s, s, "model.py:1", 10)
            for s, names in enumerate(blocks)
            for name in names.split(", ")
        ),
        operations=tuple(operations),
        tasks=tuple(tasks),
        runs=tuple(runs),
        calls=tuple(calls),
        memory=tuple(KeptBytes(0, ipu, 100, 0, 100, 200) for ipu in range(stages)),
        tensors=tuple(Tensor(ipu, "x", "activation", 1024, ipu, end) for ipu, end in enumerate(ends)),
        schedule=tuple(sorted(program, key=lambda tick: (tick.tick, tick.ipu))),
        options=(Option("device_iterations", "3", "1"),),
    )


def actions_of(stages, training):
    """Each phase waits for the one before: F0 F1 ... B1 B0."""
    phases = [("F", stage) for stage in range(stages)]
    phases += [("B", stage) for stage in reversed(range(stages))] if training else []
    return [
        Action(phase, stage, stage, (After(row - 1),) if row else ())
        for row, (phase, stage) in enumerate(phases)
    ]
