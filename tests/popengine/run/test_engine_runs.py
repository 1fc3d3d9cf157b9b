"""The engine: a loaded plan, its weights, and what a call leaves behind."""

import pytest
import torch
from engine_models import Net, graph_of, net, stages

from popengine.compile import compile_graph
from popengine.compile.capture import capture
from popengine.run.drivers.worker import Worker
from popengine.run.engine import Engine
from popengine.settings import Counts, Hyper, Optimizer, Settings, Strategy

RATES = {
    "lr": 0.05,
    "momentum": 0.0,
    "dampening": 0.0,
    "weight_decay": 0.0,
    "nesterov": False,
    "maximize": False,
}
HYPER = Hyper((RATES,))


def engine_for(
    ipus=(0, 1, 2, 3), mode="pipelined", iterations=2, accumulation=8, replicas=1, dropout=0.0, seed=3, **more
):
    model = net(dropout)
    settings = Settings(
        True,
        Counts(iterations=iterations, accumulation=accumulation, replicas=replicas, groups=replicas),
        stages(*ipus, mode=mode),
        optimizer=Optimizer("sgd", {name: 0 for name, _ in model.named_parameters()}),
        **more,
    )
    plan = compile_graph(graph_of(model), settings)
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return Engine(plan, settings, weights, seed)


def batch(micro_batches):
    torch.manual_seed(1)
    return [torch.randn(micro_batches * 2, 4), torch.randint(0, 3, (micro_batches * 2,))]


def copied(engine):
    return {name: value.clone() for name, value in engine.read().items()}


def assert_equal(one, two):
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


def test_the_engine_copies_the_weights_it_is_given():
    model = net()
    engine = engine_for()
    assert_equal(copied(engine), dict(model.state_dict()))
    engine.run(batch(16), HYPER)
    assert not torch.equal(engine.read()["a.weight"], model.a.weight)


@pytest.mark.parametrize(
    ("ipus", "mode"), [((0, 0, 0, 0), "pipelined"), ((0, 1, 2, 0), "pipelined"), ((0, 1, 0, 1), "sharded")]
)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_every_layout_gives_the_same_bits(ipus, mode, dropout):
    one, two = engine_for(dropout=dropout), engine_for(ipus, mode, dropout=dropout)
    for _ in range(3):
        losses = [engine.run(batch(16), HYPER).outputs()[1] for engine in (one, two)]
        assert torch.equal(*losses)
    assert_equal(copied(one), copied(two))


def test_the_same_seed_and_step_draw_the_same_numbers():
    one, two = engine_for(dropout=0.5), engine_for(dropout=0.5)
    first, second = (one.run(batch(16), HYPER).outputs()[1] for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(first, two.run(batch(16), HYPER).outputs()[1])
    assert not torch.equal(first, engine_for(dropout=0.5, seed=4).run(batch(16), HYPER).outputs()[1])


def test_a_sum_reduction_equals_a_mean_with_a_rate_as_many_times_higher():
    mean = engine_for(reduction="mean")
    total = engine_for(reduction="sum")
    mean.run(batch(16), Hyper(({**RATES, "lr": 0.08},)))
    total.run(batch(16), Hyper(({**RATES, "lr": 0.01},)))
    for name, value in mean.read().items():
        torch.testing.assert_close(value, total.read()[name])


def test_a_loss_scale_of_a_power_of_two_changes_nothing():
    """Scaling by a power of two is exact, and gradients are divided again before the update."""
    plain, scaled = engine_for(), engine_for()
    losses = (
        plain.run(batch(16), HYPER).outputs()[1],
        scaled.run(batch(16), Hyper((RATES,), 128.0)).outputs()[1],
    )
    assert torch.equal(*losses)
    assert_equal(copied(plain), copied(scaled))


def test_new_rates_need_no_new_plan():
    engine = engine_for()
    engine.run(batch(16), Hyper(({**RATES, "lr": 0.0},)))
    assert torch.equal(engine.read()["a.weight"], net().a.weight)
    engine.run(batch(16), HYPER)
    assert not torch.equal(engine.read()["a.weight"], net().a.weight)


def test_weights_written_are_used_by_every_replica():
    engine = engine_for(replicas=2)
    engine.write(
        {name: torch.zeros_like(value) for name, value in engine.read().items() if value.is_floating_point()}
    )
    scores = engine.run(batch(32), Hyper(({**RATES, "lr": 0.0},))).outputs()[0]
    assert torch.equal(scores, torch.zeros_like(scores))


def test_replicas_hold_the_same_weights_after_every_call():
    engine = engine_for(replicas=2)
    engine.run(batch(32), HYPER)
    for ipu in engine.plan.programs:
        one, two = (engine.stores[replica, ipu] for replica in range(2))
        for name in one.sums:
            assert torch.equal(one.state[one.slot[name]], two.state[two.slot[name]])


def test_a_failed_call_leaves_step_weights_and_buffers_as_they_were():
    engine, twin = engine_for(), engine_for()
    for each in (engine, twin):
        each.run(batch(16), HYPER)
    before, step = copied(engine), engine.random_state
    x, y = batch(16)
    y[-1] = 77  # no such class; the last micro-batch of the second update
    with pytest.raises(Exception, match="micro-batch 7"):
        engine.run([x, y], HYPER)
    assert_equal(copied(engine), before)
    assert engine.random_state == step
    assert torch.equal(engine.run(batch(16), HYPER).outputs()[1], twin.run(batch(16), HYPER).outputs()[1])


def test_inference_holds_few_micro_batches_at_a_time_whatever_the_iterations(monkeypatch):
    """Micro-batches begin when earlier ones have ended: else a fast first stage would fill the memory."""
    alive = []
    compute = Worker._compute

    def watched(worker, instruction):
        compute(worker, instruction)
        alive.append(len([frame for frame in worker.frames.copy().values() if frame]))

    monkeypatch.setattr(Worker, "_compute", watched)
    model = Net().eval()
    settings = Settings(False, Counts(iterations=200), stages(0, 1, 2, 3))
    engine = Engine(
        compile_graph(graph_of(model, training=False), settings),
        settings,
        model.state_dict(),
        0,
    )
    engine.run(batch(200), None)
    assert max(alive) <= 5


def test_an_engine_that_is_closed_ends_its_threads():
    engine = engine_for()
    threads = [crew.thread for crew in engine._crews.values()]
    engine.close()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


def test_a_model_without_parameters_runs():
    model = torch.nn.ReLU()
    graph = capture(model, lambda inputs: [model(inputs[0])], [torch.zeros(3)], training=False)
    settings = Settings(False, Counts(iterations=2), Strategy())
    engine = Engine(compile_graph(graph, settings), settings, {}, 0)
    assert engine.run([torch.tensor([-1.0, 1, 2, -2, 3, 4])], None).outputs()[0].tolist() == [
        0,
        1,
        2,
        0,
        3,
        4,
    ]
