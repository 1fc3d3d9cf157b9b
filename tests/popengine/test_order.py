"""Orders, drawn: F2 is the forward of micro-batch 2, `..` an idle tick; on shared ipus B1.2 is stage 1's."""

from textwrap import dedent

import pytest

from popengine.errors import Error
from popengine.order import (
    ORDERS,
    Action,
    After,
    Order,
    StepActions,
    draw,
    enter_order,
    order_named,
    timeline,
)


def actions(*ipus, training=True, order="1f1b"):
    """Each phase waits for the one before, F0 F1 ... B1 B0; `ipus` of each stage. In an order that cuts backwards
    B1 W1 W0 are in place of B1 B0, and W waits for the B of its stage (W0 for B1)."""
    phases = [("F", stage) for stage in range(len(ipus))]
    cuts = training and ORDERS[order].cuts_backwards
    phases += [("B", stage) for stage in reversed(range(cuts, len(ipus)))] if training else []
    found = [
        Action(phase, stage, ipus[stage], (After(row - 1),) if row else ())
        for row, (phase, stage) in enumerate(phases)
    ]
    for stage in reversed(range(len(ipus))) if cuts else ():
        last = phases.index(("B", max(1, stage))) if len(ipus) > 1 else 0
        found.append(Action("W", stage, ipus[stage], (After(last),)))
    return found


def drawn(ipus, micro_batches, order="1f1b", training=True, cores=0):
    return "\n" + draw(actions(*ipus, training=training, order=order), micro_batches, ORDERS[order], cores)


def test_one_forward_one_backward_over_two_stages():
    assert drawn((0, 1), 3) == dedent("""
        ipu 0 | F0 F1 .. B0 F2 B1 .. B2
        ipu 1 | .. F0 B0 F1 B1 F2 B2 ..
        """)


def test_one_forward_one_backward_over_four_stages():
    assert drawn((0, 1, 2, 3), 5) == dedent("""
        ipu 0 | F0 F1 F2 F3 .. .. .. B0 F4 B1 .. B2 .. B3 .. B4
        ipu 1 | .. F0 F1 F2 .. .. B0 F3 B1 F4 B2 .. B3 .. B4 ..
        ipu 2 | .. .. F0 F1 .. B0 F2 B1 F3 B2 F4 B3 .. B4 .. ..
        ipu 3 | .. .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 .. .. ..
        """)


def test_a_pipeline_that_wraps_around_shares_its_first_ipu():
    assert drawn((0, 1, 0), 3) == dedent("""
        ipu 0 | F0.0 F0.1 F2.0 B2.0 F2.1 B2.1 B0.0 B0.1 F0.2 ..   F2.2 B2.2 ..   B0.2
        ipu 1 | ..   F1.0 F1.1 ..   B1.0 ..   B1.1 ..   ..   F1.2 ..   ..   B1.2 ..
        """)


def test_one_stage_alternates():
    assert drawn((0,), 3) == "\nipu 0 | F0 B0 F1 B1 F2 B2\n"


def test_inference_streams_forwards():
    assert drawn((0, 1, 2), 4, training=False) == dedent("""
        ipu 0 | F0 F1 F2 F3 .. ..
        ipu 1 | .. F0 F1 F2 F3 ..
        ipu 2 | .. .. F0 F1 F2 F3
        """)


def test_sharded_stages_take_turns():
    assert drawn((0, 1), 2, "sharded") == dedent("""
        ipu 0 | F0 .. .. B0 F1 .. .. B1
        ipu 1 | .. F0 B0 .. .. F1 B1 ..
        """)


def test_sharded_stages_take_turns_in_inference():
    assert drawn((0, 1), 2, "sharded", training=False) == dedent("""
        ipu 0 | F0 .. F1 ..
        ipu 1 | .. F0 .. F1
        """)


def test_cores_that_share_all_ipus_stay_with_a_micro_batch():
    assert drawn((0, 1), 3, cores=2) == dedent("""
        core 0 | F0.0 F1.0 B1.0 B0.0 F0.2 F1.2 B1.2 B0.2
        core 1 | F0.1 F1.1 B1.1 B0.1 ..   ..   ..   ..
        """)


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
    tuple(range(9)),
]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 3, 20])
@pytest.mark.parametrize("cores", [0, 2, 8])
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_runs_each_action_once(order, cores, micro_batches, training):
    for ipus in PLACEMENTS:
        rows = actions(*ipus, training=training, order=order)
        tasks, found = timeline(rows, micro_batches, ORDERS[order], cores)
        assert sorted(tasks) == [(row, m) for row in range(len(rows)) for m in range(micro_batches)]
        assert cores or set(found.devices) == set(ipus)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("cores", [0, 1, 2, 8])
