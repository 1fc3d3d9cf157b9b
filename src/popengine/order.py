"""The order of a step: which of its ready tasks runs first, and how many micro-batches may be under way.

An `Order` is a value: a key, by which a device chooses among ready tasks, and bounds, which keep memory small. Engine,
drawings and simulations use the same order; `ORDERS` has those that have a name. On separate devices each ipu
does one thing at a time; cores that share all ipus sort their tasks by the same key.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import product
from types import MappingProxyType
from typing import Literal, NamedTuple

from .errors import Error, did_you_mean

Phase = Literal["F", "B", "W"]  # forward; backward; its weight gradients, if these are cut off


class After(NamedTuple):
    """The dependency of a row on another one, `row`: which tasks of `row` must end before a task begins."""

    row: int
    behind: int | None = 0  # how many micro-batches earlier the task of `row` is; None: all of its tasks
    group: int = 1  # number of neighbouring replicas whose tasks must end; 1: only that of the same replica


class Action(NamedTuple):
    """One phase of one stage, which runs for each micro-batch. The rows in `after` are indices of actions."""

    phase: str  # a `Phase`
    stage: int
    ipu: int
    after: tuple[After, ...] = ()


class StepActions(NamedTuple):
    """What an order sees of a step: its actions, in the order of the data, and the devices that run them."""

    actions: tuple[Action, ...]
    micro_batches: int
    cores: int = 0  # the number of cores that share all ipus; 0: each ipu is a device of its own

    @property
    def stages(self) -> int:
        return 1 + max((action.stage for action in self.actions), default=0)

    @property
    def width(self) -> int:
        """Return the number of micro-batches that keep all devices busy: one each stage, or core if more."""
        return max(self.stages, self.cores)

    def last_of(self, stage: int) -> int | None:
        """Return the index of the last action of a stage, or of the next one with a backward; None in inference."""
        backwards = [(i, one.stage) for i, one in enumerate(self.actions) if one.phase != "F"]
        return max(((-later, i) for i, later in backwards if later >= stage), default=(0, None))[1]


@dataclass(frozen=True)
class Order:
    """The rule by which devices choose among ready tasks, and the properties that compilation needs.

    Args:
        name:      under which `ORDERS` has it
        key:       maps (step, action, micro-batch) to a key: of the ready tasks, that with the smallest runs first
        bounds:    maps (step, action) to the dependencies by which the action waits for earlier micro-batches;
            `After.row` is the index of an action in `step.actions`
        in_flight: maps a step to the most micro-batches that have begun and not ended; more never begin
        overlaps:  whether stages work on different micro-batches at the same time
        placement: "merged": neighbouring stages of one ipu are one stage; "apart": they stay apart; "loop", "v": as
            "apart", and training needs the layout of stages of this name; "turns": each change of ipu in the forward
            begins a stage, and blocks of a stage may have ipus of their own
        cuts_backwards: whether a backward is two actions: B computes what the stage before reads, W the rest: mostly
            the gradients of weights
    """

    name: str
    key: Callable[[StepActions, Action, int], tuple[float, ...]]
    bounds: Callable[[StepActions, Action], Sequence[After]] = lambda step, action: ()
    in_flight: Callable[[StepActions], int] = lambda step: step.micro_batches
    overlaps: bool = True
    placement: Literal["merged", "apart", "loop", "v", "turns"] = "merged"
    cuts_backwards: bool = False

    def layout_on(self, ipus: Sequence[int]) -> list[int]:
        """Return the ipu of each stage in the layout that the order needs on several ipus: loops such as 0, 1, 0, 1, or
        a V such as 0, 1, 1, 0. If the order runs in any layout, return `ipus`, which are those of the stages."""
        names = [*dict.fromkeys(ipus)]
        n = len(names)
        if n == 1 or self.placement not in ("loop", "v"):
            return [*ipus]
        return names * max(2, -(-len(ipus) // n)) if self.placement == "loop" else [*names, *reversed(names)]

    def all_bounds(self, step: StepActions) -> list[list[After]]:
        """Return the bounds of each action; the first ones of a micro-batch wait for that `in_flight` before, too."""
        awaited = {edge.row for action in step.actions for edge in action.after if edge.behind == 0}
        last = [After(row, self.in_flight(step)) for row in range(len(step.actions)) if row not in awaited]
        return [
            [*self.bounds(step, action), *(() if any(edge.behind == 0 for edge in action.after) else last)]
            for action in step.actions
        ]


def _bounds_of_1f1b(step: StepActions, action: Action) -> Sequence[After]:
    """A forward waits for a backward of its stage, with (stages - stage) micro-batches in between, or `cores` if
    more."""
    last = step.last_of(action.stage)
    if action.phase != "F" or last is None:
        return ()
    return (After(last, max(step.stages - action.stage, step.cores)),)


def interleaved_tick(step: StepActions, action: Action, micro_batch: int) -> tuple[float]:
    """Return the tick at which a full pipeline runs an action, if it takes micro-batches in groups of as many as there
    are ipus, each group through the ipus' first stages, then through their second ones, and so on."""
    ipus = len({one.ipu for one in step.actions})
    rounds = -(-step.stages // ipus)
    turn, ipu = divmod(action.stage if action.phase == "F" else step.stages - 1 - action.stage, ipus)
    group, member = divmod(micro_batch, ipus)
    begin = -0.5 if action.phase == "F" else ipus * (2 * rounds - 1)
    return (2 * ((group * rounds + turn) * ipus + member) + ipu + begin,)


def _v_key(step: StepActions, action: Action, micro_batch: int) -> tuple[float, ...]:
    """W runs where nothing else is ready; F is sorted by micro-batch - 2 * stage, and B by micro-batch - stage / 2.

    So an ipu in a V, which has stages i and 2n - 1 - i of 2n, begins new micro-batches last.
    """
    is_forward = action.phase == "F"
    return action.phase == "W", micro_batch - action.stage * (2 if is_forward else 0.5), is_forward


@lru_cache(maxsize=64)
def _dualpipe_v_places(rank: int, ipus: int, micro_batches: int) -> dict[tuple[str, int], int]:
    """Return the place of each (phase and half, micro-batch) in the program of ipu `rank` in a V of ipus, without the
    last W's. Half 0 of the V is where the data moves away from ipu 0, half 1 where it comes back."""
    later = ipus - rank - 1
    program = [
        *["F0"] * (2 * later),
        *["F0", "F1"] * (rank + 1),
        *["B1", "W1", "F1"] * later,
        *["F0", "B1", "W1", "F1", "B0", "W0"] * (micro_batches - ipus - later),
        *["B1", "W1", "F1", "B0", "W0"] * later,
        *["B1", "B0"] * (rank + 1),
        *["B0"] * later,
    ]
    counts = Counter[str]()
    places = {}
    for place, name in enumerate(program):
        places[name, counts[name]] = place
        counts[name] += 1
    return places


def _dualpipe_v_key(step: StepActions, action: Action, micro_batch: int) -> tuple[float, ...]:
    """An ipu in a V pairs the forward of one half with the backward of the other half, on another micro-batch. W's that
    its program leaves out run where nothing else is ready."""
    ipus = -(-step.stages // 2)
    half = int(action.stage >= ipus)
    rank = 2 * ipus - 1 - action.stage if half else action.stage
    places = _dualpipe_v_places(rank, ipus, step.micro_batches)
    return places.get((f"{action.phase}{half}", micro_batch), math.inf), micro_batch


def _v_order(name: str, key: Callable[[StepActions, Action, int], tuple[float, ...]]) -> Order:
    """Return an order for a V of stages: stages i and 2n - 1 - i of n ipus are on ipu i."""
    return Order(
        name,
        key,
        _bounds_of_1f1b,
        in_flight=lambda step: 2 * step.width,
        placement="v",
        cuts_backwards=True,
    )


ORDERS: dict[str, Order] = {
    order.name: order
    for order in (
        Order(
            "1f1b",
            lambda step, action, micro_batch: (action.phase == "F", -action.stage, micro_batch),
            _bounds_of_1f1b,
            lambda step: step.width,
        ),
        Order("gpipe", lambda step, action, micro_batch: (action.phase != "F", -action.stage, micro_batch)),
        Order("interleaved", interleaved_tick, _bounds_of_1f1b, lambda step: step.width, placement="loop"),
        Order(
            "zero-bubble",
            lambda step, action, micro_batch: ("BFW".index(action.phase), -action.stage, micro_batch),
            # A stage holds at most as many micro-batches as the first stage does in 1F1B. W runs where nothing else is
            # ready.
            lambda step, action: [edge._replace(behind=step.width) for edge in _bounds_of_1f1b(step, action)],
            in_flight=lambda step: 2 * step.width,
            cuts_backwards=True,
        ),
        _v_order("zero-bubble-v", _v_key),
        _v_order("dualpipe-v", _dualpipe_v_key),
        # One micro-batch passes all stages before the next begins.
        Order(
            "sharded",
            lambda step, action, micro_batch: (micro_batch,),
            in_flight=lambda step: 1,
            overlaps=False,
            placement="turns",
        ),
    )
}


BUILT_IN = frozenset(ORDERS)


def enter_order(order: Order) -> str:
    """Enter a user's order into `ORDERS`, in place of an earlier one of that name, and return its name."""
    if order.name in BUILT_IN and ORDERS[order.name] is not order:
        raise Error(f"{order.name!r} is the name of an order of Pando's\n  fix: give yours another name")
    ORDERS[order.name] = order
    return order.name


def order_named(name: str) -> Order:
    """Return an order of `ORDERS`. Raise Error for another name."""
    if name not in ORDERS:
        raise Error(
            f"there is no order {name!r}: known are {', '.join(ORDERS)}{did_you_mean(name, ORDERS)}\n"
            "  fix: one of these; an order of your own is known once a strategy with it was used:"
            " poptorch.PipelinedExecution(schedule=order)"
        )
    return ORDERS[name]


@dataclass(frozen=True)
class Timeline:
    """The start, end and device of each task."""

    starts: list[float]
    ends: list[float]
    devices: list[int]
    order: list[int]  # the indices of the tasks, by start

    @property
    def length(self) -> float:
        """Return the time at which the last task ends; 0 without tasks."""
        return max(self.ends, default=0)


def simulate(
    after: Sequence[Collection[int]], costs: Sequence[float], devices: int | Sequence[int]
) -> Timeline:
    """Return the timeline of tasks in virtual time: a free device runs the ready task of the smallest index.

    `after`: for each task, the indices of the tasks that must end before it begins; `devices`: the number of devices
    that share all tasks, or the device of each task. Raises Error if tasks wait for each other.
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
        if not running and any(waits_for):
            raise Error(
                f"in the order of this step {sum(map(bool, waits_for))} of {len(after)} tasks never begin\n"
                "  why: by its bounds tasks wait for each other\n"
                "  fix: let an action wait for earlier micro-batches only, which the order begins before it"
            )
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
    cores: int = 0,  # that share all ipus; 0: each ipu is a device
    costs: Sequence[float] = (),  # the time of each action; by default 1
    updates: Mapping[int, float] = MappingProxyType({}),  # by ipu: the time of its update, at the end
    program: Iterable[tuple[int, int]] = (),  # tasks, which each ipu runs in this order
) -> tuple[list[tuple[int, int]], Timeline]:
    """Return (action's index, micro-batch) of each task of a step, by ascending key, and their timeline."""
    step = StepActions(tuple(actions), micro_batches, cores)
    bounds = order.all_bounds(step)
    after = [(*action.after, *bound) for action, bound in zip(actions, bounds, strict=True)]
    tasks = [*product(range(len(actions)), range(micro_batches))]
    tasks.sort(key=lambda task: (order.key(step, actions[task[0]], task[1]), task[1], task[0]))
    index_of = {task: index for index, task in enumerate(tasks)}
    edges = [[(edge.row, edge.behind) for edge in edges if edge.behind is not None] for edges in after]
    needs = [[index_of[earlier, m - n] for earlier, n in edges[row] if n <= m] for row, m in tasks]
    last: dict[int, int] = {}
    for index, ipu in ((index_of[task], actions[task[0]].ipu) for task in program):
        needs[index] += [last[ipu]] if ipu in last else []
        last[ipu] = index
    durations = [float(costs[row]) if costs else 1.0 for row, _ in tasks]
    owners = [actions[row].ipu for row, _ in tasks]
    for ipu, cost in updates.items():
        needs.append([number for number in range(len(tasks)) if owners[number] == ipu])
        durations.append(cost)
    return tasks, simulate(needs, durations, cores or [*owners, *updates])


def step_duration(
    actions: Sequence[Action], micro_batches: int, run: Callable[[int], float], most: int = 20_000
) -> float:
    """Return the duration of a step; `run(count)` simulates a step of `count` micro-batches for it. That of a step with
    more than `most` tasks is extrapolated linearly from two shorter steps."""
    stages = 1 + max((action.stage for action in actions), default=0)
    short = 2 * stages + 4  # micro-batches, enough to fill the pipeline
    if len(actions) * micro_batches <= most or micro_batches <= short + stages:
        return run(micro_batches)
    before, after = run(short), run(short + stages)
    return after + (after - before) / stages * (micro_batches - short - stages)


def draw(actions: Sequence[Action], micro_batches: int, order: Order, cores: int = 0) -> str:
    """Return a step as a text grid: a row per ipu (or core), a column per tick, `..` an idle one; actions take one
    tick.

    F2 is the forward of micro-batch 2; in a row with several stages B1.2 is the backward of stage 1 on micro-batch 2.
    """
    tasks, times = timeline(actions, micro_batches, order, cores)
    device_name, devices = ("core", range(cores)) if cores else ("ipu", sorted({a.ipu for a in actions}))
    stages = {(device, actions[row].stage) for (row, _), device in zip(tasks, times.devices, strict=True)}
    is_shared = len(stages) > len({device for device, _ in stages})
    cells = {device: [".."] * int(times.length) for device in devices}
    for (row, m), device, start in zip(tasks, times.devices, times.starts, strict=True):
        phase, stage, *_ = actions[row]
        cells[device][int(start)] = f"{phase}{stage}.{m}" if is_shared else f"{phase}{m}"
    width = max((len(cell) for row in cells.values() for cell in row), default=2)
    return "".join(
        f"{device_name} {device} | {' '.join(cell.ljust(width) for cell in row).rstrip()}\n"
        for device, row in cells.items()
    )
