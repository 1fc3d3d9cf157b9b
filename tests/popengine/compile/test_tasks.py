"""The table of a step: what each row waits for, what it frees, and what each ipu does of it."""

import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest
from engine_models import Net, enter, graph_of, stages
from torch import nn

from popengine.compile import compile_graph
from popengine.order import ORDERS, After, order_named, timeline
from popengine.settings import Counts, Optimizer, Settings
from popengine.table import actions


def plan_of(*ipus, order="1f1b", accumulation=8, iterations=1, training=True, instances=1):
    graph = graph_of(Net().train(training), training)
    settings = Settings(
        training,
        Counts(iterations=iterations, accumulation=accumulation, instances=instances),
        stages(*ipus, order=order),
        optimizer=Optimizer("sgd") if training else None,
    )
    return compile_graph(graph, settings)


def programs(plan):
    """(row, micro-batch) of the rows that each ipu runs in a step, in order, if each ipu is a device of its own and
    each action takes one tick. The micro-batch is -1 for a row of the whole step."""
    found, rows_of = actions(plan.tasks)
    tasks, times = timeline(found, plan.micro_batches, order_named(plan.order))
    is_first = [task.kind in ("copy", "send", "receive") and not task.phase for task in plan.tasks]
    rows = [(row, -1) for row, task in enumerate(plan.tasks) if is_first[row]]
    rows += [(row, tasks[i][1]) for i in times.order for row in rows_of[tasks[i][0]]]
    rows += [(row, -1) for row, task in enumerate(plan.tasks) if task.kind == "update"]
    return {ipu: [x for x in rows if plan.tasks[x[0]].ipu == ipu] for ipu in sorted(set(plan.partition.ipus))}


def instructions_of(plan, program):
    """The instructions of an ipu's program, each with its micro-batch."""
    return [(x, micro_batch) for row, micro_batch in program for x in plan.tasks[row].instructions]


LAYOUTS = [
    ((0, 1, 2, 3), "1f1b"),
    ((0, 1, 2, 0), "1f1b"),
    ((0, 0, 0, 0), "1f1b"),
    *(((0, 1, 0, 1), order) for order in ORDERS),
]


def waits(plan, row):
    """The rows that a row waits for, by their names."""
    return {(str(plan.tasks[edge.row]), edge.behind) for edge in plan.tasks[row].after}


def row_of(plan, name):
    (row,) = [row for row, task in enumerate(plan.tasks) if str(task) == name]
    return row


def test_the_table_of_a_small_model():
    plan = plan_of(0, 1, 0, 1, order="sharded", accumulation=3)
    names = [str(task) for task in plan.tasks]
    forward = ["copy", "copy", "F0", "F0", "F1", "F2", "F3"]  # F0 is cut at its buffers
    backward = ["B3", "sum B3", "B2", "sum B2", "B1", "sum B1", "B0", "sum B0"]
    assert names == [*forward, *backward, "update"]
    assert waits(plan, row_of(plan, "F1")) == {("F0", 0)}
    assert ("F3", 0) in waits(plan, row_of(plan, "B3"))
    assert waits(plan, row_of(plan, "sum B0")) == {("B0", 0), ("sum B0", 1)}
    done = {name for name, behind in waits(plan, row_of(plan, "update")) if behind is None}
    assert done == {*forward, *backward} - {"copy"}


def test_a_plan_has_the_size_of_the_model_and_not_of_the_batch():
    few, many = (plan_of(0, 1, 2, 3, accumulation=count) for count in (8, 1024))
    assert few.tasks == many.tasks


def test_processes_exchange_in_one_order_and_before_any_update():
    plan = plan_of(0, 1, 2, 3, instances=2)
    exchanges = [row for row, task in enumerate(plan.tasks) if task.kind == "exchange"]
    assert len(exchanges) == 4
    for before, row in pairwise(exchanges):
        assert After(before) in plan.tasks[row].after
    assert After(exchanges[-1]) in plan.tasks[row_of(plan, "update")].after


@pytest.mark.parametrize(("ipus", "order"), LAYOUTS)
@pytest.mark.parametrize("training", [True, False])
def test_each_value_is_freed_by_its_last_reader_which_waits_for_the_others(ipus, order, training):
    plan = plan_of(
        *ipus,
        order=order,
        training=training,
        iterations=1 if training else 8,
        accumulation=8 if training else 1,
    )
    reach = []
    for row, task in enumerate(plan.tasks):
        assert all(edge.row < row or edge.behind for edge in task.after)
        before = [edge.row for edge in task.after if edge.behind == 0]
        reach.append(set(before).union(*(reach[other] for other in before)))
    readers, freed = {}, {}
    for row, task in enumerate(plan.tasks):
        names = {name for x in task.instructions if x.kind in ("accumulate", "store") for name in x.names}
        if task.kind in ("forward", "backward"):
            names |= {*plan.partition.pieces[task.piece].reads, *plan.partition.pieces[task.piece].writes}
        for name in names:
            readers.setdefault(name, set()).add(row)
        for name in task.frees:
            assert name not in freed
            freed[name] = row
    for name, row in freed.items():
        assert readers[name] - {row} <= reach[row], name
    state = {name for names in plan.slots_of.values() for name in names}
    assert readers.keys() - state <= freed.keys()