@pytest.mark.parametrize("order", ORDERS)
def test_no_more_micro_batches_are_under_way_than_an_order_says(order, cores, training):
    for ipus in PLACEMENTS:
        rows = actions(*ipus, training=training, order=order)
        most = ORDERS[order].in_flight(StepActions(tuple(rows), 20, cores))
        tasks, found = timeline(rows, 20, ORDERS[order], cores)
        begins, ends = [20 * [None] for _ in range(2)]
        for (_, m), start, end in zip(tasks, found.starts, found.ends, strict=True):
            begins[m] = start if begins[m] is None else min(begins[m], start)
            ends[m] = end if ends[m] is None else max(ends[m], end)
        flying = [sum(b <= now < e for b, e in zip(begins, ends, strict=True)) for now in begins]
        assert max(flying) <= most


@pytest.mark.parametrize("ipus", PLACEMENTS)
def test_a_stage_has_at_most_stages_minus_stage_micro_batches_in_flight(ipus):
    """Between their forward and their backward; so a stage's memory does not grow with the accumulation."""
    rows = actions(*ipus)
    tasks, found = timeline(rows, 30, ORDERS["1f1b"])
    flying = [0] * len(ipus)
    for number in found.order:
        action = rows[tasks[number][0]]
        flying[action.stage] += 1 if action.phase == "F" else -1
        assert 0 <= flying[action.stage] <= len(ipus) - action.stage


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("factor", [1, 2, 5])
def test_the_bubble_of_a_pipeline_is_that_of_the_textbook(stages, factor):
    """(p - 1) / (m + p - 1) for p stages and m micro-batches."""
    micro_batches = factor * stages
    _, found = timeline(actions(*range(stages)), micro_batches, ORDERS["1f1b"])
    assert found.length == 2 * micro_batches + 2 * (stages - 1)
    idle = 1 - 2 * micro_batches / found.length
    assert idle == pytest.approx((stages - 1) / (micro_batches + stages - 1), abs=1e-12)


@pytest.mark.parametrize(("cores", "expected"), [(1, 32), (2, 16), (4, 8), (8, 8)])
def test_cores_that_share_all_ipus_are_busy_as_long_as_there_are_micro_batches(cores, expected):
    assert timeline(actions(0, 1, 2, 3), 4, ORDERS["1f1b"], cores)[1].length == expected


def test_gpipe_runs_all_forwards_first():
    assert drawn((0, 1), 3, "gpipe") == dedent("""
        ipu 0 | F0 F1 F2 .. .. B0 B1 B2
        ipu 1 | .. F0 F1 F2 B0 B1 B2 ..
        """)


def test_interleaved_stages_pass_on_as_many_micro_batches_as_there_are_ipus():
    assert drawn((0, 1, 0, 1), 4, "interleaved") == dedent("""
        ipu 0 | F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 ..   B2.2 ..   B2.3 B0.2 B0.3
        ipu 1 | ..   F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3 ..
        """)


@pytest.mark.parametrize(
    ("ipus", "turns", "micro_batches", "plain"),
    [(4, 2, 16, 78), (4, 2, 8, 42), (2, 2, 8, 34), (4, 3, 16, 114), (3, 2, 12, 57), (8, 2, 32, 161)],
)
def test_interleaving_leaves_the_bubble_of_one_stage(ipus, turns, micro_batches, plain):
    """2 (p - 1) ticks for p ipus, however many stages each has; in one forward, one backward it grows with them."""
    rows = actions(*(list(range(ipus)) * turns))
    assert timeline(rows, micro_batches, ORDERS["1f1b"])[1].length == plain
    ticks = timeline(rows, micro_batches, ORDERS["interleaved"])[1].length
    assert ticks == 2 * micro_batches * turns + 2 * (ipus - 1)


def test_zero_bubble_fills_waits_with_weight_gradients():
    assert drawn((0, 1), 4, "zero-bubble") == dedent("""
        ipu 0 | F0 F1 .. W0 F2 W1 F3 .. W2 .. .. W3 ..
        ipu 1 | .. F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3
        """)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 8), (3, 9), (4, 8), (4, 16)])
