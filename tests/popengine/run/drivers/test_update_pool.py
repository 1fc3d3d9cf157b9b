"""The pool does all tasks, on threads of its own, and says once how it went; updates that it does keep their bits."""

import threading
from dataclasses import replace
from queue import SimpleQueue

import pytest
import torch
from small_engines import LAYOUTS, assert_same, batch_for, engine_of, rates, trained

from popengine.run.drivers.update_pool import UpdatePool
from popengine.update.optimizer_rules import RULES


@pytest.fixture
def pool():
    pool = UpdatePool(2)
    yield pool
    pool.close()


def done(pool, tasks, is_stopped=lambda: False):
    ends = SimpleQueue()
    pool.do(tasks, is_stopped, ends.put)
    error = ends.get(timeout=10)
    assert ends.empty()
    return error


def test_two_threads_work_at_the_same_time_with_one_thread_an_operation(pool):
    before, meet, seen = torch.get_num_threads(), threading.Barrier(2), []

    def task():
        meet.wait(timeout=10)
        seen.append((threading.get_ident(), torch.get_num_threads(), torch.is_inference_mode_enabled()))

    assert done(pool, [task] * 2) is None
    assert len(dict.fromkeys(seen)) == 2
    assert [rest for _, *rest in seen] == [[1, True]] * 2
    assert torch.get_num_threads() == before


def test_all_tasks_are_done_once(pool):
    seen = []
    assert done(pool, [lambda i=i: seen.append(i) for i in range(100)]) is None
    assert sorted(seen) == list(range(100))


def test_after_a_failure_nothing_more_is_begun(pool):
    seen = []

    def fail():
        raise ValueError("a chunk")

    assert str(done(pool, [fail, *[lambda: seen.append(1)] * 1000])) == "a chunk"
    assert len(seen) < 1000


def test_what_is_stopped_ends(pool):
    seen = []
    assert done(pool, [lambda: seen.append(1)] * 9, is_stopped=lambda: True) is None
    assert seen == []


@pytest.fixture
def tiny_chunks(monkeypatch):
    """An update of the small net is many tasks."""
    monkeypatch.setattr("popengine.update.chunks.CHUNK", 4)


@pytest.fixture
def three_cores():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


MORE = {
    "one micro-batch": {"mode": "sharded", "counts": (3, 1, 1), "kind": "adamw"},
    "two micro-batches": {"mode": "sharded", "counts": (2, 2, 1), "kind": "adamw"},
    "lamb": {"mode": "sharded", "counts": (2, 1, 2), "kind": "lamb"},
    "loss scale": {"mode": "sharded", "counts": (2, 2, 1), "optimizer": {"max_grad_value": 0.01}},
}
NAMES = ["adam", "replicas", "sharded state", "clipping", "automatic loss scaling"]


@pytest.mark.parametrize("options", [*(LAYOUTS[name] for name in NAMES), *MORE.values()], ids=[*NAMES, *MORE])
def test_an_update_that_cores_share_has_the_bits_of_one_core(options, three_cores, tiny_chunks, monkeypatch):
    if options.get("kind") == "lamb":  # whose norms are those of chunks
        torch.set_num_threads(1)
        expected = trained(engine_of(**options))
        torch.set_num_threads(3)
    else:
        with monkeypatch.context() as whole:
            whole.setattr("popengine.update.chunks.CHUNK", 1 << 18)
            expected = trained(engine_of(**options))
    assert_same(trained(engine_of(**options)), expected)


@pytest.mark.parametrize("accumulation", [1, 8])
def test_a_failure_in_a_shared_update_leaves_the_weights_as_they_were(
    accumulation, three_cores, tiny_chunks, monkeypatch
):
    engine = engine_of(mode="sharded", counts=(2, accumulation, 1), kind="adamw")
    engine.run(batch_for(engine), rates("adamw"))
    before = {name: value.clone() for name, value in engine.read().items()}
    states, calls = engine.read_optimizer(), []

    def fails_in_the_second_step(*given):
        calls.append(1)
        if len(calls) == 8:
            raise MemoryError("no room")
        RULES["adam"].formula(*given)

    with monkeypatch.context() as change:
        change.setitem(RULES, "adamw", replace(RULES["adamw"], formula=fails_in_the_second_step))
        with pytest.raises(MemoryError, match="no room"):
            engine.run(batch_for(engine), rates("adamw"))
    assert_same(engine.read(), before)
    for key, state in engine.read_optimizer().items():
        assert_same(state, states[key])
    engine.run(batch_for(engine), rates("adamw"))
    assert not torch.equal(engine.read()["a.weight"], before["a.weight"])
    engine.close()
