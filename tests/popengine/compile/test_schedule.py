"""Schedules, drawn: F2 is the forward of micro-batch 2, `..` an idle tick; on shared ipus B1.2 is stage 1's."""

from textwrap import dedent

import pytest

from popengine.compile.schedule import check, depth_first, draw, pipelined, sharded
from popengine.errors import ScheduleError
from popengine.ir import Action, Schedule


def drawn(schedule):
    return "\n" + draw(schedule)


def test_one_forward_one_backward_over_two_stages():
    assert drawn(pipelined((0, 1), 3, training=True)) == dedent("""
        ipu 0 | F0 F1 .. B0 F2 B1 .. B2
        ipu 1 | .. F0 B0 F1 B1 F2 B2 ..
        """)


def test_one_forward_one_backward_over_three_stages():
    assert drawn(pipelined((0, 1, 2), 4, training=True)) == dedent("""
        ipu 0 | F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
        ipu 1 | .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
        ipu 2 | .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..
        """)


def test_one_forward_one_backward_over_four_stages():
    assert drawn(pipelined((0, 1, 2, 3), 5, training=True)) == dedent("""
        ipu 0 | F0 F1 F2 F3 .. .. .. B0 F4 B1 .. B2 .. B3 .. B4
        ipu 1 | .. F0 F1 F2 .. .. B0 F3 B1 F4 B2 .. B3 .. B4 ..
        ipu 2 | .. .. F0 F1 .. B0 F2 B1 F3 B2 F4 B3 .. B4 .. ..
        ipu 3 | .. .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 .. .. ..
        """)


def test_a_pipeline_that_wraps_around_shares_its_first_ipu():
    assert drawn(pipelined((0, 1, 0), 3, training=True)) == dedent("""
        ipu 0 | F0.0 F0.1 F2.0 B2.0 F2.1 B2.1 B0.0 B0.1 F0.2 ..   F2.2 B2.2 ..   B0.2
        ipu 1 | ..   F1.0 F1.1 ..   B1.0 ..   B1.1 ..   ..   F1.2 ..   ..   B1.2 ..
        """)


def test_one_stage_alternates():
    assert drawn(pipelined((0,), 3, training=True)) == "\nipu 0 | F0 B0 F1 B1 F2 B2\n"


def test_inference_streams_forwards():
    assert drawn(pipelined((0, 1, 2), 4, training=False)) == dedent("""
        ipu 0 | F0 F1 F2 F3 .. ..
        ipu 1 | .. F0 F1 F2 F3 ..
        ipu 2 | .. .. F0 F1 F2 F3
        """)


def test_sharded_stages_take_turns():
    assert drawn(sharded((0, 1), 2, training=True)) == dedent("""
        ipu 0 | F0 .. .. B0 F1 .. .. B1
        ipu 1 | .. F0 B0 .. .. F1 B1 ..
        """)


def test_sharded_stages_take_turns_in_inference():
    assert drawn(sharded((0, 1), 2, training=False)) == dedent("""
        ipu 0 | F0 .. F1 ..
        ipu 1 | .. F0 .. F1
        """)


def test_cores_that_share_all_ipus_stay_with_a_micro_batch():
    assert drawn(depth_first(2, 3, True, cores=2)) == dedent("""
        core 0 | F0.0 F1.0 B1.0 B0.0 F0.2 F1.2 B1.2 B0.2
        core 1 | F0.1 F1.1 B1.1 B0.1 ..   ..   ..   ..
        """)


@pytest.mark.parametrize("cores", [1, 2, 3, 8])
@pytest.mark.parametrize("training", [True, False])
def test_depth_first_is_complete_and_can_run(cores, training):
    for stages, micro_batches in ((1, 1), (1, 7), (4, 3), (3, 20)):
        schedule = depth_first(stages, micro_batches, training, cores)
        check(schedule)
        assert (schedule.name, list(schedule.rows)) == ("depth first", [*range(cores)])


PLACEMENTS = [
    (0,),
    (0, 1),
    (1, 0),
    (0, 1, 2),
    (0, 0, 1),
    (0, 1, 0),
    (0, 1, 2, 0),
    (0, 1, 0, 1),
    (3, 1, 4, 1, 5),
    (0,) * 6,
]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("order", [pipelined, sharded])
def test_every_order_is_complete_and_can_run(order, micro_batches, training):
    for ipus in [*PLACEMENTS, tuple(range(9))]:
        schedule = order(ipus, micro_batches, training)
        check(schedule)
        assert set(schedule.rows) == set(ipus)


@pytest.mark.parametrize("ipus", [*PLACEMENTS, tuple(range(9))])
def test_a_stage_has_at_most_stages_minus_stage_micro_batches_in_flight(ipus):
    """Between their forward and their backward; so a stage's memory does not grow with the accumulation."""
    schedule = pipelined(ipus, 30, training=True)
    for row in schedule.rows.values():
        flying = [0] * len(ipus)
        for action in row:
            flying[action.stage] += 1 if action.phase == "F" else -1
            assert 0 <= flying[action.stage] <= len(ipus) - action.stage


def test_each_stage_runs_its_micro_batches_in_order():
    """Sums of gradients and running statistics depend on it."""
    for ipus in PLACEMENTS:
        for row in pipelined(ipus, 12, training=True).rows.values():
            for stage in range(len(ipus)):
                for phase in "FB":
                    order = [a.micro_batch for a in row if (a.phase, a.stage) == (phase, stage)]
                    assert order in ([], [*range(12)])


def schedule_of(rows, stages=2, micro_batches=1, in_flight=2):
    def action(text):
        return Action(text[0], int(text[1]), int(text[3]))

    parsed = {ipu: tuple(map(action, row.split())) for ipu, row in rows.items()}
    return Schedule(parsed, stages, micro_batches, True, in_flight)


def test_a_missing_and_a_double_action_are_named():
    with pytest.raises(ScheduleError, match="incomplete schedule") as caught:
        check(schedule_of({0: "F0.0 F0.0", 1: "F1.0 B1.0"}))
    assert "B0.0 is missing" in str(caught.value)
    assert "F0.0 is there 2 times" in str(caught.value)


def test_a_foreign_action_is_named():
    with pytest.raises(ScheduleError, match=r"incomplete schedule: F1\.7 does not belong"):
        check(schedule_of({0: "F0.0 B0.0", 1: "F1.0 B1.0 F1.7"}))


def test_a_deadlock_names_who_waits_for_what():
    with pytest.raises(ScheduleError, match="deadlock") as caught:
        check(schedule_of({0: "B0.0 F0.0", 1: "F1.0 B1.0"}))
    assert "ipu 0 waits at B0.0 for F0.0, B1.0" in str(caught.value)
    assert "ipu 1 waits at F1.0 for F0.0" in str(caught.value)


def test_more_in_flight_than_allowed_is_a_deadlock():
    rows = {0: "F0.0 F0.1 B0.0 B0.1", 1: "F1.0 B1.0 F1.1 B1.1"}
    check(schedule_of(rows, micro_batches=2, in_flight=2))
    with pytest.raises(ScheduleError, match=r"ipu 0 waits at F0\.1 for B0\.0"):
        check(schedule_of(rows, micro_batches=2, in_flight=1))
