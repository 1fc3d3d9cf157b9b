"""The life of a call's steps: what an interrupt of the user's thread ends, and what runs to its end."""

import gc
import weakref

import pytest

from popengine.run.call import ALONE, Commit, Stopped


@pytest.fixture
def commit():
    return Commit()


def test_without_a_call_there_is_nothing_to_wait_for(commit):
    commit.settle()
    assert (commit.state, commit.is_stopping) == ("ended", False)


def test_a_call_that_the_threads_have_not_begun_ends_and_wakes_the_peers(commit):
    told, before = [], []
    commit.begin("call 3", 2, lambda: before.extend(told), told.append)
    commit.settle()
    assert (commit.state, commit.is_stopping, commit.done) == ("ended", True, 0)
    assert before == ["was interrupted at call 3"]  # the threads may wait for a peer
    assert set(told) == {"was interrupted at call 3"}


def test_an_interrupted_call_stops_before_its_next_step_and_its_wait_survives_further_interrupts(commit):
    waits = []

    def wait():
        waits.append(commit.is_stopping)
        if len(waits) < 3:
            raise KeyboardInterrupt
        with pytest.raises(Stopped):
            commit.commit()
        assert commit.end(Stopped()) is None

    commit.begin("call 1", 2, wait, ALONE.abort)
    commit.settle()
    assert waits == [True] * 3
    assert (commit.state, commit.done, commit.complete_calls) == ("ended", 0, 0)
    assert not commit.lock.locked()


def test_a_committed_step_runs_to_its_end_before_the_peers_are_told(commit):
    told = []

    def wait():
        assert commit.lock.locked() and told == []
        with pytest.raises(Stopped):
            commit.finish_step()
        commit.end(Stopped())

    commit.begin("call 1", 2, wait, told.append)
    commit.commit()
    commit.settle()
    assert (commit.state, commit.done, told) == ("ended", 1, ["was interrupted at call 1"])


def test_the_last_step_of_an_interrupted_call_completes_it(commit):
    told = []
    commit.begin("call 1", 1, lambda: (commit.finish_step(), commit.end(None)), told.append)
    commit.commit()
    commit.settle()
    assert (commit.complete_calls, told) == (1, [])


def test_an_ended_call_is_not_waited_for_and_its_engine_is_let_go(commit):
    class Engine:
        def wait(self):
            raise AssertionError("the call has ended")

    engine = Engine()
    commit.begin("call 1", 1, engine.wait, ALONE.abort)
    commit.commit()
    commit.finish_step()
    commit.end(None)
    commit.settle()
    watch = weakref.ref(engine)
    del engine
    gc.collect()
    assert watch() is None and not commit.is_stopping
