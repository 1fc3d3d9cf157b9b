"""Calls that are replayed as one graph leave behind what they would without one, bit for bit."""

import logging

import pytest
import torch
from simulated_graphs import Graphed, SimulatedGraph
from stand_ins import SerialRemote, assert_same, batch_for, engine_on, rates, trained
from torch import nn

from popengine.compile import compile_graph
from popengine.compile.capture import capture
from popengine.errors import RunError
from popengine.run.drivers.one_call import Run
from popengine.run.engine import Engine
from popengine.run.measure.recorder import Recorder
from popengine.settings import Anchor, Counts, Settings, Strategy
from popengine.update import group_update

pytestmark = pytest.mark.simulated
DECAYING = [0.05 / (1 + call) for call in range(6)]


@pytest.fixture(autouse=True)
def fused_updates(monkeypatch):
    """Updates as GPUs have them: they read no numbers."""
    monkeypatch.setattr(group_update, "FUSED_DEVICES", ("cpu",))


@pytest.fixture
def captures(monkeypatch):
    monkeypatch.setattr(SimulatedGraph, "captures", 0)
    return lambda: SimulatedGraph.captures


def both(calls=6, hyper=None, **options):
    plain, graphed = (engine_on(lambda ipu, kind=kind: kind(), **options) for kind in (SerialRemote, Graphed))
    assert_same(trained(plain, calls, hyper), trained(graphed, calls, hyper))


LAYOUTS = {
    "one ipu": {"ipus": (0, 0, 0, 0)},
    "pipelined": {},
    "sharded": {"ipus": (0, 1, 0, 1), "mode": "sharded"},
    "dropout": {"dropout": 0.5},
    "recomputation with dropout": {"recompute": True, "dropout": 0.5, "counts": (2, 8, 2)},
    "adamw": {"kind": "adamw"},
    "replicas": {"counts": (2, 8, 3), "kind": "adamw"},
    "sharded state": {"counts": (2, 8, 3), "kind": "adamw", "shard_optimizer": 0},
    "state on the host": {"kind": "adamw", "off_device": ("optimizer",)},
    "clipping": {"counts": (2, 8, 2), "optimizer": {"max_grad_norm": 0.1}},
    "sums": {"outputs": "sum", "counts": (2, 8, 2)},
    "last outputs": {"outputs": "final"},
    "weights asked for": {
        "anchors": (Anchor("weight", "a.weight", "all"), Anchor("updated", "c.weight", "all"))
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replays_leave_the_same_bits_with_a_rate_that_changes(layout, captures):
    options = LAYOUTS[layout]
    kind = options.get("kind", "sgd")
    both(hyper=[rates(kind, lr) for lr in DECAYING], **options)
    assert captures() == 1


def test_inference_is_replayed_with_the_weights_written_meanwhile(captures):
    engines = [
        engine_on(lambda ipu, kind=kind: kind(), training=False, counts=(20, 1, 2))
        for kind in (SerialRemote, Graphed)
    ]
    for call in range(4):
        scores = [engine.run(batch_for(engine, call), None).outputs()[0] for engine in engines]
        assert torch.equal(*scores)
        for engine in engines:
            engine.write(
                {name: value + 0.1 for name, value in engine.read().items() if value.is_floating_point()}
            )
    assert captures() == 1


def test_results_of_a_call_are_not_changed_by_the_next():
    engine = engine_on(lambda ipu: Graphed())
    found = [engine.run(batch_for(engine, call), rates("sgd")).outputs()[1] for call in range(5)]
    copies = [value.clone() for value in found]
    engine.run(batch_for(engine, 9), rates("sgd"))
    assert all(torch.equal(one, two) for one, two in zip(found, copies, strict=True))


def test_state_that_is_written_meanwhile_is_what_the_next_replay_begins_with():
    engines = [engine_on(lambda ipu, kind=kind: kind(), kind="adamw") for kind in (SerialRemote, Graphed)]
    for call in range(5):
        for engine in engines:
            engine.run(batch_for(engine, call), rates("adamw"))
            states = engine.read_optimizer()
            engine.write_optimizer({k: {n: v * 0.5 for n, v in s.items()} for k, s in states.items()})
            engine.write({"norm.running_mean": torch.zeros(4), "a.weight": torch.ones(4, 4)})
    assert_same(*map(trained, engines))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_random_state_can_be_set_between_replays(dropout):
    engine = engine_on(lambda ipu: Graphed(), dropout=dropout)
    still = rates("sgd", 0.0)
    losses = []
    for _ in range(4):
        engine.random_state = 5, 7
        losses.append(engine.run(batch_for(engine), still).outputs()[1])
    assert all(torch.equal(losses[0], loss) for loss in losses)
    engine.random_state = 6, 7
    assert torch.equal(losses[0], engine.run(batch_for(engine), still).outputs()[1]) is (dropout == 0)


# ---- rates that a graph holds as numbers -----------------------------------------------------------------


def test_a_rate_that_is_compiled_in_is_captured_anew(captures):
    hyper = [rates("rmsprop", lr) for lr in (0.1, 0.1, 0.1, 0.02, 0.02, 0.02)]
    for each in hyper:
        each.groups[0].update(alpha=0.9, momentum=0.0)
    both(hyper=hyper, kind="rmsprop")
    assert captures() == 2


def test_rates_that_change_again_and_again_end_the_captures(captures, caplog):
    hyper = [rates("rmsprop", lr) for lr in DECAYING]
    for each in hyper:
        each.groups[0].update(alpha=0.9, momentum=0.0)
    both(hyper=hyper, kind="rmsprop")
    assert captures() == 0
    assert [r.getMessage() for r in caplog.records] == [
        "calls are not captured as a graph, and run operation by operation: rates that it would hold as numbers"
        " change again and again"
    ]


def test_momentum_that_begins_late_has_its_velocity_kept(captures):
    """The velocity is made in the first call with momentum; in a graph it would be made anew at each replay."""
    hyper = [rates("sgd") for _ in range(6)]
    for each in hyper[:3]:
        each.groups[0]["momentum"] = 0.0
    both(hyper=hyper)
    assert captures() == 2


# ---- what is not captured --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"automatic_loss_scaling": True}, "automatic loss scaling looks at the gradients after each step"),
        ({"finite_checks": True}, "floating point exceptions look at the result of every operation"),
        ({"kind": "lamb"}, "the update rule (lamb) reads how many updates there were"),
    ],
    ids=str,
)
def test_a_call_that_can_not_be_captured_runs_as_it_is_and_says_why_once(options, why, captures, caplog):
    both(calls=3, **options)
    assert captures() == 0
    assert [r.getMessage() for r in caplog.records] == [
        f"calls are not captured as a graph, and run operation by operation: {why}"
    ]
    assert [(r.name, r.levelno) for r in caplog.records] == [("popengine", logging.WARNING)]


