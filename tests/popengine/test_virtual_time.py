"""Virtual time: when tasks would run, on devices that are not there."""

import pytest

from popengine.compile.schedule import depth_first, pipelined, sharded
from popengine.compile.schedule.check import timeline_of
from popengine.virtual_time import simulate


def test_a_device_takes_the_first_task_that_is_ready():
    after = [[], [0], [], [2]]
    found = simulate(after, [2, 1, 3, 1], 2)
    assert found.starts == [0, 2, 0, 3]
    assert found.devices == [0, 0, 1, 0]
    assert (found.length, found.busy, found.bubble) == (4, 7, 1 / 8)


def test_a_task_with_a_device_of_its_own_waits_for_that():
    found = simulate([[], [], [1]], [2, 1, 1], [7, 7, 3])
    assert found.starts == [0, 2, 3]
    assert found.devices == [7, 7, 3]


def test_tasks_that_wait_for_each_other_never_run():
    found = simulate([[], [2], [1]], [1, 1, 1], 1)
    assert found.devices == [0, -1, -1]


def test_tasks_without_a_cost_pass_in_no_time():
    found = simulate([[], [0], [1], []], [0, 0, 1, 0], 1)
    assert found.starts == [0, 0, 0, 1]


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("factor", [1, 2, 5])
def test_the_bubble_of_a_pipeline_is_that_of_the_textbook(stages, factor):
    """(p - 1) / (m + p - 1) for p stages and m micro-batches."""
    micro_batches = factor * stages
    found = timeline_of(pipelined(range(stages), micro_batches, training=True))[1]
    assert found.length == 2 * micro_batches + 2 * (stages - 1)
    assert found.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1), abs=1e-12)


def test_a_pipeline_that_wraps_around_has_a_bubble_too():
    found = timeline_of(pipelined((0, 1, 0), 3, training=True))[1]  # drawn in test_schedule.py
    assert (found.length, found.busy) == (14, 18)
    assert found.bubble == 1 - 18 / (2 * 14)


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_stages_that_take_turns_have_one_ipu_busy_at_a_time(stages):
    found = timeline_of(sharded(range(stages), 6, training=True))[1]
    assert found.length == found.busy == 2 * stages * 6


@pytest.mark.parametrize(("cores", "length"), [(1, 32), (2, 16), (4, 8), (8, 8)])
def test_cores_that_share_all_ipus_are_busy_as_long_as_there_are_micro_batches(cores, length):
    assert timeline_of(depth_first(4, 4, True, cores))[1].length == length
