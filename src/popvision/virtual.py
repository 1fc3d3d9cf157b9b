"""Simulation of a step on separate devices, and of changed steps.

Each ipu is a device of its own: it does one thing at a time, in the order of the schedule. The costs are those that
a run has recorded, or that a plan estimates. To find what a change of the program gains, a changed `StepModel`
is simulated and compared. A plan for this host uses the same model with cores that share all ipus.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from popengine.order import BUILT_IN, ORDERS, Action, Order, Timeline, step_duration, timeline
from popengine.profile import Profile, TaskRun
from popengine.stages import even_cut

_MOST_TASKS = 6_000  # for a longer step two shorter ones are simulated, and their lengths extrapolated
_ANY_ORDER = Order("of a program", lambda step, action, micro_batch: ())
LEAST_GAIN = 0.05  # smallest gain that is promised: two measurements of one program differ by as much
_SAFETY = 0.75  # share of a simulated gain that is promised; caches and memory may take the rest


@dataclass(frozen=True)
class StepModel:
    """The computations of a step, their costs in ns, and the devices that run them."""

    actions: tuple[Action, ...]  # the computations of a micro-batch
    costs: tuple[float, ...]  # ns of each action
    updates: Mapping[int, float]  # ns of the weight update, by ipu
    micro_batches: int  # of a replica
    order: str  # a key of `popengine.order.ORDERS`, or the name of a user's own schedule
    # (index of an action, micro-batch) of all tasks of a user's own schedule.
    program: tuple[tuple[int, int], ...] = ()
    # Whether an ipu runs its tasks in a fixed order; False: those first that are ready.
    keeps_order: bool = True
    # The number of cores that share the ipus of all replicas; 0: an ipu is a device (1 replica).
    cores: int = 0
    replicas: int = 1

    @classmethod
    def of(cls, profile: Profile, costs: Mapping[int, float], **more: Any) -> StepModel:
        """Return the model of a profile's step. `costs`: ns of one run of each row; `more`: fields that it does
        not give."""
        spent = defaultdict[tuple[str, int], float](float)
        for row, task in enumerate(profile.tasks):
            spent[task.phase, task.stage] += costs.get(row, 0.0)
        values = tuple(spent[action.phase, action.stage] for action in profile.actions)
        order = profile.facts.get("mode", "")
        if order not in ORDERS:
            number = {(action.phase, action.stage): i for i, action in enumerate(profile.actions)}
            ticks = ((number[tick.phase, tick.stage], tick.micro_batch) for tick in profile.schedule)
            more["program"] = tuple(ticks)
        return cls(profile.actions, values, order=order, **more)

    @property
    def is_known(self) -> bool:
        """Return whether the step can be simulated: its order is known, or all tasks of its schedule are."""
        return self.order in ORDERS or len(self.program) == self.micro_batches * len(self.actions)

    @property
    def work(self) -> float:
        """Return the ns of all computations of a step."""
        return self.replicas * (self.micro_batches * sum(self.costs) + sum(self.updates.values()))

    def bubble(self, length: float) -> float:
        """Return the share of time in which the devices wait, in a step of `length` ns."""
        devices = self.cores or len({action.ipu for action in self.actions})
        return max(0.0, 1 - self.work / (length * devices)) if length else 0.0


def simulated_ns(step: StepModel) -> float:
    """Return the ns of a step, simulated by `simulate_step`. A long step is extrapolated from two short ones."""

    def run(micro_batches: int) -> float:
        return simulate_step(replace(step, micro_batches=micro_batches))[1].length

    if step.program:
        return run(step.micro_batches)
    return step_duration(step.actions, step.micro_batches, run, _MOST_TASKS // step.replicas)


def simulate_step(step: StepModel) -> tuple[list[tuple[int, int]], Timeline]:
    """Return the tasks of a step, each as (index in `step.actions`, micro-batch), and their timeline. The
    last entries of the timeline are the weight updates, which are not in the list of tasks.

    The fixed order of an ipu is that of `step.program`, or that in which its tasks begin if each takes one tick.
    """
    updates = {ipu: cost for ipu, cost in step.updates.items() if cost}  # one for all replicas
    order, count, program = ORDERS.get(step.order, _ANY_ORDER), step.micro_batches, step.program
    if not (program or step.cores) and step.keeps_order:
        tasks, ticks = timeline(step.actions, count, order)
        program = [tasks[number] for number in ticks.order]
    return timeline(step.actions, count, order, step.cores, step.costs, step.replicas, updates, program)


def other_schedules(step: StepModel) -> list[StepModel]:
    """Return a step in its own order, then in the other ones that can run the same stages: each on its own ipu, with
    whole backwards. Empty, if the step's order is none of these."""
    known = (order for name, order in ORDERS.items() if name in BUILT_IN and not order.cuts_backwards)
    names = [order.name for order in known if order.placement in ("merged", "turns")]
    stages, ipus = ({getattr(action, name) for action in step.actions} for name in ("stage", "ipu"))
    if step.order not in names or not 1 < len(ipus) == len(stages):
        return []
    return [replace(step, order=name) for name in (step.order, *(n for n in names if n != step.order))]