@torch.library.custom_op("replay_tests::noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


@noise.register_fake
def _(x):
    return torch.empty_like(x)


def engine_of(forward, samples, device, training=False):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return forward(self, x)

    torch.manual_seed(0)
    model = Model()
    settings = Settings(training, Counts(2), Strategy())
    graph = capture(model, lambda inputs: [model(*inputs)], samples, training=training)
    return Engine(compile_graph(graph, settings), settings, model.state_dict(), 0, device)


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (
            lambda self, x: torch.ops.replay_tests.noise(self.layer(x)),
            "replay_tests.noise.default draws from torch's own generator",
        ),
        (lambda self, x: x.add_(1), "the model writes into its inputs"),
    ],
    ids=["torch's own generator", "inputs written to"],
)
def test_operations_that_can_not_be_captured_are_named(forward, why, caplog):
    x = torch.ones(8, 3)
    plain, graphed = (
        engine_of(forward, [torch.zeros(4, 3)], lambda ipu, k=kind: k()) for kind in (SerialRemote, Graphed)
    )
    for _ in range(4):
        assert torch.equal(plain.run([x], None).outputs()[0], graphed.run([x], None).outputs()[0])
    assert [r.getMessage().partition("operation: ")[2] for r in caplog.records] == [why]


def test_a_capture_that_fails_is_told_with_its_error_and_the_call_runs_as_it_is(caplog, captures):
    plain, graphed = (
        engine_on(lambda ipu, kind=kind: kind(), kind="adamw") for kind in (SerialRemote, Graphed)
    )
    worker = graphed._workers[2]
    code = dict(worker._code)
    worker._code = {i: lambda values, i=i: (values[0].nonzero(), code[i](values))[1] for i in code}
    assert_same(trained(plain, 5), trained(graphed, 5))
    assert captures() == 0
    (record,) = caplog.records
    assert "RunError while it was captured: " in record.getMessage()
    assert "operation not permitted when stream is capturing" in record.getMessage()


def test_a_profiled_call_between_replays_changes_nothing(caplog):
    plain, graphed = (
        engine_on(lambda ipu, kind=kind: kind(), dropout=0.5) for kind in (SerialRemote, Graphed)
    )
    for call in range(6):
        recorder = Recorder() if call in (3, 4) else None
        losses = [e.run(batch_for(e, call), rates("sgd"), recorder).outputs()[1] for e in (plain, graphed)]
        assert torch.equal(*losses)
    assert_same(trained(plain), trained(graphed))
    assert "they are profiled" in caplog.text


def test_a_call_that_fails_before_the_capture_leaves_no_trace():
    plain, graphed = (
        engine_on(lambda ipu, kind=kind: kind(), kind="adamw") for kind in (SerialRemote, Graphed)
    )
    for engine in (plain, graphed):
        x, y = batch_for(engine)
        y[-1] = 77
        with pytest.raises(RunError):
            engine.run([x, y], rates("adamw"))
    assert_same(trained(plain, 5), trained(graphed, 5))


def test_an_interrupt_during_a_replay_comes_after_it(monkeypatch):
    """A graph can't be stopped half-way, so the call counts as done: weights and step stay together."""
    engine, twin = (engine_on(lambda ipu: Graphed(), dropout=0.5) for _ in range(2))
    for call in range(4):
        for each in (engine, twin):
            each.run(batch_for(each, call), rates("sgd"))
    real = Run.wait

    def interrupted(run):
        real(run)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Run, "wait", interrupted)
        engine.run(batch_for(engine, 4), rates("sgd"))
    twin.run(batch_for(twin, 4), rates("sgd"))
    assert_same(trained(engine), trained(twin))
