"""Engines of a small net, by name of what is special about them."""

from dataclasses import replace

import torch
from engine_models import graph_of, net, once, rates, stages, train_state_of

from popengine.compile import compile_graph
from popengine.compile.tasks import make_plan
from popengine.run.engine import Engine
from popengine.settings import Anchor, Counts, Optimizer, Place, Settings

# By name, options of `engine_of`. The last of five micro-batches waits for a backward in all orders but GPipe.
LAYOUTS = {
    "one ipu": {"ipus": (0, 0, 0, 0)},
    "pipelined": {},
    "two stages on an ipu": {"ipus": (0, 1, 2, 0)},
    "sharded": {"ipus": (0, 1, 0, 1), "order": "sharded"},
    "dropout": {"dropout": 0.5},
    "adam": {"kind": "adamw"},
    "replicas": {"counts": (2, 5, 3)},
    "sharded state": {"counts": (2, 5, 3), "kind": "adamw", "shard_optimizer": 0},
    "clipping": {"counts": (2, 5, 2), "optimizer": {"max_grad_norm": 0.1}},
    "automatic loss scaling": {"automatic_loss_scaling": True, "counts": (2, 5, 2)},
    "recomputation": {"recompute": True, "dropout": 0.5},
    "sums": {"outputs": "sum", "counts": (2, 5, 2)},
    "last outputs": {"outputs": "final"},
    "weights asked for": {
        "anchors": (Anchor("weight", "a.weight", "all"), Anchor("updated", "c.weight", "all"))
    },
    "inference": {"training": False, "counts": (8, 1, 2)},
    "sharded inference": {"training": False, "counts": (8, 1, 1), "ipus": (0, 1, 0, 1), "order": "sharded"},
}


def planned(**options):
    """What an engine of the small net is made of. A plan is a value, so that of the same options is made once."""
    plan, settings = _plan_of(**options)
    weights = {name: value.detach().clone() for name, value in net().state_dict().items()}
    kind = None if settings.optimizer is None else settings.optimizer.kind
    return (
        plan,
        settings,
        train_state_of(weights, dict(net().named_parameters()), kind, 3, settings.counts.replicas),
    )


@once
def _plan_of(
    ipus=(0, 1, 2, 3),
    order="1f1b",
    kind="sgd",
    counts=(2, 5, 1),
    dropout=0.0,
    training=True,
    optimizer=None,
    **more,
):
    model = net(dropout)
    iterations, accumulation, replicas = counts
    settings = Settings(
        training,
        Counts(iterations, accumulation, replicas, replicas),
        stages(*ipus, order=order),
        optimizer=Optimizer(kind, **(optimizer or {})) if training else None,
        **more,
    )
    return compile_graph(graph_of(model, training), settings), settings


def engine_of(**options):
    """An engine of the small net."""
    return Engine(*planned(**options))


def batch_for(engine, call=0):
    rows = 2 * engine.settings.counts.product
    torch.manual_seed(call)
    return [torch.randn(rows, 4), torch.randint(0, 3, (rows,))]


def trained(engine, calls=3, hyper=None, recorder=None):
    """All that some calls leave behind, by name."""
    hyper = (
        hyper or [rates(engine.settings.optimizer.kind)] * calls
        if engine.settings.training
        else [None] * calls
    )
    found = {}
    for call in range(calls):
        results = engine.run(batch_for(engine, call), hyper[call], recorder)
        found |= {f"output {call} {i}": value.clone() for i, value in enumerate(results.outputs())}
    engine.state.train_state.move_to_host()
    found |= {name: value.clone() for name, value in engine.state.train_state.find_weights().items()}
    for key, state in engine.state.train_state.optimizer_states().items() if engine.settings.training else ():
        found |= {f"{key} {name}": value.clone() for name, value in state.items()}
    engine.close()
    return found


@once
def trained_on_cpu(calls=2, **options):
    """What an engine of the small net on the CPU leaves behind."""
    return trained(engine_of(**options), calls)


def assert_same(one, two):
    assert one.keys() == two.keys()
    different = [name for name in one if not torch.equal(one[name], two[name])]
    assert different == []


PLACES = {"two": (0, 1, 1, 0), "four": (0, 1, 2, 3), "the CPU and one": (1, 0, 1, 0)}
NAMES = {
    "two": ("cuda:0", "cuda:1"),
    "four": ("cuda:0", "cuda:1", "cuda:2", "cuda:3"),
    "the CPU and one": ("cpu", "cuda:0"),
}


def on_devices(which, make=planned, **options):
    """An engine of the small net, with ipus on several devices."""
    plan, settings, train_state = make(**options)
    places = tuple(Place(0, device) for device in PLACES[which])
    settings = replace(settings, places=places, device="cuda", devices=NAMES[which])
    return Engine(make_plan(plan.partition, settings), settings, train_state)
