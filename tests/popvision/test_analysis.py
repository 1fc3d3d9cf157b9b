"""The figures of a profile, on simulated devices where the right answer is known."""

import dataclasses

import pytest
from simulated import MS, simulated

from popengine.compile import schedule
from popengine.profile import HostEvent, Profile
from popvision import memory, trace
from popvision.analysis import figures


@pytest.mark.parametrize("stages, micro_batches", [(1, 4), (2, 4), (4, 8), (4, 32), (8, 16), (3, 1)])
@pytest.mark.parametrize("training", [True, False])
def test_the_bubble_of_an_ideal_pipeline_is_p_minus_1_over_m_plus_p_minus_1(stages, micro_batches, training):
    found = figures(simulated(stages, micro_batches, training=training))
    expected = (stages - 1) / (micro_batches + stages - 1)
    assert found.bubble_ideal == pytest.approx(expected, abs=1e-9)
    assert found.bubble_measured == pytest.approx(expected, rel=0.01, abs=1e-9)


def test_a_sharded_run_has_one_ipu_busy_at_a_time():
    found = figures(simulated(4, 8, order=schedule.sharded))
    assert found.bubble_ideal == pytest.approx(0.75)
    assert found.bubble_measured == pytest.approx(0.75)


def test_a_replay_of_the_schedule_takes_as_long_as_the_run():
    costs = {("F", 0): 1.0, ("F", 1): 3.0, ("F", 2): 2.0, ("B", 0): 2.0, ("B", 1): 7.0, ("B", 2): 4.0}
    profile = simulated(3, 6, cost=lambda phase, stage: int(costs[phase, stage] * MS))
    length = profile.calls[0].end - profile.calls[0].start
    assert trace.replay(profile, costs) * MS == pytest.approx(length)


def test_the_slowest_stage_is_named_with_its_time():
    found = figures(simulated(3, 8, cost=lambda phase, stage: (5 if stage == 1 else 1) * MS))
    assert found.slowest == 1
    assert [stage.forward for stage in found.stages] == [1 * MS, 5 * MS, 1 * MS]
    assert "Stage 1 (block1) takes 2.1 times the average stage" in " ".join(found.warnings)
    assert "split a block of that stage" in " ".join(found.warnings)


def test_moving_a_block_from_a_full_stage_to_its_neighbour_is_advised_with_its_gain():
    profile = simulated(
        2, 16, cost=lambda phase, stage: (3 if stage == 0 else 1) * MS, blocks=("A, B, C", "D")
    )
    best = figures(profile).moves[0]
    assert (best.block, best.source, best.target) == ("C", 0, 1)
    # Stage 0 then costs 2 + 2 a micro-batch instead of 3 + 3, and so does stage 1.
    before = simulated(2, 16, cost=lambda phase, stage: (3 if stage == 0 else 1) * MS)
    after = simulated(2, 16, cost=lambda phase, stage: 2 * MS)
    assert best.speedup == pytest.approx(before.calls[0].end / after.calls[0].end, rel=0.01)


def test_throughput_leaves_out_the_first_call():
    profile = simulated(1, 5, steps=3, gap=10 * MS)  # 10 samples a call; a call lasts 10 ms, then 10 ms go by
    slow = profile.calls[0]._replace(start=-1_000 * MS)
    calls = (slow, *profile.calls[1:])
    facts = {**profile.facts, "ns_in_calls": sum(call.end - call.start for call in calls)}
    found = figures(dataclasses.replace(profile, calls=calls, facts=facts))
    assert found.samples_per_second == pytest.approx(1000)
    assert found.samples_per_second_overall == pytest.approx(500)


def test_memory_held_follows_the_tensors():
    profile = simulated(1, 2, training=False)
    assert memory.held(list(profile.tensors), 4) == [1024, 1024, 1024, 0]
    assert max(size for _, size in memory.curve(profile, 0)) == 1024 + 512  # one operation's result on top


def test_what_does_not_fit_is_said_first():
    profile = simulated(2, 4)
    small = {"bytes": 1000, "of": "a device", "shared": False}
    found = figures(dataclasses.replace(profile, facts={**profile.facts, "capacity": small}))
    assert found.fits is False
    assert found.warnings[0].startswith("Does not fit")


def test_few_micro_batches_for_the_stages_are_warned_about():
    assert "options.Training.gradientAccumulation(27)" in figures(simulated(4, 4)).warnings[0]
    assert "options.deviceIterations(27)" in figures(simulated(4, 4, training=False)).warnings[0]
    assert figures(simulated(4, 32)).warnings == []


def test_waiting_for_a_loader_is_told_from_other_time_between_calls():
    profile = simulated(1, 20, steps=4, gap=40 * MS)
    gap = profile.calls[1].start - profile.calls[0].end
    host = tuple(HostEvent("loader", call.end, call.end + gap) for call in profile.calls[:-1])
    assert any("the program between calls" in text for text in figures(profile).warnings)
    waiting = figures(dataclasses.replace(profile, host=host))
    assert any("the data loader" in text for text in waiting.warnings)
    assert waiting.host["loader"] == pytest.approx(3 * gap / 1e9)


def test_a_profile_without_calls_has_no_figures_and_no_fault():
    found = figures(Profile("training", True))
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
    found = figures(dataclasses.replace(profile, tracks=tracks))
    assert found.bubble_measured == pytest.approx(1 / 5, rel=0.01)
