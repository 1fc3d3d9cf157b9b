"""The figures of a profile, on simulated devices where the right answer is known."""

import random
from dataclasses import replace

import pytest
from simulated import MS, simulated

from popengine.profile import HostEvent, Profile
from popvision import memory, virtual
from popvision.advice import advice_sentences, machine_sentence, stages_sentence
from popvision.analysis import Figures, compare_figures
from popvision.report import page_data, summary
from popvision.units import size_text
from popvision.virtual import StepModel, promised_speedup

PERFECT = {2: (2.0, 2.0)}  # two cores compute twice as much as one


def told(profile):
    return advice_sentences(Figures(profile))


@pytest.mark.parametrize("stages, micro_batches", [(1, 4), (2, 4), (4, 8), (4, 32), (8, 16), (3, 1)])
@pytest.mark.parametrize("training", [True, False])
def test_the_bubble_of_an_ideal_pipeline_is_p_minus_1_over_m_plus_p_minus_1(stages, micro_batches, training):
    found = Figures(simulated(stages, micro_batches, training=training))
    expected = (stages - 1) / (micro_batches + stages - 1)
    assert found.bubble_ideal == pytest.approx(expected, abs=1e-9)
    assert found.bubble_measured == pytest.approx(expected, rel=0.01, abs=1e-9)


def test_a_sharded_run_has_one_ipu_busy_at_a_time():
    found = Figures(simulated(4, 8, order="sharded"))
    assert found.bubble_ideal == pytest.approx(0.75)
    assert found.bubble_measured == pytest.approx(0.75)


def test_a_step_in_virtual_time_takes_as_long_as_the_run():
    costs = {("F", 0): 1.0, ("F", 1): 3.0, ("F", 2): 2.0, ("B", 0): 2.0, ("B", 1): 7.0, ("B", 2): 4.0}
    profile = simulated(3, 6, cost=lambda phase, stage: int(costs[phase, stage] * MS))
    length = profile.calls[0].end - profile.calls[0].start
    assert Figures(profile).step_apart == pytest.approx(length / 1e9)


def test_a_long_step_is_as_long_as_all_its_micro_batches():
    forward, backward = (1.0, 3.0, 2.0, 1.0), (2.0, 3.0, 4.0, 1.0)
    costs = {(phase, i): ns for phase, row in (("F", forward), ("B", backward)) for i, ns in enumerate(row)}
    step = StepModel.of(simulated(4), costs, updates={}, micro_batches=5000)
    # The slowest ipu, of 6 a micro-batch, waits for the first forward of the one before and ends before its backward.
    assert virtual.simulated_ns(step) == pytest.approx(5000 * 6 + 4, abs=12)
    alone = 17 * 5000  # too short to be shared
    assert virtual.ns_on_host(step, 2) == pytest.approx((alone, alone), rel=0.01)
    large = replace(step, costs=tuple(1e6 * ns for ns in step.costs), sharing=PERFECT)
    assert virtual.ns_on_host(large, 2) == pytest.approx((1e6 * alone / 2, 1e6 * alone / 2), rel=0.01)


def test_the_slowest_stage_is_named_with_its_time():
    found = Figures(simulated(3, 8, cost=lambda phase, stage: (5 if stage == 1 else 1) * MS))
    assert found.slowest == 1
    assert [stage.forward for stage in found.stages] == [1 * MS, 5 * MS, 1 * MS]
    assert found.unevenness == pytest.approx(15 / 7)
    assert stages_sentence(found) == "The slowest stage takes 2.14 times the average one."


def test_a_stage_of_several_blocks_that_others_wait_for_is_advised_to_be_cut():
    profile = simulated(
        2, 16, cost=lambda phase, stage: (3 if stage == 0 else 1) * MS, blocks=("A, B, C", "D")
    )
    (text,) = [text for text in told(profile) if text.startswith("Stage 0")]
    assert text == (
        "Stage 0 (A, B, C) takes 1.5 times the average stage, for which separate devices wait."
        " Move one of its blocks, or let poptorch.AutoBalance(2) cut the stages."
    )
    one_block = simulated(2, 16, cost=lambda phase, stage: (3 if stage == 0 else 1) * MS)
    assert not [text for text in told(one_block) if text.startswith("Stage 0")]