@pytest.mark.parametrize(("ipus", "order"), LAYOUTS)
def test_no_value_of_a_micro_batch_outlives_its_step_on_an_ipu(ipus, order):
    """Runs the programs on names alone: what is read is there, and nothing is left at the end."""
    plan = plan_of(*ipus, order=order)
    for program in programs(plan).values():
        alive = set()
        for i, m in instructions_of(plan, program):
            names = {(name, m) for name in i.names}
            match i.kind:
                case "load" | "receive" if m >= 0:
                    alive |= names
                case "compute":
                    alive -= names
                    alive |= {(name, m) for name in plan.partition.pieces[i.piece].writes}
                case "free":
                    alive -= names
                case "accumulate" | "keep" | "store":
                    assert names <= alive
        assert not alive


@pytest.mark.parametrize(("ipus", "order"), LAYOUTS)
def test_what_is_sent_is_received(ipus, order):
    sent, received = {}, {}
    plan = plan_of(*ipus, order=order)
    for ipu, program in programs(plan).items():
        for i, m in instructions_of(plan, program):
            if i.kind == "send":
                assert i.peer != ipu
                sent.setdefault((i.channel, ipu, i.peer), set()).add((i.names, m))
            elif i.kind == "receive":
                received.setdefault((i.channel, i.peer, ipu), set()).add((i.names, m))
    assert sent == received


def test_a_shared_weight_goes_once_a_step_to_the_stage_that_borrows_it():
    moves = [x for t in plan_of(0, 1, 2, 3).tasks if t.kind == "copy" for x in t.instructions]
    assert [(x.kind, x.channel, x.peer, x.names) for x in moves] == [
        ("send", "weights of 2", 3, ("parameter_c_weight",)),
        ("receive", "weights of 2", 2, ("parameter_c_weight",)),
    ]


def test_each_ipu_updates_what_lives_there():
    plan = plan_of(0, 1, 2, 3)
    updates = {x.peer: x for t in plan.tasks for x in t.instructions if x.kind == "update"}
    assert {ipu: sorted(update.keys) for ipu, update in updates.items()} == {
        0: ["a.bias", "a.weight", "norm.bias", "norm.weight"],
        1: ["b.bias", "b.weight"],
        2: ["c.bias", "c.weight"],
        3: ["d.bias", "d.weight"],
    }


def test_running_statistics_pass_from_one_micro_batch_to_the_next():
    plan = plan_of(0, 1, 2, 3)
    (row,) = [row for row, t in enumerate(plan.tasks) for x in t.instructions if x.kind == "keep"]
    (kept,) = [x for x in plan.tasks[row].instructions if x.kind == "keep"]
    assert set(kept.keys) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert After(row, 1) in plan.tasks[row].after
    first = plan.tasks[row_of(plan, "F1")]  # no later stage waits for them
    assert all(edge.behind == 0 for edge in first.after)


@pytest.mark.parametrize("seed", "1234")
def test_the_plan_is_the_same_in_processes_with_other_hash_seeds(seed):
    # Names were in sets: processes freed values in another order, and "the instances differ at compilation".
    made = "repr(plan_of(0, 0, 0, 0, order='sharded', training=False, iterations=8, accumulation=1).tasks)"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", f"from test_tasks import plan_of; print({made})"],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert done.stdout.strip() == eval(made)


class Chain(nn.Module):
    """Four layers, blocks A to D, and a loss."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x, y):
        for name, layer in zip("ABCD", self.layers, strict=True):
            enter(name)
            x = layer(x).tanh()
        return x, nn.functional.cross_entropy(x, y)


@pytest.mark.parametrize(("order", "ticks"), [("1f1b", 33), ("zero-bubble", 27)])
def test_weight_gradients_wait_for_the_backward_of_their_stage_alone(order, ticks):
    """Values that stages share are freed by rows for which nothing else of the micro-batch waits."""
    settings = Settings(True, Counts(1, 8), stages(0, 1, 2, 3, order=order), optimizer=Optimizer("sgd"))
    plan = compile_graph(graph_of(Chain()), settings)
    found, _ = actions(plan.tasks)
    backwards = Counter(action.stage for action in found if action.phase != "F")
    costs = [1 if action.phase == "F" else 2 / backwards[action.stage] for action in found]
    assert timeline(found, 8, ORDERS[order], costs=costs)[1].length == ticks
    index_of = {(action.phase, action.stage): index for index, action in enumerate(found)}
    for action in (action for action in found if action.phase == "W"):
        assert action.after == (After(index_of["B", max(1, action.stage)]),)
