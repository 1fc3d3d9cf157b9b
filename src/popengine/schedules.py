"""The schedule of a step of a plan, as if each ipu were a device of its own."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from .ir import Plan
from .order import After, StepActions, draw, order_named, timeline
from .table import actions


def bounds_of_rows(plan: Plan, cores: int) -> Iterator[tuple[int, After]]:
    """Yield (row, edge) for each dependency by which the plan's order bounds memory, if `cores` cores share all ipus
    (0: each ipu is a device)."""
    step_actions, rows_of = actions(plan.tasks)
    computing = [[row for row in rows if plan.tasks[row].runs_piece] for rows in rows_of]
    step = StepActions(tuple(step_actions), plan.micro_batches, cores)
    for rows, bounds in zip(computing, order_named(plan.order).all_bounds(step), strict=True):
        for row in rows:
            if not any(edge.row in rows and not edge.behind for edge in plan.tasks[row].after):
                yield from ((row, bound._replace(row=computing[bound.row][-1])) for bound in bounds)


def drawn_schedule(plan: Plan, cores: int = 0) -> tuple[str, str]:
    """Return the name of a plan's order, and its schedule as a text grid; for `cores` see `order.draw`."""
    return plan.order, draw(actions(plan.tasks)[0], plan.micro_batches, order_named(plan.order), cores)


class SimulatedStep(NamedTuple):
    """Figures of a step that was simulated with given costs, as if each ipu were a device of its own."""

    length: float  # of the step, in ticks
    bubble: float  # share of the devices' time in which they wait
    most_in_flight: dict[int, int]  # by ipu: the most micro-batches whose activations its stages keep at once


def simulate_step(plan: Plan, ticks: Mapping[str, float]) -> SimulatedStep:
    """Return the figures of a plan's step in which a stage's F, B and W take `ticks`. A stage without B runs its whole
    backward in W, in the ticks of both."""
    step_actions, _ = actions(plan.tasks)
    phases = {(action.phase, action.stage) for action in step_actions}
    costs = [
        ticks[action.phase] + (ticks["B"] if action.phase == "W" and ("B", action.stage) not in phases else 0)
        for action in step_actions
    ]
    tasks, times = timeline(step_actions, plan.micro_batches, order_named(plan.order), costs=costs)
    ipus = sorted(set(plan.partition.ipus))
    in_flight, most = Counter[int](), dict.fromkeys(ipus, 0)
    for number in times.order:
        action = step_actions[tasks[number][0]]
        is_last = action.phase == ("W" if ("W", action.stage) in phases else "B")
        in_flight[action.ipu] += (action.phase == "F") - is_last
        most[action.ipu] = max(most[action.ipu], in_flight[action.ipu])
    work = plan.micro_batches * sum(costs)
    return SimulatedStep(times.length, 1 - work / (len(ipus) * times.length), most)