def test_an_advice_says_for_which_machine_it_holds():
    profile = shared(simulated(4, 4), (2, 2.0, 2.0, 1.0))
    found = Figures(profile)
    (change,) = [change for change in found.changes if change.kind == "micro-batches"]
    assert change.apart > 1.4 and change.here == pytest.approx(
        1, rel=0.1
    )  # both cores have work all the time
    (text,) = [text for text in advice_sentences(found) if "gradientAccumulation" in text]
    assert (
        "times as fast on separate devices; nothing is promised here, where 2 of 64 cores share all ipus"
        in text
    )


def shared(profile, *sharing, **more):
    """The same on a host of two cores that share their work so well."""
    facts = {**profile.facts, "threads": 2, "threads_inside": 1, "sharing": sharing, **more}
    return replace(profile, facts=facts)


def of_kind(profile, kind):
    return next((change for change in Figures(profile).changes if change.kind == kind), None)


def test_the_cores_that_share_all_ipus_are_said_of_those_of_the_machine():
    profile = simulated(2, 4)

    def words(threads, cores):
        return Figures(replace(profile, facts={**profile.facts, "threads": threads, "cores": cores})).here_is

    assert words(1, 2) == "here, where 1 of 2 cores runs all ipus"
    assert words(1, 1) == "here, where 1 core runs all ipus"
    assert words(2, 2) == "here, where 2 cores share all ipus"


def test_what_more_cores_give_is_what_they_were_measured_to_share():
    profile = simulated(2, 16, order="sharded")
    profile = replace(profile, facts={**profile.facts, "mode": "sharded"})
    well, badly = shared(profile, (2, 1.8, 2.0, 1.0)), shared(profile, (2, 0.9, 1.1, 1.0))
    # At any time but when the last micro-batch ends both cores have a task; the least that was measured counts.
    assert of_kind(well, "pipeline").here == pytest.approx(1.8, rel=0.05)
    assert of_kind(badly, "pipeline").here == pytest.approx(0.9, rel=0.05)
    assert of_kind(badly, "replicas") is None
    assert of_kind(shared(profile), "pipeline").here is None  # nobody knows, so nothing is said
    assert not any("promised here" in text for text in told(shared(profile)))


