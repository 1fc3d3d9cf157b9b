"""The engine: a loaded plan, its weights, and what a call leaves behind."""

import torch
from engine_models import Net, graph_of, net, rates, stages, train_state_of

from popengine.compile import compile_graph
from popengine.run.engine import Engine
from popengine.run.row_functions import RowFunctions
from popengine.run.train_state import TrainState
from popengine.settings import Counts, Optimizer, Settings

HYPER = rates()


def engine_for(
    ipus=(0, 1, 2, 3), order="1f1b", iterations=2, accumulation=8, replicas=1, dropout=0.0, seed=3, **more
):
    model = net(dropout)
    settings = Settings(
        True,
        Counts(iterations=iterations, accumulation=accumulation, replicas=replicas, groups=replicas),
        stages(*ipus, order=order),
        optimizer=Optimizer("plain sgd"),
        **more,
    )
    plan = compile_graph(graph_of(model), settings)
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    state = train_state_of(weights, dict(model.named_parameters()), seed=seed, replicas=replicas)
    return Engine(plan, settings, state)


def batch(micro_batches):
    torch.manual_seed(1)
    return [torch.randn(micro_batches * 2, 4), torch.randint(0, 3, (micro_batches * 2,))]


def copied(engine):
    return {name: value.clone() for name, value in engine.state.train_state.find_weights().items()}


def write(engine, weights):
    for name, value in weights.items():
        engine.state.train_state.find_weights()[name].copy_(value)


def test_weights_written_are_used_by_every_replica():
    engine = engine_for(replicas=2)
    write(engine, {n: torch.zeros_like(v) for n, v in copied(engine).items() if v.is_floating_point()})
    scores = engine.run(batch(32), rates(lr=0.0)).outputs()[0]
    assert torch.equal(scores, torch.zeros_like(scores))


def test_inference_holds_few_micro_batches_at_a_time_whatever_the_iterations(monkeypatch):
    """Micro-batches begin when earlier ones have ended: else a fast first stage would fill the memory."""
    alive = []
    computing = RowFunctions._compute_function

    def watched(rows, row, replica):
        compute = computing(rows, row, replica)

        def run(call, micro_batch):
            compute(call, micro_batch)
            alive.append(len([frame for frame in rows.frames[replica].copy().values() if frame]))

        return run

    monkeypatch.setattr(RowFunctions, "_compute_function", watched)
    model = Net().eval()
    settings = Settings(False, Counts(iterations=200), stages(0, 1, 2, 3))
    engine = Engine(
        compile_graph(graph_of(model, training=False), settings),
        settings,
        TrainState(model.state_dict),
    )
    engine.run(batch(200), None)
    assert max(alive) <= 5
