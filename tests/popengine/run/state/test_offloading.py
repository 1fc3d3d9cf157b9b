"""Optimizer state may wait in the host's memory; where it waits changes no bit."""

import pytest
from stand_ins import Remote, SerialRemote, assert_same, batch_for, engine_on, rates, trained

from popengine.errors import RunError
from popengine.run.devices.base import Device
from popengine.run.state import offloading

OFF = ("optimizer",)


class Far(SerialRemote):
    """Notes what comes and goes."""

    uploads, downloads = 0, 0

    def upload(self, value):
        Far.uploads += 1
        return super().upload(value)

    def download(self, target, value):
        Far.downloads += 1
        super().download(target, value)


@pytest.mark.parametrize("kind", ["sgd", "adamw", "lamb", "rmsprop"])
@pytest.mark.parametrize("options", [{}, {"counts": (2, 8, 3), "shard_optimizer": 0}], ids=str)
def test_where_state_waits_changes_no_bit(kind, options, monkeypatch):
    monkeypatch.setattr(offloading, "PORTION", 20)  # a parameter or two at a time
    hyper = [rates(kind, 0.05 / (1 + call)) for call in range(3)]
    for each in hyper:
        each.groups[0].setdefault("alpha", 0.9)
        each.groups[0].setdefault("momentum", 0.9)
    here, away = (
        engine_on(lambda ipu: SerialRemote(), kind=kind, off_device=off, **options) for off in ((), OFF)
    )
    assert_same(trained(here, 3, hyper), trained(away, 3, hyper))


def test_state_stays_in_two_sets_of_the_hosts_memory_and_moves_at_each_update(monkeypatch):
    monkeypatch.setattr(Far, "uploads", 0)
    monkeypatch.setattr(Far, "downloads", 0)
    engine = engine_on(lambda ipu: Far(), kind="adamw", off_device=OFF)
    moments = {
        (place, key, name): value
        for place, kept in engine.snapshot.kept.items()
        for key, state in kept.states.items()
        for name, value in state.items()
    }
    engine.run(batch_for(engine), rates("adamw"))
    inputs, outputs = 2 * 16, 2 * 16
    states = 2 * 10 * 2  # updates, parameters, moments
    assert (Far.uploads, Far.downloads) == (inputs + states, outputs + states)
    after = engine.snapshot.kept
    assert all(after[p].spare[n, k] is value for (p, k, n), value in moments.items())  # for the next call
    assert all(
        after[p].states[key][name].any() for p, key, name in moments if name == "exp_avg" and key != "b.bias"
    )


def test_a_failed_call_puts_the_hosts_state_back():
    engine, twin = (engine_on(lambda ipu: Remote(), kind="adamw", off_device=OFF) for _ in range(2))
    for each in (engine, twin):
        each.run(batch_for(each), rates("adamw"))
    x, y = batch_for(engine)
    y[-1] = 77
    with pytest.raises(RunError):
        engine.run([x, y], rates("adamw"))
    assert_same(trained(engine), trained(twin))


def test_loaded_state_is_used_by_the_next_update():
    here, away = (engine_on(lambda ipu: SerialRemote(), kind="adamw", off_device=off) for off in ((), OFF))
    for engine in (here, away):
        engine.run(batch_for(engine), rates("adamw"))
        states = engine.read_optimizer()
        engine.write_optimizer({k: {n: v * 0.5 for n, v in s.items()} for k, s in states.items()})
    assert_same(trained(here), trained(away))


def test_a_cpu_has_the_hosts_memory_anyway():
    engine = engine_on(lambda ipu: Device(), kind="adamw", off_device=OFF)
    assert engine._workers[0]._updater.offloading is None
