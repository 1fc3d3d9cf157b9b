"""Virtual time: when tasks would run, on devices that are not there."""

from popengine.order import simulate


def test_a_device_takes_the_first_task_that_is_ready():
    after = [[], [0], [], [2]]
    found = simulate(after, [2, 1, 3, 1], 2)
    assert found.starts == [0, 2, 0, 3]
    assert found.devices == [0, 0, 1, 0]
    assert found.length == 4


def test_a_task_with_a_device_of_its_own_waits_for_that():
    found = simulate([[], [], [1]], [2, 1, 1], [7, 7, 3])
    assert found.starts == [0, 2, 3]
    assert found.devices == [7, 7, 3]


def test_tasks_without_a_cost_pass_in_no_time():
    found = simulate([[], [0], [1], []], [0, 0, 1, 0], 1)
    assert found.starts == [0, 0, 0, 1]
