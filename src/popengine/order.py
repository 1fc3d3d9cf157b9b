"""The order of a step: which of its ready tasks runs first, and how many micro-batches may be under way.

An order is a key, by which a device chooses among ready tasks, and a bound on the micro-batches under way.
Engine, drawings and virtual time use the same orders. A new order is an `Order` that is entered in `ORDERS`.

    one forward, one backward       each ipu is a device of its own: profiles, drawings, plans
    ipu 0 | F0 F1 .. B0 F2 B1 .. B2
    ipu 1 | .. F0 B0 F1 B1 F2 B2 ..
    depth first                     cores share all ipus: each takes the earliest micro-batch that can go on
    core 0 | F0.0 F1.0 B1.0 B0.0 F0.2 F1.2 B1.2 B0.2
    core 1 | F0.1 F1.1 B1.1 B0.1 F0.3 F1.3 B1.3 B0.3
    in turns                        one micro-batch after another
    ipu 0 | F0 .. .. B0 F1 .. .. B1
    ipu 1 | .. F0 B0 .. .. F1 B1 ..
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from types import MappingProxyType
from typing import NamedTuple


class After(NamedTuple):
    """The dependency of a row on another one, `row`: which tasks of `row` must end before a task begins.

    Args:
        behind: how many micro-batches earlier the task of `row` is; None: all tasks of `row` must end
        group:  number of neighbouring replicas; the task of each must end; 1: only that of the same replica
    """

    row: int
    behind: int | None = 0
    group: int = 1


class Action(NamedTuple):
    """One phase of one stage, which runs for each micro-batch. The rows in `after` are indices of actions."""

    phase: str  # F or B
    stage: int
    ipu: int
    after: tuple[After, ...] = ()


@dataclass(frozen=True)
class Order:
    """The rule by which devices choose among ready tasks.

    Args:
        key:   maps (action's index, action, micro-batch) to a key: the ready task with the smallest runs first
        bound: maps (action's index, all actions, number of devices that share them) to the dependency by
            which the action waits for an earlier micro-batch, or to None
    """

    name: str
    key: Callable[[int, Action, int], tuple[int, ...]]
    bound: Callable[[int, Sequence[Action], int], After | None]


def _stage_count(actions: Sequence[Action]) -> int:
    return 1 + max((action.stage for action in actions), default=0)


def _bound_in_flight(row: int, actions: Sequence[Action], in_flight: int) -> After | None:
    """Return the dependency that keeps at most `in_flight` micro-batches under way: the first action of a
    micro-batch waits for the last action of an earlier one. None: action `row` isn't the first."""
    is_first = all(after.behind != 0 for after in actions[row].after)
    return After(len(actions) - 1, in_flight) if is_first else None


def _bound_of_1f1b(row: int, actions: Sequence[Action], devices: int) -> After | None:
    """Return the dependency by which action `row` waits for an earlier micro-batch in 1F1B order; None: none.

    A forward waits for the backward of its stage, so that at most (stages - stage) micro-batches are between
    both. Without backwards (in inference) at most `stages` micro-batches are under way.
    """
    action, stages = actions[row], _stage_count(actions)
    backwards = [i for i, other in enumerate(actions) if other.phase == "B" and other.stage >= action.stage]
    if action.phase == "F" and backwards:
        return After(backwards[-1], stages - action.stage)
    return _bound_in_flight(row, actions, stages) if not backwards else None


ONE_FORWARD_ONE_BACKWARD = Order(
    "one forward, one backward",
    lambda row, action, micro_batch: (action.phase == "F", -action.stage, micro_batch),
    _bound_of_1f1b,
)
DEPTH_FIRST = Order(
    "depth first",
    lambda row, action, micro_batch: (micro_batch, row),
    lambda row, actions, devices: _bound_in_flight(row, actions, max(_stage_count(actions), devices)),
)
IN_TURNS = Order(
    "in turns",
    lambda row, action, micro_batch: (micro_batch, row),
    lambda row, actions, devices: _bound_in_flight(row, actions, 1),
)
# For each mode of a strategy: where each ipu is a device of its own, and where cores share all ipus.
ORDERS: dict[str, tuple[Order, Order]] = {
    "pipelined": (ONE_FORWARD_ONE_BACKWARD, DEPTH_FIRST),
    "sharded": (IN_TURNS, IN_TURNS),
    "phased": (IN_TURNS, IN_TURNS),
}


@dataclass(frozen=True)
class Timeline:
    """The start, end and device of each task. A task that never runs has device -1, start 0, end 0."""

    starts: list[float]
    ends: list[float]
    devices: list[int]
    order: list[int]  # the indices of the tasks, by start

    @property
    def length(self) -> float:
        """Return the time at which the last task ends; 0 without tasks."""
        return max(self.ends, default=0)


def simulate(
    after: Sequence[Sequence[int]], costs: Sequence[float], devices: int | Sequence[int]
) -> Timeline:
    """Return the timeline of tasks in virtual time: a free device runs the ready task of the smallest index.

    Args:
        after:   for each task, the indices of the tasks that must end before it begins
        costs:   the time of each task
        devices: the number of devices that share all tasks; or the device of each task
    """
    followers: list[list[int]] = [[] for _ in after]
    for task, needs in enumerate(after):
        for need in needs:
            followers[need].append(task)
    waits_for = [len(needs) for needs in after]
    # Devices that share tasks are group 0; else each device is a group.
    if isinstance(devices, int):
        groups, idle = [0] * len(after), {0: list(range(devices))}
    else:
        groups, idle = devices, {device: [device] for device in devices}
    ready: dict[int, list[int]] = {group: [] for group in idle}
    for task, missing in enumerate(waits_for):
        if not missing:
            ready[groups[task]].append(task)  # in order, so it is a heap
    starts, ends, used, order = [0.0] * len(after), [0.0] * len(after), [-1] * len(after), []
    running: list[tuple[float, int]] = []  # end and task
    now, changed = 0.0, set(idle)  # `changed`: groups with a new idle device or ready task
    while True:
        for group in sorted(changed):
            while idle[group] and ready[group]:
                task = heappop(ready[group])
                starts[task], ends[task], used[task] = now, now + costs[task], heappop(idle[group])
                heappush(running, (ends[task], task))
                order.append(task)
        if not running:
            return Timeline(starts, ends, used, order)
        now, changed = running[0][0], set()
        while running and running[0][0] == now:
            task = heappop(running)[1]
            heappush(idle[groups[task]], used[task])
            changed.add(groups[task])
            for follower in followers[task]:
                waits_for[follower] -= 1
                if not waits_for[follower]:
                    heappush(ready[groups[follower]], follower)
                    changed.add(groups[follower])


def timeline(
    actions: Sequence[Action],
    micro_batches: int,
    order: Order,
    cores: int = 0,
    costs: Sequence[float] = (),
    replicas: int = 1,
    updates: Mapping[int, float] = MappingProxyType({}),
    keeps_order: bool = False,
) -> tuple[list[tuple[int, int]], Timeline]:
    """Return the tasks of a step, and their timeline in virtual time.

    Args:
        cores:    the number of cores that share the ipus of all replicas; 0: each ipu is a device (1 replica)
        costs:    the time of each action; by default 1
        replicas: the number of replicas that run the same actions
        updates:  the time of the weight update of each ipu, which runs after all tasks of the ipu
        keeps_order: each ipu runs its tasks in the order that follows if all costs are 1, as its program does
    Returns: (action's index, micro-batch) of each task, by ascending key; and their timeline, updates last
    """
    bounds = [order.bound(row, actions, cores or 1) for row in range(len(actions))]
    after = [(*action.after, *filter(None, [bound])) for action, bound in zip(actions, bounds, strict=True)]
    tasks = [
        (row, m, r) for m in range(micro_batches) for row in range(len(actions)) for r in range(replicas)
    ]
    tasks.sort(key=lambda task: (*order.key(task[0], actions[task[0]], task[1]), task[2]))
    index_of = {task: index for index, task in enumerate(tasks)}
    needs = [
        [
            index_of[edge.row, m - edge.behind, r]
            for edge in after[row]
            if edge.behind is not None and edge.behind <= m
        ]
        for row, m, r in tasks
    ]
    each = [float(costs[row]) if costs else 1.0 for row, _, _ in tasks]
    owners = [actions[row].ipu for row, _, _ in tasks]
    if keeps_order:
        before: dict[int, int] = {}
        for number in simulate(needs, [1.0] * len(tasks), owners).order:
            needs[number] += [before[owners[number]]] if owners[number] in before else []
            before[owners[number]] = number
    for ipu, cost in updates.items():
        needs.append([number for number in range(len(tasks)) if owners[number] == ipu])
        each.append(cost)
    return [task[:2] for task in tasks], simulate(needs, each, cores or [*owners, *updates])


def step_duration(
    actions: Sequence[Action], micro_batches: int, run: Callable[[int], float], most: int = 20_000
) -> float:
    """Return the duration of a step; `run(count)` simulates a step of `count` micro-batches for it.

    The duration of a step with more than `most` tasks is extrapolated linearly from two shorter steps.
    """
    stages = max(1, _stage_count(actions))
    short = 2 * stages + 4  # micro-batches, enough to fill the pipeline
    if len(actions) * micro_batches <= most or micro_batches <= short + stages:
        return run(micro_batches)
    before, after = run(short), run(short + stages)
    return after + (after - before) / stages * (micro_batches - short - stages)


def draw(actions: Sequence[Action], micro_batches: int, order: Order, cores: int = 0) -> str:
    """Return a step as a text grid: a row per ipu (or core), a column per tick. Each action takes one tick.

    F2 is the forward of micro-batch 2. If a row has several stages, the stage comes before the dot: B1.2 is
    the backward of stage 1 on micro-batch 2. `..` is an idle tick.
    """
    tasks, found = timeline(actions, micro_batches, order, cores)
    kind, devices = ("core", range(cores)) if cores else ("ipu", sorted({a.ipu for a in actions}))
    stages: dict[int, set[int]] = {}
    for (row, _), device in zip(tasks, found.devices, strict=True):
        stages.setdefault(device, set()).add(actions[row].stage)
    shared = any(len(own) > 1 for own in stages.values())
    cells = {device: [".."] * int(found.length) for device in devices}
    for (row, m), device, start in zip(tasks, found.devices, found.starts, strict=True):
        phase, stage, *_ = actions[row]
        cells[device][int(start)] = f"{phase}{stage}.{m}" if shared else f"{phase}{m}"
    width = max((len(cell) for row in cells.values() for cell in row), default=2)
    return "".join(
        f"{kind} {device} | {' '.join(cell.ljust(width) for cell in row).rstrip()}\n"
        for device, row in cells.items()
    )
