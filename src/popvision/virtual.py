"""Simulation of a step on separate devices, with the costs that a run has recorded.

Each ipu is a device of its own: it does one thing at a time, in the order of the schedule. Transfers take no time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from popengine.order import ORDERS, Action, Order, Timeline, step_duration, timeline
from popengine.profile import Profile, TaskRun

_MOST_TASKS = 6_000  # for a longer step two shorter ones are simulated, and their lengths extrapolated
_ANY_ORDER = Order("of a program", lambda step, action, micro_batch: ())


@dataclass(frozen=True)
class DeviceStep:
    """The computations of a replica's step on separate devices, and their costs in ns."""

    actions: tuple[Action, ...]  # the computations of a micro-batch
    costs: tuple[float, ...]  # ns of each action
    updates: Mapping[int, float]  # ns of the weight update, by ipu
    micro_batches: int
    order: str  # a key of `popengine.order.ORDERS`, or the name of a user's own schedule
    # (index of an action, micro-batch) of all tasks of a user's own schedule.
    program: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, profile: Profile, row_costs: Mapping[int, float], updates: Mapping[int, float]) -> DeviceStep:
        """Return a profile's step. `row_costs`: ns of one run of each row; `updates`: ns by ipu."""
        spent = defaultdict[tuple[str, int], float](float)
        for row, task in enumerate(profile.tasks):
            spent[task.phase, task.stage] += row_costs.get(row, 0.0)
        costs = tuple(spent[action.phase, action.stage] for action in profile.actions)
        order, program = profile.facts.get("mode", ""), ()
        if order not in ORDERS:
            number = {(action.phase, action.stage): i for i, action in enumerate(profile.actions)}
            program = tuple((number[t.phase, t.stage], t.micro_batch) for t in profile.schedule)
        count = profile.facts.get("schedule_micro_batches", 1)
        return cls(profile.actions, costs, updates, count, order, program)

    @property
    def is_known(self) -> bool:
        """Return whether the step can be simulated: its order is known, or all tasks of its schedule are."""
        return self.order in ORDERS or len(self.program) == self.micro_batches * len(self.actions)

    @cached_property
    def ns(self) -> float:
        """Return the duration of the step. A long step is extrapolated from two short ones."""
        if self.program:
            return self.times(self.micro_batches)[1].length
        return step_duration(
            self.actions, self.micro_batches, lambda count: self.times(count)[1].length, _MOST_TASKS
        )

    @property
    def work(self) -> float:
        """Return the ns of all computations of the step."""
        return self.micro_batches * sum(self.costs) + sum(self.updates.values())

    @property
    def bubble(self) -> float:
        """Return the share of time in which the devices wait."""
        devices = len({action.ipu for action in self.actions})
        return max(0.0, 1 - self.work / (self.ns * devices)) if self.ns else 0.0

    def times(self, micro_batches: int) -> tuple[list[tuple[int, int]], Timeline]:
        """Return the tasks of a step of so many micro-batches, each as (index in `actions`, micro-batch), and their
        timeline. The last entries of the timeline are the weight updates, which are not in the list of tasks.

        An ipu runs its tasks in the order of `program`, or that in which they begin if each takes one tick.
        """
        order, program = ORDERS.get(self.order, _ANY_ORDER), self.program
        if not program:
            tasks, ticks = timeline(self.actions, micro_batches, order)
            program = [tasks[number] for number in ticks.order]
        updates = {ipu: cost for ipu, cost in self.updates.items() if cost}
        return timeline(
            self.actions, micro_batches, order, costs=self.costs, updates=updates, program=program
        )

    def runs(self, profile: Profile, row_costs: Mapping[int, float]) -> list[TaskRun]:
        """Return what the devices run, as a profile would record it, by start; of a long step only the first
        micro-batches. `row_costs`: ns of one run of each row of the table; those of an action run one after another."""
        if not any(self.costs):
            return []
        rows_of = defaultdict(list)  # by (phase, stage)
        for row, task in enumerate(profile.tasks):
            if task.phase:
                rows_of[task.phase, task.stage].append(row)
        tasks, times = self.times(min(self.micro_batches, max(1, _MOST_TASKS // len(self.actions))))
        runs = []
        for (number, micro_batch), start in zip(tasks, times.starts, strict=False):
            action = self.actions[number]
            rows = rows_of[action.phase, action.stage]
            ends = [start + spent for spent in accumulate(row_costs.get(row, 0.0) for row in rows)]
            for row, begin, end in zip(rows, [start, *ends], ends, strict=False):
                runs.append(TaskRun(0, 0, row, micro_batch, 0, -1, round(begin), round(end)))
        updating = {task.ipu: row for row, task in enumerate(profile.tasks) if task.kind == "update"}
        ipus = [ipu for ipu, cost in self.updates.items() if cost]
        for ipu, start, end in zip(ipus, times.starts[len(tasks) :], times.ends[len(tasks) :], strict=True):
            if ipu in updating:
                runs.append(TaskRun(0, 0, updating[ipu], -1, 0, -1, round(start), round(end)))
        return sorted(runs, key=lambda run: (run.start, run.end))