def runs_on_devices(
    profile: Profile, step: StepModel, row_costs: Mapping[int, float], most: int = _MOST_TASKS
) -> list[TaskRun]:
    """Return what separate devices run in one step, as a profile would record it, by start.

    Args:
        row_costs: ns of one run of each row of the table; those of an action run one after another
        most:      of a step with more actions only the first micro-batches are returned
    """
    if not any(step.costs):
        return []
    rows_of = defaultdict(list)  # by (phase, stage)
    for row, task in enumerate(profile.tasks):
        if task.phase:
            rows_of[task.phase, task.stage].append(row)
    drawn = min(step.micro_batches, max(1, most // len(step.actions)))
    tasks, found = simulate_step(replace(step, micro_batches=drawn))
    runs = []
    for (number, micro_batch), start in zip(tasks, found.starts, strict=False):
        action = step.actions[number]
        own = rows_of[action.phase, action.stage]
        ends = [start + spent for spent in accumulate(row_costs.get(row, 0.0) for row in own)]
        for row, begin, end in zip(own, [start, *ends], ends, strict=False):
            runs.append(TaskRun(0, 0, row, micro_batch, 0, -1, round(begin), round(end)))
    updating = {task.ipu: row for row, task in enumerate(profile.tasks) if task.kind == "update"}
    ipus = [ipu for ipu, cost in step.updates.items() if cost]
    for ipu, start, end in zip(ipus, found.starts[len(tasks) :], found.ends[len(tasks) :], strict=True):
        if ipu in updating:
            runs.append(TaskRun(0, 0, updating[ipu], -1, 0, -1, round(start), round(end)))
    return sorted(runs, key=lambda run: (run.start, run.end))


# ---- changes of the program ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A change of a program, and how many times as fast per row of data it makes the program."""

    kind: str  # stages, micro-batches or pipeline
    what: str  # the option to set, as code; or the change in words
    apart: float  # speedup on separate devices
    also: str  # other effects of the change


def promised_speedup(speedup: float, spread: float) -> float | None:
    """Return the speedup that advice may state for a simulated `speedup`: 1 + 75 % of the gain. Return None
    if these 75 % are not above 5 % and above `spread`."""
    sure = 1 + _SAFETY * (speedup - 1)
    return sure if sure > 1 + max(LEAST_GAIN, spread) else None


def advised_changes(profile: Profile, step: StepModel, spread: float) -> list[Change]:
    """Return at most one change of each kind; other stages first, then by speedup, the fastest first.

    Of the changes of a kind the first one is taken that has 70 % of the kind's largest gain; it is left out
    if `promised_speedup` returns None for its speedup. More micro-batches are not advised if other stages are:
    they would only fill the waits for the slowest stage.
    """
    if not sum(step.costs) or step.program:
        return []
    before, by_kind = simulated_ns(step), defaultdict(list)
    for kind, changed, what, also in _candidate_changes(profile, step):
        speedup = before / simulated_ns(changed) * changed.micro_batches / step.micro_batches
        by_kind[kind].append(Change(kind, what, speedup, also))
    found = []
    for same in by_kind.values():
        least = 1 + 0.7 * max(0.0, max(one.apart for one in same) - 1)
        found += [one for one in same if one.apart >= least][:1]
    found = [one for one in found if promised_speedup(one.apart, spread)]
    if any(one.kind == "stages" for one in found):
        found = [one for one in found if one.kind != "micro-batches"]
    return sorted(found, key=lambda one: (one.kind != "stages", -one.apart))


def _candidate_changes(profile: Profile, step: StepModel) -> Iterator[tuple[str, StepModel, str, str]]:
    """Yield (kind, changed step, what, also) of each change to simulate; see the fields of `Change`.

    The changes are other stages, more micro-batches, and a pipeline in place of sharded stages.
    """
    yield from _other_stages(profile, step)
    for factor in (2, 4, 8, 16):
        count, option = factor * step.micro_batches, "options.deviceIterations"
        also = f"a call takes {factor} times the rows"
        if profile.training:
            option = "options.Training.gradientAccumulation"
            also = f"the effective batch becomes {factor} times as large, so the learning rate may have to change"
        yield "micro-batches", replace(step, micro_batches=count), f"{option}({count})", also

    stages, ipus = len(profile.ipus), list(profile.ipus)
    least = ORDERS["1f1b"].least_micro_batches(stages, profile.training)
    if not ORDERS[step.order].overlaps and ipus == sorted(ipus) and step.micro_batches >= least > 1:
        also = "up to as many micro-batches as there are stages are held at the same time"
        yield "pipeline", replace(step, order="1f1b"), "poptorch.PipelinedExecution", also


def _other_stages(profile: Profile, step: StepModel) -> Iterator[tuple[str, StepModel, str, str]]:
    """Yield a change for each way to cut the model into as many stages of equal cost as possible: between
    blocks, and between modules of each depth. Nothing, if an ipu has several stages, or stages run in turns."""
    stages = len(profile.ipus)
    if stages < 2 or stages > len(profile.devices) or not ORDERS[step.order].overlaps:
        return
    modules = [operation.module.split(".") for operation in profile.operations]
    cuts = [("block", [operation.block for operation in profile.operations])]
    for depth in range(1, 1 + max(map(len, modules), default=0)):
        cuts.append(("module", [".".join(names[:depth]) for names in modules]))
    actions = [profile.pieces[operation.piece][:2] for operation in profile.operations]  # (phase, stage)
    shares = [operation.ns / (operation.calls or 1) for operation in profile.operations]
    costs, sums = dict.fromkeys(actions, 0.0), dict.fromkeys(actions, 0.0)
    costs |= {action[:2]: cost for action, cost in zip(step.actions, step.costs, strict=True)}
    for action, share in zip(actions, shares, strict=True):
        sums[action] += share
    for kind, names in cuts:
        forward = (name for name, action in zip(names, actions, strict=True) if action[0] == "F")
        units = [name for name in dict.fromkeys(forward) if name not in ("", "?")]  # in order of the data
        if len(units) <= stages:
            continue
        spent, current = [defaultdict[str, float](float) for _ in units], 0
        unit_of = {name: number for number, name in enumerate(units)}
        for (phase, stage), name, share in zip(actions, names, shares, strict=True):
            current = unit_of.get(name, current)
            spent[current][phase] += costs[phase, stage] * share / (sums[phase, stage] or 1.0)
        begins = even_cut([sum(each.values()) for each in spent], stages)
        parts = [spent[begin:end] for begin, end in pairwise([*begins, len(units)])]
        changed = [sum(each[action.phase] for each in parts[action.stage]) for action in step.actions]
        first = ", ".join(units[begin] for begin in begins[1:])
        what = f"stages that begin with the {kind}{'s' * (stages > 2)} {first}"
        also = f"the results have the same bits; poptorch.AutoBalance({stages}) also cuts by measured costs"
        yield "stages", replace(step, costs=tuple(changed)), what, also