def test_zero_bubble_leaves_a_third_of_the_bubble(stages, micro_batches):
    """A backward takes two ticks, and each half of it one; a stage holds no more micro-batches than in 1F1B."""
    rows = actions(*range(stages))
    costs = [1 + (action.phase == "B") for action in rows]
    whole = timeline(rows, micro_batches, ORDERS["1f1b"], costs=costs)[1].length
    rows = actions(*range(stages), order="zero-bubble")
    costs = [1 + (action.phase == "W" and not action.stage) for action in rows]
    tasks, found = timeline(rows, micro_batches, ORDERS["zero-bubble"], costs=costs)
    assert (whole, found.length) == (3 * (micro_batches + stages - 1), 3 * micro_batches + stages - 1)
    held = [0] * stages
    for number in found.order:
        action = rows[tasks[number][0]]
        held[action.stage] += {"F": 1, "B": 0, "W": -1}[action.phase]
        assert held[action.stage] <= stages


def test_zero_bubble_in_a_v_has_two_stages_on_each_ipu():
    assert drawn((0, 1, 1, 0), 3, "zero-bubble-v") == dedent("""
        ipu 0 | F0.0 F0.1 F0.2 F3.0 B3.0 W3.0 F3.1 B3.1 W3.1 W0.0 W0.1 ..   F3.2 B3.2 W3.2 ..   W0.2 ..   ..
        ipu 1 | ..   F1.0 F2.0 F1.1 F2.1 B2.0 B1.0 F1.2 B2.1 B1.1 W2.0 F2.2 W1.0 W2.1 B2.2 B1.2 W1.1 W2.2 W1.2
        """)


def test_dualpipe_in_a_v_pairs_a_forward_with_the_backward_of_the_other_stage():
    rows = [row.split() for row in drawn((0, 1, 1, 0), 4, "dualpipe-v").splitlines() if row]
    first, second = (" ".join(cell for cell in row[3:] if cell != "..") for row in rows)
    assert first == (
        "F0.0 F0.1 F0.2 F3.0 B3.0 W3.0 F3.1"  # fill the V
        " F0.3 B3.1 W3.1 F3.2 W0.0"  # in turns; W0 is the whole backward of stage 0
        " B3.2 W3.2 F3.3 W0.1 B3.3 W3.3 W0.2 W0.3"  # drain
    )
    assert second == (
        "F1.0 F2.0 F1.1 F2.1 F1.2 B2.0 W2.0 F2.2 B1.0 W1.0 F1.3 B2.1 W2.1 F2.3 B1.1 W1.1"
        " B2.2 B1.2 B2.3 B1.3 W2.2 W1.2 W2.3 W1.3"
    )


@pytest.mark.parametrize("schedule", ["zero-bubble-v", "dualpipe-v"])
@pytest.mark.parametrize("ipus", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("rounds", [2, 3, 4])
def test_schedules_in_a_v_leave_a_sixth_of_the_bubble(ipus, rounds, schedule):
    """n - 1 ticks of half a stage, where 1F1B has 3 (n - 1) of a stage; and an ipu holds half a stage more than the
    first one does in 1F1B."""
    micro_batches = rounds * ipus
    rows = actions(*range(ipus), *reversed(range(ipus)), order=schedule)
    costs = [1 + (action.phase == "W" and not action.stage) for action in rows]
    tasks, found = timeline(rows, micro_batches, ORDERS[schedule], costs=costs)
    assert found.length == 6 * micro_batches + ipus - 1
    held = [0] * ipus
    for number in found.order:
        action = rows[tasks[number][0]]
        held[action.ipu] += {"F": 1, "B": 0, "W": -1}[action.phase]
        assert held[action.ipu] <= 2 * ipus + 1


def test_the_name_of_an_order_is_checked():
    with pytest.raises(Error, match=r"no order '1f1c': known are 1f1b, .*did you mean '1f1b'"):
        order_named("1f1c")
    with pytest.raises(Error, match=r"'gpipe' is the name of an order of Pando's"):
        enter_order(Order("gpipe", lambda step, action, micro_batch: (0,)))


def test_an_order_whose_tasks_wait_for_each_other_is_an_error():
    """Micro-batch 0 would wait for its own backward."""
    never = Order("never", lambda step, action, m: (m,), lambda step, action: [After(step.last_of(0) or 0)])
    with pytest.raises(Error, match="in the order of this step 8 of 8 tasks never begin"):
        timeline(actions(0, 1), 2, never)
