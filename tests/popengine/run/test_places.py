"""Ipus of a replica at several places: an engine runs the rows of its place, and all have the bits of one engine."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from engine_models import OTHERS, enter, graph_of, once, stages, train_state_of
from places_in_memory import SeveralEngines
from small_engines import LAYOUTS, batch_for, planned, rates
from torch import nn
from torch.nn import functional

from popengine.compile import compile_graph
from popengine.compile.tasks import make_plan
from popengine.ir import After
from popengine.order import ORDERS, order_named, timeline
from popengine.places import uncovered_edges, unordered_reads
from popengine.run.engine import Engine
from popengine.run.train_state import has_same_bits
from popengine.settings import Counts, Optimizer, Place, Settings
from popengine.table import actions

TWO, FOUR = (0, 1, 1, 1), (0, 1, 2, 3)
PARTS = {  # of `Parts`, by name
    "a norm in A and B": ("norm",),
    "a norm in A, B and D": ("norm", "norm thrice"),
    "a weight of B in C": ("tied",),
    "a skip from A to D": ("skip",),
    "dropout": ("dropout",),
    "views that begin at no multiple of 64 bytes": ("split",),
    "a transposed view": ("transposed",),
    "the input in A and C": ("input",),
    "a buffer that C counts and D reads": ("counter",),
    "frozen A": ("frozen first",),
    "frozen B": ("frozen middle",),
    "autocast": ("autocast",),
    "a weight that B and C cast": ("cast once",),
}


class Parts(nn.Module):
    """Blocks A to D, with the parts that `parts` names."""

    def __init__(self, parts):
        super().__init__()
        self.parts, self.a, self.norm = parts, nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.b, self.c, self.d = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.drop, self.layer_norm = nn.Dropout(0.3), nn.LayerNorm(8)
        self.register_buffer("seen", torch.zeros(()))
        if "frozen first" in parts:
            self.a.requires_grad_(False), self.norm.requires_grad_(False)
        if "frozen middle" in parts:
            self.b.requires_grad_(False)

    def forward(self, x, y):
        with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in self.parts):
            output = self.of_blocks(x)
        return output.float(), functional.cross_entropy(output.float(), y)

    def of_blocks(self, x):
        parts, turned, left, right = self.parts, None, None, None
        enter("A")
        a = self.norm(self.a(x)) if "norm" in parts else self.a(x)
        if "split" in parts:
            left, right = a[:, :3], a[:, 3:]
        if "transposed" in parts:  # sums over such a value depend on its strides
            turned = self.a(x.repeat(500, 1) * torch.arange(1000).cos()[:, None]).t()
        enter("B")
        a = a if turned is None else a + turned.sum(1)
        if right is not None:
            a = torch.cat([right.cos(), left.expand(2, 3)], 1) + right.sum(1, keepdim=True).expand(2, 8)
        weight = (
            self.b.weight.to(torch.bfloat16) if "cast once" in parts and "autocast" not in parts else None
        )
        b = torch.relu(self.b(a))
        b = b if weight is None else b + (b.bfloat16() @ weight).float()
        b = self.norm(b) if "norm" in parts else self.layer_norm(b)
        enter("C")
        c = self.c(b) + (x.sum() if "input" in parts else 0)
        c = functional.linear(c, self.b.weight) if "tied" in parts else c
        c = c if weight is None else c + (c.bfloat16() @ weight).float()
        c = self.drop(c) if "dropout" in parts else c
        if "counter" in parts:
            self.seen.add_(c.detach().mean())
        enter("D")
        d = c + a if "skip" in parts else c
        d = self.norm(d) if "norm thrice" in parts else d
        d = d * self.seen if "counter" in parts else d
        return self.d(d)


def made(parts, **options):
    """The plan, settings and state of an engine of `Parts`."""
    plan, settings, weights = _made(parts, **options)
    kind = None if settings.optimizer is None else settings.optimizer.kind
    weights = {name: value.clone() for name, value in weights.items()}
    return (
        plan,
        settings,
        train_state_of(weights, plan.partition.signature.trained, kind, 3, settings.counts.replicas),
    )


@once
def _made(
    parts,
    ipus=(0, 1, 2, 3),
    order="1f1b",
    kind="sgd",
    counts=(2, 5, 1),
    training=True,
    clip=float("inf"),
    **more,
):
    model, graph = _captured(parts, training)
    rule = Optimizer(kind, max_grad_norm=clip) if training else None
    iterations, accumulation, replicas = counts
    counts = Counts(iterations, accumulation, replicas, replicas)
    settings = Settings(training, counts, stages(*ipus, order=order), optimizer=rule, **more)
    return compile_graph(graph, settings), settings, model.state_dict()


@once
def _captured(parts, training):
    torch.manual_seed(0)
    model = Parts(parts).train(training)
    return model, graph_of(model, training)


def left_behind(engine, find_weights, optimizer_states, calls=2):
    """All that some calls leave behind, by name."""
    found, training = {}, engine.settings.training
    for call in range(calls):
        results = engine.run(
            batch_for(engine, call), rates(engine.settings.optimizer.kind) if training else None
        )
        found |= {f"output {call} {i}": value.clone() for i, value in enumerate(results.outputs())}
    found |= {name: value.clone() for name, value in find_weights().items()}
    for key, state in optimizer_states().items() if training else ():
        found |= {f"{key} {name}": value.clone() for name, value in state.items()}
    engine.close()
    return found


def at_places(plan, settings, place):
    """The plan and settings with the place of each ipu."""
    settings = replace(settings, places=tuple(map(Place, place)))
    return make_plan(plan.partition, settings), settings


def differing(make, place, held=0, seed=0):
    """The names of what differs between one engine and an engine at each place."""
    plan, settings, train_state = make()
    one = left_behind(
        Engine(plan, settings, train_state), train_state.find_weights, train_state.optimizer_states
    )
    plan, settings, train_state = make()
    several = SeveralEngines(*at_places(plan, settings, place), train_state, held, seed)
    found = left_behind(several, several.find_weights, several.optimizer_states)
    return [name for name in one if name not in found or not has_same_bits(one[name], found[name])]


@pytest.mark.parametrize("place", [TWO, FOUR], ids=["two places", "four places"])
@pytest.mark.parametrize(
    "layout", [name for name, options in LAYOUTS.items() if options.get("ipus") != (0, 0, 0, 0)]
)
def test_engines_of_several_places_have_the_bits_of_one(layout, place):
    assert differing(lambda: planned(**LAYOUTS[layout]), place, held=3) == []


@pytest.mark.parametrize("order", ORDERS)
def test_the_places_have_the_bits_of_one_engine_in_each_order(order):
    more = {"order": order, "kind": "adamw", "recompute": order == "zero-bubble"}
    assert differing(lambda: made(("norm", "skip", "tied", "dropout"), **more), FOUR, held=5) == []


@pytest.mark.parametrize("kind", OTHERS)
def test_any_optimizer_at_several_places_has_the_bits_of_one_engine(kind):
    assert differing(lambda: planned(kind=kind), FOUR, held=3) == []


@pytest.mark.parametrize("part", PARTS)
def test_what_places_have_in_common_has_the_bits_of_one_engine(part):
    assert differing(lambda: made(PARTS[part], kind="adamw"), TWO, held=4) == []
    assert differing(lambda: made((*PARTS[part], "skip", "tied"), order="zero-bubble"), FOUR, held=4) == []


@pytest.mark.parametrize(
    "more",
    [
        {"counts": (2, 5, 3), "clip": 0.1, "kind": "adamw"},
        {"kind": "lamb"},
        {"counts": (12, 1, 1), "training": False, "order": "gpipe"},
        {"automatic_loss_scaling": True, "clip": 0.1},
    ],
    ids=["clipping, replicas", "trust ratios", "inference", "loss scaling"],
)
def test_what_all_places_decide_together_has_the_bits_of_one_engine(more):
    assert differing(lambda: made(("norm", "skip", "tied", "counter"), **more), FOUR, held=4) == []


def random_case(seed):
    """A random model and layout, and the place of each ipu."""
    pick = random.Random(seed)
    parts = [part for name in pick.sample(sorted(PARTS), pick.randint(1, 5)) for part in PARTS[name]]
    ipus = [(0, 1, 2, 3), (0, 1, 2, 2), (0, 0, 1, 2), (0, 1, 1, 2), (0, 1, 2, 0), (0, 1, 0, 1), (3, 1, 2, 0)]
    options = {
        "ipus": pick.choice(ipus),
        "order": pick.choice(list(ORDERS)),
        "counts": (pick.randint(1, 2), pick.randint(7, 9), pick.randint(1, 3)),
        "recompute": pick.random() < 0.3,
        "kind": pick.choice(["sgd", "adamw"]),
        "clip": pick.choice([float("inf"), 0.1]),
        "automatic_loss_scaling": pick.random() < 0.2,
        "outputs": pick.choice(["all", "sum"]),
    }
    place = [pick.randrange(4) for _ in range(4)]
    while len({place[ipu] for ipu in options["ipus"]}) == 1:
        place = [pick.randrange(4) for _ in range(4)]
    return tuple(parts), options, place


@pytest.mark.parametrize("seed", range(20))
def test_random_models_at_random_places_have_the_bits_of_one_engine(seed):
    parts, options, place = random_case(seed)
    assert differing(lambda: made(parts, **options), place, held=seed % 6, seed=seed) == []


# ---- the checks of a table -----------------------------------------------------------------------------------


def tables():
    """Plans of random models at random places, by seed."""
    for seed in range(12):
        parts, options, place = random_case(seed)
        plan, settings, _ = made(parts, **options)
        yield at_places(plan, settings, place)[0]


def without_edge(plan, row, edge):
    tasks = list(plan.tasks)
    tasks[row] = replace(tasks[row], after=tuple(each for each in tasks[row].after if each != edge))
    return replace(plan, tasks=tuple(tasks))


def with_edge(plan, row, edge):
    tasks = list(plan.tasks)
    tasks[row] = replace(tasks[row], after=(*tasks[row].after, edge))
    return replace(plan, tasks=tuple(tasks))


def test_a_table_without_one_of_its_messages_is_found():
    dropped = 0
    for plan in tables():
        assert uncovered_edges(plan) == unordered_reads(plan) == []
        sends = [row for row, task in enumerate(plan.tasks) if task.kind == "send"]
        senders = {plan.tasks[row].instructions[0].channel: row for row in sends}
        assert len(senders) == len(sends)
        for number, task in enumerate(plan.tasks):
            if task.kind != "receive" or not task.instructions[0].names:
                continue
            sender, lost = senders[task.instructions[0].channel], plan
            for row, other in enumerate(plan.tasks):
                for edge in (edge for edge in other.after if edge.row == number and row != number):
                    lost = without_edge(lost, row, edge)
                    # The row waits for the sender instead, as if all ipus were at one place.
                    assert uncovered_edges(with_edge(lost, row, After(sender, edge.behind))) or other.ipu < 0
            assert unordered_reads(lost), (str(task), task.ipu)
            dropped += 1
    assert dropped > 50


def test_an_engine_refuses_a_table_with_an_edge_that_no_message_covers():
    plan, settings = at_places(*planned()[:2], FOUR)
    last = next(row for row, task in enumerate(plan.tasks) if str(task) == "F3")
    first = next(row for row, task in enumerate(plan.tasks) if str(task) == "F0")
    with pytest.raises(Exception, match=r"F3 \(ipu 3\) waits for F0 \(ipu 0\)"):
        Engine(with_edge(plan, last, After(first)), settings, planned()[2])


@pytest.mark.parametrize("order", ORDERS)
def test_the_schedule_of_separate_devices_is_that_of_one_place(order):
    plan, settings, _ = made(("skip", "tied", "norm"), order=order)
    found = actions(plan.tasks)[0]
    spread = at_places(plan, settings, FOUR)[0]
    want = timeline(found, 8, order_named(order))[1].length
    assert timeline(actions(spread.tasks)[0], 8, order_named(order))[1].length == want


def test_a_fast_first_place_does_not_run_ahead_of_the_last_one():
    """Without messages for the bounds of the order the first stage runs all forwards at once."""
    plan, _ = at_places(*planned(counts=(1, 40, 1))[:2], FOUR)
    found, rows_of = actions(plan.tasks)
    forward = next(row for row in rows_of[0] if plan.tasks[row].kind == "forward")
    bounds = [edge for edge in plan.tasks[forward].after if edge.behind]
    assert found[0].phase == "F"
    assert {plan.tasks[edge.row].kind for edge in bounds} & {"receive", "backward"}
    assert max(edge.behind for edge in bounds) == 4


@pytest.mark.parametrize("order", ORDERS)
def test_terms_of_a_large_gradient_come_one_micro_batch_after_another(order, monkeypatch):
    """The first stage of a tied model held a gradient of the head, as large as the embedding, for each micro-batch in
    flight."""
    monkeypatch.setattr("popengine.compile.tasks.BUCKET", 1)
    make = partial(made, ("skip", "tied"), order=order)
    plan, _ = at_places(*make()[:2], FOUR)
    terms = [task for task in plan.tasks if "terms" in str(task.instructions) and task.kind == "receive"]
    waits = [plan.tasks[edge.row] for edge in terms[0].after if edge.behind == 1]
    assert len(terms) == 1 and {*terms[0].instructions[0].names} <= {
        *plan.partition.pieces[waits[0].piece].reads
    }
    assert differing(make, FOUR, held=3) == []