def test_where_the_driver_may_leave_tasks_to_one_core_two_promise_nothing():
    def sharded(cost):
        found = simulated(2, 16, order="sharded", cost=lambda phase, stage: cost)
        found = replace(found, facts={**found.facts, "mode": "sharded"})
        return of_kind(shared(found, (2, 1.8, 1.8, 1.0)), "pipeline")

    assert sharded(MS // 8).here == pytest.approx(1.0)  # 125 µs: the driver may find less than 100
    assert sharded(MS).here == pytest.approx(1.8, rel=0.05)


def test_three_quarters_of_a_gain_are_promised_and_a_small_one_is_not():
    assert promised_speedup(2.0, 0.0) == pytest.approx(1.75)
    assert promised_speedup(1.06, 0.0) is None
    assert promised_speedup(1.2, 0.2) is None
    assert promised_speedup(None, 0.0) is None


def test_cores_that_compute_at_the_same_time_are_not_what_a_stage_costs():
    profile = simulated(2, 32, training=False)  # but for the first and the last micro-batch both are busy
    computed = tuple(track._replace(computed=track.durations) for track in profile.tracks)
    profile = replace(shared(profile, (2, 1.2, 1.2, 1.6)), tracks=computed)
    # The one micro-batch of stage 1 that ran alone took as long here, and is a part of the mean.
    alone = 1 - 1 / 1.6
    assert [stage.forward for stage in Figures(profile).stages] == [
        pytest.approx(MS / 1.6, abs=1),
        pytest.approx(MS / 1.6 + MS * alone / 32, abs=1),
    ]
    alone = shared(simulated(1, 32), (2, 1.2, 1.2, 1.6))
    assert Figures(alone).stages[0].forward == MS


def test_work_of_other_programs_is_not_a_stages_cost_and_waiting_of_its_own_is():
    profile = simulated(1, 6, steps=4, training=False)
    disturbed = [
        track._replace(durations=[9 * ns if i % 4 else ns for i, ns in enumerate(track.durations, 1)])
        for track in profile.tracks
    ]
    computed = [track._replace(computed=profile.tracks[0].durations) for track in disturbed]
    found = Figures(replace(profile, tracks=tuple(computed)))
    assert found.stages[0].forward == MS
    asleep = [
        track._replace(computed=[0 if ns == 0 else 1000 for ns in track.durations])
        for track in profile.tracks
    ]
    found = Figures(replace(profile, tracks=tuple(asleep)))
    assert found.stages[0].forward == MS


def test_blocks_and_operations_add_up_to_their_stages_on_a_busy_machine():
    profile = simulated(2, 4, steps=6, blocks=("A, B", "C"))
    computed = [track._replace(computed=track.durations) for track in profile.tracks]
    # Other programs had the cores for most of the time in which single operations were measured.
    operations = [row._replace(ns=row.ns * (30 if row.block == "B" else 10)) for row in profile.operations]
    busy = replace(profile, tracks=tuple(computed), operations=tuple(operations))
    found = Figures(busy)
    sums = {(row["block"], row["phase"]): row["ns"] for row in page_data(found)["groups"]["block"]}
    for phase, name in (("F", "forward"), ("B", "backward")):
        of_stage = [4 * getattr(stage, name) for stage in found.stages]
        assert [sums["A", phase] + sums["B", phase], sums["C", phase]] == pytest.approx(of_stage)
        assert sums["B", phase] == pytest.approx(3 * sums["A", phase])
    (row,) = [row for row in compare_figures(found, Figures(profile)) if row.name == "block C, forward"]
    assert row.first == row.second == "1 ms"


def test_a_sentence_says_how_busy_the_machine_was():
    profile = simulated(2, 4, steps=6)
    assert machine_sentence(Figures(profile)) == ""  # not measured

    def computing(share):
        tracks = [
            track._replace(computed=[round(share * ns) for ns in track.durations]) for track in profile.tracks
        ]
        return replace(profile, tracks=tuple(tracks))

    assert machine_sentence(Figures(computing(1))).startswith(
        "The machine was free: computations had a core for 100% of their time."
    )
    text = machine_sentence(Figures(computing(0.25)))
    assert text.startswith(
        "The machine was busy, or computations waited by themselves: computations had a core for 25% of"
    )
    assert "Times of stages, blocks and operations count that time alone" in text
    assert summary(computing(0.25)).splitlines()[1] == f"  {text}"
    busy = computing(0.25)
    assert page_data(Figures(busy))["figures"]["machine_says"] == text


def test_nothing_is_advised_below_the_spread_of_equal_computations():
    profile = simulated(2, 64, steps=6)
    numbers = random.Random(0)
    noisy = [
        track._replace(durations=[ns * numbers.randint(1, 9) for ns in track.durations])
        for track in profile.tracks
    ]
    found = Figures(replace(profile, tracks=tuple(noisy)))
    assert found.spread > 0.3 and found.changes == []


def test_of_steps_that_were_cut_off_no_share_of_time_is_said():
    profile = simulated(2, 8, steps=3)

    def cut_after(instructions):
        short = [track._replace(durations=track.durations[:instructions]) for track in profile.tracks]
        return replace(profile, tracks=tuple(short))

    cut = cut_after(9)
    found = Figures(cut)
    assert found.bubble_measured is None and found.usages == []
    assert found.bubble_apart == pytest.approx(1 / 9)  # by what each stage costs
    assert "Steps are too long to be kept whole" in " ".join(advice_sentences(found))
    assert Figures(cut_after(4)).bubble_apart is None  # not even one backward of each stage


def test_throughput_leaves_out_the_first_call():
    profile = simulated(1, 5, steps=3, gap=10 * MS)  # 10 samples a call; a call lasts 10 ms, then 10 ms go by
    slow = profile.calls[0]._replace(start=-1_000 * MS)
    calls = (slow, *profile.calls[1:])
    facts = {**profile.facts, "ns_in_calls": sum(call.end - call.start for call in calls)}
    found = Figures(replace(profile, calls=calls, facts=facts))
    assert found.samples_per_second == pytest.approx(1000)
    assert found.samples_per_second_overall == pytest.approx(500)


def test_memory_held_follows_the_tensors():
    profile = simulated(1, 2, training=False)
    assert memory.held_bytes(list(profile.tensors), 4) == [1024, 1024, 1024, 0]
    assert (
        max(size for _, size in memory.bytes_curve(profile, profile.tracks[0])) == 1024 + 512
    )  # one operation's result on top


def test_what_does_not_fit_is_said_first():
    profile = simulated(2, 4)
    small = {"bytes": 1000, "of": "a device", "shared": False}
    found = Figures(replace(profile, facts={**profile.facts, "capacity": small}))
    assert found.fits is False
    assert advice_sentences(found)[0].startswith("Does not fit")


def test_memory_that_replicas_share_is_needed_by_each_of_them():
    profile = simulated(2, 4)
    one = sum(need.total for need in Figures(profile).needs)
    shared = {"bytes": 3 * one - 1, "of": "this machine's memory", "shared": True}
    counts, facts = {**profile.counts, "replicas": 3}, {**profile.facts, "capacity": shared}
    large = replace(profile, counts=counts, facts=facts)
    found = Figures(large)
    assert (found.fits, found.wanted) == (False, 3 * one)
    assert f"Does not fit: {size_text(3 * one)} are needed" in advice_sentences(found)[0]


def test_few_micro_batches_for_the_stages_are_warned_about():
    (change,) = Figures(simulated(4, 4)).changes
    assert change.what == "options.Training.gradientAccumulation(16)"
    assert change.apart == pytest.approx((7 / 4) / (19 / 16), rel=0.01)
    assert change.also.startswith("the effective batch becomes 4 times as large")
    (change,) = Figures(simulated(4, 4, training=False)).changes
    assert change.what == "options.deviceIterations(16)"
    assert Figures(simulated(4, 128)).changes == []


def test_waiting_for_a_loader_is_told_from_other_time_between_calls():
    profile = simulated(1, 20, steps=4, gap=40 * MS)
    gap = profile.calls[1].start - profile.calls[0].end
    host = tuple(HostEvent("loader", call.end, call.end + gap) for call in profile.calls[:-1])
    assert any("the program between calls" in text for text in told(profile))
    waiting = replace(profile, host=host)
    assert any("the data loader" in text for text in told(waiting))
    assert Figures(waiting).host["loader"] == pytest.approx(3 * gap / 1e9)


def test_a_profile_without_calls_has_no_figures_and_no_fault():
    found = Figures(Profile("training", True))
    assert (found.calls, found.samples_per_second, found.bubble_measured, found.slowest) == (
        0,
        None,
        None,
        None,
    )


def test_a_step_that_failed_half_way_is_left_out():
    profile = simulated(2, 4, steps=4)
    broken = profile.tracks[3]._replace(durations=profile.tracks[3].durations[:3])
    tracks = (*profile.tracks[:3], broken, *profile.tracks[4:])
    found = Figures(replace(profile, tracks=tracks))
    assert found.bubble_measured == pytest.approx(1 / 5, rel=0.01)
