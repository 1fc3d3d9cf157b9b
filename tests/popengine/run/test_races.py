"""No stream reads what another one is still writing, nor writes to what another one still reads."""

import itertools

import pytest
from races import Races, Watched
from stand_ins import SerialRemote, assert_same, batch_for, engine_on, rates, trained

from popengine.settings import Anchor

pytestmark = pytest.mark.simulated

PLANS = {
    "pipelined, with a weight on two ipus": {},
    "two stages on an ipu": {"ipus": (0, 1, 2, 0), "counts": (2, 7, 1)},
    "sharded": {"ipus": (0, 1, 0, 1), "mode": "sharded"},
    "replicas": {"counts": (2, 7, 3)},
    "sharded state": {"counts": (2, 7, 2), "kind": "adamw", "shard_optimizer": 0},
    "clipping": {"counts": (2, 7, 2), "optimizer": {"max_grad_norm": 0.1}},
    "recomputation": {"recompute": True, "dropout": 0.5},
    "sums": {"outputs": "sum", "counts": (2, 7, 2)},
    "weights asked for": {
        "anchors": (Anchor("weight", "c.weight", "all"), Anchor("updated", "a.weight", "all"))
    },
    "state on the host": {"kind": "adamw", "off_device": ("optimizer",), "counts": (2, 7, 2)},
    "inference": {"training": False, "counts": (8, 1, 2)},
}


def watched_engine(races, serial, **options):
    names = itertools.count()

    class Device(Watched):
        is_serial = serial

    return engine_on(lambda ipu: Device(races, f"ipu {ipu} ({next(names)})"), **options)


def run(engine):
    engine.run(batch_for(engine), rates(engine.settings.optimizer.kind))


@pytest.mark.parametrize("serial", [True, False], ids=["one thread", "a thread an ipu"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_run_has_no_races(plan, serial):
    races, calls = Races(), 2 if "counts" not in PLANS[plan] else 1  # what is watched is slow
    engine = watched_engine(races, serial, **PLANS[plan])
    found = trained(engine, calls)
    assert len(races.written) > 100, "somebody was watched"
    assert sorted(set(races.found)) == []
    assert_same(found, trained(engine_on(lambda ipu: SerialRemote(), **PLANS[plan]), calls))


@pytest.mark.parametrize(
    ("name", "instead", "plan", "complaint"),
    [
        ("wait", lambda self, mark: None, "replicas", "does not wait for"),
        ("wait", lambda self, mark: None, "sharded state", "does not wait for"),
        ("adopt", lambda self, value: value, "two stages on an ipu", "may have been freed"),
        ("await_downloads", lambda self: None, "weights asked for", "takes"),
    ],
    ids=["wait", "wait of the owners", "adopt", "await_downloads"],
)
def test_what_is_left_out_is_noticed(name, instead, plan, complaint, monkeypatch):
    races = Races()
    monkeypatch.setattr(Watched, name, instead)
    run(watched_engine(races, True, **PLANS[plan]))
    assert any(complaint in text for text in races.found)


def test_sums_handed_on_without_a_copy_are_noticed(monkeypatch):
    """The replica that has added up the sums writes to its own again while others still read them."""

    def reduce(sums, replica, members, name, give, instances=None, cuts=()):
        first, *others = members
        if replica == first:
            for other in others:
                for value, more in zip(sums, (yield name, other), strict=True):
                    value.add_(more)
            for other in others:
                give((name, "total", other), sums)
        else:
            give((name, replica), sums)
            for value, total in zip(sums, (yield name, "total", replica), strict=True):
                value.copy_(total)

    races = Races()
    monkeypatch.setattr("popengine.run.updating.reduce_over_replicas", reduce)
    run(watched_engine(races, True, counts=(2, 7, 3)))
    assert any("does not wait for" in text for text in races.found)
