"""Ipus of a process on several devices: `late_device.py`, whose queues run late and in random legal orders.

Memory that is not written yet, or is freed, holds NaN. So the CPU's bits show that each copy waits for its value.
"""

import random
from collections import Counter
from itertools import cycle

import pytest
import torch
from engine_models import OTHERS, enter, graph_of, stages, train_state_of
from small_engines import (
    LAYOUTS,
    NAMES,
    PLACES,
    assert_same,
    batch_for,
    engine_of,
    on_devices,
    planned,
    rates,
    trained,
    trained_on_cpu,
)
from test_places import PARTS, made
from torch import nn
from torch.nn import functional

import late_device
from late_device import late_devices
from popengine.compile import compile_graph
from popengine.errors import RunError, UnrecoverableError
from popengine.order import ORDERS
from popengine.run import devices
from popengine.run.engine import Engine
from popengine.run.ready_queue import ReadyQueue
from popengine.run.train_state import has_same_bits
from popengine.settings import Counts, Optimizer, Place, Settings

SPREAD = [name for name in LAYOUTS if name not in ("one ipu", "sharded state")]
ORDERED = [name for name in ORDERS if name not in ("1f1b", "sharded")]


@pytest.mark.parametrize("name", SPREAD)
@pytest.mark.parametrize("which", PLACES)
def test_each_layout_has_the_bits_of_one_cpu(name, which, monkeypatch):
    with late_devices(monkeypatch, seed=len(name), count=4):
        engines = on_devices(which, **LAYOUTS[name])
        assert_same(trained(engines, calls=2), trained_on_cpu(**LAYOUTS[name]))


@pytest.mark.parametrize("order", ORDERED)
@pytest.mark.parametrize("which", ["two", "four"])
def test_each_order_has_the_bits_of_one_cpu(order, which, monkeypatch):
    with late_devices(monkeypatch, seed=len(order), count=4):
        engines = on_devices(which, order=order, dropout=0.5)
        assert_same(trained(engines, calls=2), trained_on_cpu(order=order, dropout=0.5))


@pytest.mark.parametrize("kind", OTHERS)
def test_any_optimizer_has_the_bits_of_one_cpu(kind, monkeypatch):
    with late_devices(monkeypatch, seed=len(kind), count=4):
        assert_same(trained(on_devices("four", kind=kind), calls=2), trained_on_cpu(kind=kind))


@pytest.mark.parametrize("part", PARTS)
def test_what_devices_have_in_common_has_the_bits_of_one_cpu(part, monkeypatch):
    options = {"parts": PARTS[part]}
    with late_devices(monkeypatch, seed=len(part), count=4):
        engines = on_devices("four", made, **options)
        assert_same(trained(engines, calls=2), trained(Engine(*made(**options)), calls=2))


# The ipu of each block, the number of devices, and that of replicas.
SHIFTED = {
    "an ipu and two replicas": ((0, 0, 0, 0), 2, 2),
    "an ipu, and replicas in turn on two of three devices": ((0, 0, 0, 0), 3, 5),
    "two ipus and two replicas": ((0, 1, 1, 0), 4, 2),
    "two ipus, of which three replicas share devices": ((0, 0, 1, 1), 3, 3),
    "four ipus on three devices": ((0, 1, 2, 3), 3, 4),
}


def on_shifted_devices(which, make=planned, **options):
    """An engine for each place and each replica whose devices differ."""
    ipus, count, replicas = SHIFTED[which]
    iterations, accumulation, _ = options.pop("counts", (2, 3, 1))
    counts = {"ipus": ipus, "counts": (iterations, accumulation, replicas)}
    names = tuple(f"cuda:{number}" for number in range(count))
    where = {"places": tuple(Place(0, number) for number in range(count)), "devices": names, "spreads": True}
    return Engine(*make(**counts, **where, device="cuda", **options)), make(**counts, **options)


@pytest.mark.parametrize(("name", "which"), [*zip([*LAYOUTS][1:], cycle(SHIFTED), strict=False)])
def test_each_replica_on_devices_of_its_own_has_the_bits_of_one_cpu(name, which, monkeypatch):
    left_out = ("ipus", "shard_optimizer", "counts")
    options = {key: value for key, value in LAYOUTS[name].items() if key not in left_out}
    if not options.get("training", True):
        options["counts"] = (4, 1, 1)
    with late_devices(monkeypatch, seed=len(name + which), count=4):
        engines, one = on_shifted_devices(which, **options)
        assert_same(trained(engines, calls=2), trained(Engine(*one), calls=2))


