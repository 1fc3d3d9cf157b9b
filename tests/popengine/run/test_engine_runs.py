"""The engine: a loaded plan, its weights, and what a call leaves behind."""

import threading

import pytest
import torch
from engine_models import Net, graph_of, net, rates, stages, train_state_of

from popengine.compile import compile_graph
from popengine.compile.capture import capture
from popengine.errors import RunError
from popengine.order import ORDERS
from popengine.run.engine import Engine
from popengine.run.row_functions import RowFunctions
from popengine.run.train_state import TrainState
from popengine.settings import Counts, Optimizer, Settings, Strategy

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


def assert_equal(one, two):
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


def test_the_engine_trains_the_tensors_that_it_is_given():
    model, engine = net(), engine_for()
    given = dict(engine.state.train_state.find_weights())
    assert_equal(given, dict(model.state_dict()))
    engine.run(batch(16), HYPER)
    assert not torch.equal(given["a.weight"], model.a.weight)
    assert_equal(given, copied(engine))


@pytest.mark.parametrize(
    ("ipus", "order"), [((0, 0, 0, 0), "1f1b"), *(((0, 1, 0, 1), order) for order in ORDERS)]
)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_every_layout_gives_the_same_bits(ipus, order, dropout):
    one, two = engine_for(dropout=dropout), engine_for(ipus, order, dropout=dropout)
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
    mean.run(batch(16), rates(lr=0.08))
    total.run(batch(16), rates(lr=0.01))
    for name, value in mean.state.train_state.find_weights().items():
        torch.testing.assert_close(value, total.state.train_state.find_weights()[name])


def test_a_loss_scale_of_a_power_of_two_changes_nothing():
    """Scaling by a power of two is exact, and gradients are divided again before the update."""
    plain, scaled = engine_for(), engine_for()
    losses = (
        plain.run(batch(16), HYPER).outputs()[1],
        scaled.run(batch(16), rates(loss_scaling=128.0)).outputs()[1],
    )
    assert torch.equal(*losses)
    assert_equal(copied(plain), copied(scaled))


def test_new_rates_need_no_new_plan():
    engine = engine_for()
    engine.run(batch(16), rates(lr=0.0))
    assert torch.equal(engine.state.train_state.find_weights()["a.weight"], net().a.weight)
    engine.run(batch(16), HYPER)
    assert not torch.equal(engine.state.train_state.find_weights()["a.weight"], net().a.weight)


def test_weights_written_are_used_by_every_replica():
    engine = engine_for(replicas=2)
    write(engine, {n: torch.zeros_like(v) for n, v in copied(engine).items() if v.is_floating_point()})
    scores = engine.run(batch(32), rates(lr=0.0)).outputs()[0]
    assert torch.equal(scores, torch.zeros_like(scores))


def test_weights_that_are_written_one_after_another_are_all_compared_with_the_peers():
    engine = engine_for()
    engine.state.train_state.confirm(engine.state.bound_parameters())
    assert "value" not in engine._fingerprint(HYPER, batch(16))
    for names in (["a.weight"], ["c.bias", "norm.running_mean"]):
        write(engine, {name: engine.state.train_state.find_weights()[name].clone() for name in names})
    assert engine._fingerprint(HYPER, batch(16))["value"].keys() == {"a.weight", "c.bias"}


def test_replicas_hold_the_same_weights_after_every_call():
    engine = engine_for(replicas=2)
    engine.run(batch(32), HYPER)
    one, two = engine.state.values
    assert all(
        one[engine.state.slot_of[key]] is two[engine.state.slot_of[key]] for key in engine.state.trained
    )


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failed_call_leaves_what_its_finished_updates_have_made(failing):
    """Weights, buffers, optimizer state and random numbers are those after the last of them, and no others."""
    engine, twin = (engine_for(iterations=n) for n in (3, failing or 3))
    x, y = batch(24)
    if failing:
        rows = failing * 16
        twin.run([x[:rows], y[:rows]], HYPER)
    wrong = y.clone()
    wrong[failing * 16 + 15] = 77  # no such class; the last micro-batch of this update
    with pytest.raises(RunError, match="micro-batch 7") as error:
        engine.run([x, wrong], HYPER)
    said = f"{failing} of the 3 weight updates" if failing else "as they were before the call"
    assert said in str(error.value)
    assert engine.state.train_state.updates == failing
    assert engine.state.train_state.random_state == twin.state.train_state.random_state
    assert_equal(copied(engine), copied(twin))
    other = engine_for(iterations=3)
    write(other, copied(twin))
    other.state.train_state.random_state = twin.state.train_state.random_state
    assert torch.equal(engine.run(batch(24), HYPER).outputs()[1], other.run(batch(24), HYPER).outputs()[1])


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


def test_an_engine_that_is_closed_ends_its_threads():
    before = set(threading.enumerate())
    engine = engine_for()
    threads = set(threading.enumerate()) - before
    assert threads
    engine.close()
    for thread in threads:
        thread.join(240)
        assert not thread.is_alive()


def test_a_model_without_parameters_runs():
    model = torch.nn.ReLU()
    graph = capture(model, lambda inputs: [model(inputs[0])], [torch.zeros(3)], training=False)
    settings = Settings(False, Counts(iterations=2), Strategy())
    engine = Engine(compile_graph(graph, settings), settings, TrainState(dict))
    assert engine.run([torch.tensor([-1.0, 1, 2, -2, 3, 4])], None).outputs()[0].tolist() == [
        0,
        1,
        2,
        0,
        3,
        4,
    ]