@pytest.mark.parametrize("which", ["an ipu and two replicas", "two ipus and two replicas"])
def test_steps_with_batch_norm_are_captured_once_for_each_device(which, monkeypatch):
    with late_devices(monkeypatch, count=4) as late:
        engines, _ = on_shifted_devices(which)
        for call in range(5):
            engines.run(batch_for(engines, call), rates("sgd"))
        # Ipus on several devices are not captured.
        assert [device.captures for device in late] == ([1, 1, 0, 0] if "an ipu" in which else [0] * 4)
        engines.close()


@pytest.mark.parametrize("missing", ["event", "memory"])
def test_a_copy_that_does_not_wait_or_does_not_hold_its_memory_is_noticed(missing, monkeypatch):
    expected, has_failed = trained_on_cpu(calls=1), False
    for seed in range(5):
        with late_devices(monkeypatch, seed=seed, count=4):
            if missing == "event":
                monkeypatch.setattr(late_device.Stream, "wait_event", lambda stream, event: None)
            else:
                monkeypatch.setattr(devices, "record_stream", lambda value, stream: None)
            found = trained(on_devices("four"), calls=1)
            has_failed = any(not torch.equal(found[name], expected[name]) for name in found)
        if has_failed:
            break
    assert has_failed


class ReadsAWeightAfterTheLoss(nn.Module):
    """The loss is computed in C, and D reads a weight of A. So no update depends on what D computes."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in "abc")

    def forward(self, x, y):
        enter("A")
        a = self.a(x)
        enter("B")
        b = torch.relu(self.b(a))
        enter("C")
        loss = functional.cross_entropy(self.c(b), y)
        enter("D")
        other = b.detach()
        for _ in range(10):
            other = functional.linear(other, self.a.weight.detach()).tanh()
        return other, loss


def test_an_update_waits_until_other_devices_have_copied_the_weight(monkeypatch):
    torch.manual_seed(0)
    model = ReadsAWeightAfterTheLoss()
    graph = graph_of(model)

    def made(**more):
        optimizer = Optimizer("sgd")
        settings = Settings(True, Counts(4, 4), stages(0, 1, 2, 3), optimizer=optimizer, **more)
        weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        state = train_state_of(weights, dict(model.named_parameters()), "sgd")
        return compile_graph(graph, settings), settings, state

    expected = trained(Engine(*made()), calls=1)
    where = {"places": tuple(Place(0, ipu) for ipu in range(4)), "devices": NAMES["four"], "device": "cuda"}
    for seed in range(5):
        with late_devices(monkeypatch, seed=seed, count=4):
            assert_same(trained(Engine(*made(**where)), calls=1), expected)


def test_the_host_waits_once_for_each_device_in_a_call(monkeypatch):
    with late_devices(monkeypatch, count=4) as late:
        engines = on_devices("four", optimizer={"max_grad_norm": 0.1})
        for call in range(2):
            before = [device.waits.copy() for device in late]
            engines.run(batch_for(engines, call), rates("sgd"))
        waits = [device.waits - was for device, was in zip(late, before, strict=True)]
        assert waits == [Counter({"synchronize": 1})] * 4
        engines.close()


def test_each_weight_and_its_optimizer_state_is_on_the_device_of_its_ipu(monkeypatch):
    with late_devices(monkeypatch, count=4):
        engines = on_devices("four", kind="adamw")
        engines.run(batch_for(engines), rates("adamw"))
        weights = engines.train_state.find_weights()
        places = {key: value.device.index for key, value in weights.items()}
        assert {key: places[f"{key}.weight"] for key in "abcd"} == {"a": 0, "b": 1, "c": 2, "d": 3}
        for key, state in engines.train_state.optimizer_states().items():
            assert state["exp_avg"].device == weights[key].device
        engines.close()


def test_an_error_on_one_device_ends_the_call_on_all_and_changes_nothing(monkeypatch):
    with late_devices(monkeypatch, count=4):
        engines = on_devices("the CPU and one", counts=(1, 8, 1))
        before = {key: value.cpu() for key, value in engines.train_state.find_weights().items()}
        for _ in range(2):
            with pytest.raises(RunError, match=r"failed on ipu 3, micro-batch \d"):
                engines.run([torch.randn(16, 4), torch.full((16,), 7)], rates("sgd"))
        engines.train_state.move_to_host()
        assert_same({**engines.train_state.find_weights()}, before)
        found = trained(engines, calls=1)
        assert_same(found, trained_on_cpu(calls=1, counts=(1, 8, 1)))


def test_a_device_of_one_replica_that_fails_ends_the_call_on_all_and_loses_the_weights(monkeypatch):
    with late_devices(monkeypatch, count=2):
        engines, _ = on_shifted_devices("an ipu and two replicas", counts=(1, 4, 1))
        x, labels = batch_for(engines)
        labels.view(4, 2, 2)[:, 1] = 7  # of replica 1
        for _ in range(2):
            with pytest.raises(UnrecoverableError, match="the device late:1 failed"):
                engines.run([x, labels], rates("sgd"))
        engines.close()


def made_at_random(seed):
    """Arguments of `made`, the number of devices, and what the user writes after each of two calls."""
    pick = random.Random(seed)
    parts = tuple(part for parts in pick.sample(list(PARTS.values()), pick.randint(0, 4)) for part in parts)
    counts = pick.randint(1, 2), pick.choice([4, 5, 8]), pick.choice([1, 2, 2, 3, 4, 5])
    options = {
        "ipus": pick.choice([(0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 1, 0), (0, 1, 2, 2), (0, 1, 2, 3)]),
        "order": pick.choice(list(ORDERS)),
        "kind": pick.choice(["sgd", "adamw"]),
        "clip": pick.choice([float("inf"), 0.05]),
        "automatic_loss_scaling": pick.random() < 0.3,
        "recompute": pick.random() < 0.3,
        "reduction": pick.choice(["mean", "mean", "sum", "running"]),
        "outputs": pick.choice(["all", "all", "sum", "final"]),
    }
    kinds = "weight", "data", "buffer", "state", "host", "average"
    writes = [pick.sample(kinds, pick.randint(0, 2)) for _ in range(2)]
    return {"parts": parts, "counts": counts, **options}, pick.randint(2, 4), writes


def written(engine, train_state, kind, writes):
    """All that calls leave behind, after each of which the user writes to weights, buffers or optimizer state."""
    found = {}
    for call, what in enumerate(writes):
        results = engine.run(batch_for(engine, call), rates(kind))
        found |= {f"output {call} {i}": value.clone() for i, value in enumerate(results.outputs())}
        weights = train_state.find_weights()
        for name in what:
            if name == "weight":
                weights["b.weight"].mul_(0.9)
            elif name == "data":
                weights["a.weight"].data.add_(0.01)
            elif name == "buffer":
                weights["norm.running_mean"].fill_(0.3)
            elif name == "host":
                train_state.move_to_host()
            elif name == "average":
                engine.average_buffers()
            for state in train_state.optimizer_states().values() if name == "state" else ():
                next(iter(state.values())).mul_(0.5)
    train_state.move_to_host()
    found |= {key: value.clone() for key, value in train_state.find_weights().items()}
    for key, state in train_state.optimizer_states().items():
        found |= {f"{key} {name}": value.clone() for name, value in state.items()}
    engine.close()
    return found


@pytest.mark.parametrize("seed", [3, 8, 21, 5, 13, *range(100, 200)])
def test_random_models_layouts_replicas_and_writes_have_the_bits_of_one_cpu(seed, monkeypatch):
    options, count, writes = made_at_random(seed)
    names = tuple(f"cuda:{index}" for index in range(count))
    where = {"places": tuple(Place(0, index) for index in range(count)), "devices": names, "spreads": True}
    plan, settings, train_state = made(**options)
    expected = written(Engine(plan, settings, train_state), train_state, options["kind"], writes)
    with late_devices(monkeypatch, seed=seed, count=count):
        plan, settings, train_state = made(**options, **where, device="cuda")
        found = written(Engine(plan, settings, train_state), train_state, options["kind"], writes)
    assert [key for key in expected if not has_same_bits(expected[key], found[key])] == []


@pytest.mark.parametrize("which", ["two", "two ipus and two replicas"])
def test_an_interrupt_ends_the_call_on_all_devices_after_a_whole_step(which, monkeypatch):
    replicas = 1 if which == "two" else 2
    with late_devices(monkeypatch, count=4):
        make = on_devices if which == "two" else lambda *args, **more: on_shifted_devices(*args, **more)[0]
        engines, interrupts = make(which, counts=(4, 5, 1)), [KeyboardInterrupt]

        wait_until_idle = ReadyQueue.wait_until_idle

        def interrupted(queue):
            if interrupts:
                raise interrupts.pop()
            wait_until_idle(queue)

        monkeypatch.setattr(ReadyQueue, "wait_until_idle", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engines.run(batch_for(engines), rates("sgd"))
        done = engines.train_state.commit.done
        engines.train_state.move_to_host()
        found = {key: value.clone() for key, value in engines.train_state.find_weights().items()}
        engines.close()
        one = engine_of(counts=(4, 5, replicas))
        rows = [value[: 10 * replicas * done] for value in batch_for(one)]
        one.close()
        if done:
            one = engine_of(counts=(done, 5, replicas))
            one.run(rows, rates("sgd"))
        assert_same(found, {**one.state.train_state.find_weights()})
