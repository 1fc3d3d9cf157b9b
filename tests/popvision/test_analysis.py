"""The figures of a profile, on simulated devices where the right answer is known."""

import re
from dataclasses import replace

import pytest
from simulated import MS, simulated

from popengine.order import After
from popengine.profile import HostEvent, Profile, TaskRun
from popengine.table import Task
from popvision import memory
from popvision.analysis import Figures, compare_figures
from popvision.report import page_data, summary
from popvision.sentences import fact_sentences, warning_sentences
from popvision.units import cores_text, size_text
from popvision.virtual import DeviceStep


def told(profile):
    return warning_sentences(Figures(profile))


@pytest.mark.parametrize("stages, micro_batches", [(1, 4), (2, 4), (4, 8), (4, 32), (8, 16), (3, 1)])
@pytest.mark.parametrize("training", [True, False])
def test_the_bubble_of_an_ideal_pipeline_is_p_minus_1_over_m_plus_p_minus_1(stages, micro_batches, training):
    found = Figures(simulated(stages, micro_batches, training=training))
    expected = (stages - 1) / (micro_batches + stages - 1)
    assert found.bubble_ideal == pytest.approx(expected, abs=1e-9)
    assert found.bubble_apart == pytest.approx(expected, rel=0.01, abs=1e-9)
    assert found.idle_here == 0  # one core runs all ipus, and has work all the time


def test_a_sharded_run_has_one_ipu_busy_at_a_time():
    found = Figures(simulated(4, 8, order="sharded"))
    assert found.bubble_ideal == pytest.approx(0.75)
    assert found.bubble_apart == pytest.approx(0.75)


def test_a_step_in_virtual_time_takes_as_long_as_the_run():
    costs = {("F", 0): 1.0, ("F", 1): 3.0, ("F", 2): 2.0, ("B", 0): 2.0, ("B", 1): 7.0, ("B", 2): 4.0}
    profile = simulated(3, 6, cost=lambda phase, stage: int(costs[phase, stage] * MS))
    # Ipu 1 computes for 6 x (3 + 7). Before, it waits for F0 (1) and for B2 of micro-batch 0 (3); at the end comes B0.
    assert Figures(profile).step_apart == pytest.approx((1 + 3 + 60 + 2) / 1e3)


def test_a_long_step_is_as_long_as_all_its_micro_batches():
    forward, backward = (1.0, 3.0, 2.0, 1.0), (2.0, 3.0, 4.0, 1.0)
    costs = {(phase, i): ns for phase, row in (("F", forward), ("B", backward)) for i, ns in enumerate(row)}
    profile = simulated(4)
    rows = {row: costs[task.phase, task.stage] for row, task in enumerate(profile.tasks)}
    step = replace(DeviceStep.of(profile, rows, {}), micro_batches=5000)
    # The slowest ipu, of 6 a micro-batch, waits for the first forward of the one before and ends before its backward.
    assert step.ns == pytest.approx(5000 * 6 + 4, abs=12)


def test_the_slowest_stage_is_named_with_its_time():
    found = Figures(simulated(3, 8, cost=lambda phase, stage: (5 if stage == 1 else 1) * MS))
    assert found.slowest == 1
    assert [stage.phases["F"] for stage in found.stages] == [1 * MS, 5 * MS, 1 * MS]
    assert found.unevenness == pytest.approx(15 / 7)
    assert fact_sentences(found)["stages"] == "Stage 1 takes 2.14 times as long as the average stage."


@pytest.mark.parametrize("stages, micro_batches", [(2, 3), (4, 8), (8, 16)])
def test_as_many_micro_batches_as_a_report_says_halve_the_bubble(stages, micro_batches):
    found = Figures(simulated(stages, micro_batches))
    sentence = fact_sentences(found)["bubble"]
    more = int(re.search(r"; (\d+) micro-batches instead of (\d+) make it", sentence)[1])
    assert more == 2 * micro_batches + stages - 1
    assert Figures(simulated(stages, more)).bubble_apart == pytest.approx(found.bubble_apart / 2)


@pytest.mark.parametrize("micro_batches", [1, 8])
def test_no_number_of_micro_batches_fills_stages_that_work_one_after_another(micro_batches):
    sentence = fact_sentences(Figures(simulated(4, micro_batches, order="sharded")))["bubble"]
    assert sentence.startswith("With equal stages the bubble is 75.0% for any number of micro-batches")


def test_the_ipu_that_needs_the_most_memory_is_named():
    profile = simulated(3, 4)
    large = tuple(row._replace(weights=5 << 20) if row.ipu == 1 else row for row in profile.memory)
    found = Figures(replace(profile, memory=large))
    most = size_text(max(need.total for need in found.needs))
    assert fact_sentences(found)["memory"] == f"ipu 1 needs the most memory, {most}."
    assert fact_sentences(Figures(simulated(1, 4))) == {}  # one stage, one ipu: nothing to compare


def test_cores_that_wait_are_told_and_so_are_cores_that_are_not_used():
    alone = simulated(2, 16, order="sharded", cores=2)  # each micro-batch waits for the one before
    found = Figures(alone)
    assert [use.waiting for use in found.usages] == [0]
    assert found.cores.startswith("1 of ")
    few = simulated(2, 3, cores=2)
    assert Figures(few).idle_here == pytest.approx(1 / 4)
    assert any(text.startswith("These 2 cores waited for 25% of a step") for text in told(few))


def test_the_cores_that_run_all_ipus_are_said_of_those_of_the_machine():
    def words(threads, cores):
        return cores_text(Profile("", True, facts={"threads": threads, "cores": cores}), used=0)

    assert [words(1, 2), words(1, 1), words(2, 2)] == ["1 of 2 cores", "1 core", "2 cores"]


def test_work_of_other_programs_is_not_a_stages_cost_and_waiting_of_its_own_is():
    profile = simulated(1, 6, steps=4, training=False)
    disturbed = [
        run._replace(end=run.start + 9 * MS if i % 4 else run.end) for i, run in enumerate(profile.runs, 1)
    ]
    computed = [run._replace(computed=MS) for run in disturbed]
    found = Figures(replace(profile, runs=tuple(computed)))
    assert found.stages[0].phases["F"] == MS
    asleep = [run._replace(computed=1000) for run in profile.runs]
    found = Figures(replace(profile, runs=tuple(asleep)))
    assert found.stages[0].phases["F"] == MS


def test_blocks_and_operations_add_up_to_their_stages_on_a_busy_machine():
    profile = simulated(2, 4, steps=6, blocks=("A, B", "C"))
    computed = [run._replace(computed=run.end - run.start) for run in profile.runs]
    # Other programs had the cores for most of the time in which single operations were measured.
    operations = [row._replace(ns=row.ns * (30 if row.block == "B" else 10)) for row in profile.operations]
    busy = replace(profile, runs=tuple(computed), operations=tuple(operations))
    found = Figures(busy)
    sums = {(row["block"], row["phase"]): row["ns"] for row in page_data(found)["groups"]["block"]}
    for phase in "FB":
        of_stage = [4 * stage.phases[phase] for stage in found.stages]
        assert [sums["A", phase] + sums["B", phase], sums["C", phase]] == pytest.approx(of_stage)
        assert sums["B", phase] == pytest.approx(3 * sums["A", phase])
    rows = compare_figures(found, Figures(profile))
    (row,) = [row for row in rows if row.name == "block C, forward, per row"]
    assert row.first == row.second == "500 µs"  # two rows in a micro-batch


def test_a_figure_says_how_busy_the_machine_was():
    profile = simulated(2, 4, steps=6)
    assert Figures(profile).others_share is None  # not measured
    runs = [run._replace(computed=(run.end - run.start) // 4) for run in profile.runs]
    busy = replace(profile, runs=tuple(runs))
    assert Figures(busy).others_share == 0.75
    assert "  cores used by other programs            75.0%\n" in (text := summary(busy))
    assert "! Tasks had no core for 75% of their time, most likely because other programs used them" in text


def test_of_steps_that_were_cut_off_no_share_of_time_is_said():
    profile = simulated(2, 8, steps=3)

    def cut_after(count):
        runs = [run for step in range(3) for run in profile.runs[32 * step :][:count]]
        return replace(profile, runs=tuple(runs))

    cut = cut_after(9)
    found = Figures(cut)
    assert found.idle_here is None and found.usages == []
    assert found.bubble_apart == pytest.approx(1 / 9)  # by what each stage costs
    assert "Steps are too long to be kept whole" in " ".join(warning_sentences(found))
    assert Figures(cut_after(3)).bubble_apart is None  # not even one backward of each stage


def test_throughput_leaves_out_the_first_call():
    profile = simulated(1, 5, steps=3, gap=10 * MS)  # 10 samples a call; a call lasts 10 ms, then 10 ms go by
    slow = profile.calls[0]._replace(start=-1_000 * MS)
    calls = (slow, *profile.calls[1:])
    facts = {**profile.facts, "ns_in_calls": sum(call.end - call.start for call in calls)}
    found = Figures(replace(profile, calls=calls, facts=facts))
    assert found.samples_per_second == pytest.approx(1000)
    assert found.samples_per_second_overall == pytest.approx(500)


def test_memory_held_follows_the_tensors_in_a_step_on_separate_devices():
    found = Figures(simulated(2, 2))
    # Each micro-batch holds 1,024 bytes from its forward to its backward, in which an operation has 512 more.
    assert [need.activations for need in found.needs] == [2 * 1024 + 512, 1024 + 512]
    curve = memory.bytes_curve(found.profile, found.devices.runs, 1)
    assert [size for at, size in curve if at == 3 * MS] == [1024 + 512, 0, 0]  # the backward ends


def test_what_does_not_fit_is_said_first():
    profile = simulated(2, 4)
    found = Figures(replace(profile, facts={**profile.facts, "capacity": 1000}))
    assert found.fits is False
    assert warning_sentences(found)[0].startswith("Does not fit")


def test_memory_that_replicas_share_is_needed_by_each_of_them():
    profile = simulated(2, 4)
    one = sum(need.total for need in Figures(profile).needs)
    counts, facts = {**profile.counts, "replicas": 3}, {**profile.facts, "capacity": 3 * one - 1}
    large = replace(profile, counts=counts, facts=facts)
    found = Figures(large)
    assert (found.fits, found.wanted) == (False, 3 * one)
    assert f"Does not fit: {size_text(3 * one)} are needed" in warning_sentences(found)[0]


def test_a_schedule_that_only_the_program_knows_is_simulated_from_the_profile():
    known = simulated(3, 6, cost=lambda phase, stage: (1 + stage) * MS)
    unknown, known = Figures(replace(known, facts={**known.facts, "mode": "mine"})), Figures(known)
    assert unknown.devices.runs == known.devices.runs
    assert (unknown.step_apart, unknown.bubble_apart) == (known.step_apart, known.bubble_apart)
    assert "make it" in fact_sentences(known)["bubble"]
    # Its formula is not known.
    assert fact_sentences(unknown)["bubble"] == "With equal stages the bubble is 25.0%."


def test_runs_of_other_batch_sizes_compare_by_the_time_of_a_row():
    small, large = Figures(simulated(2, 4, gap=MS)), Figures(simulated(2, 16, gap=MS))
    rows = {row.name: row for row in compare_figures(small, large)}
    # One core runs both, and a micro-batch costs as much.
    assert rows["a step on these cores, per row"].better == ""
    assert rows["a step on separate devices, per row"].better == "second"  # a smaller bubble
    assert rows["a step on separate devices, per row"].ratio == pytest.approx((17 / 16) / (5 / 4))


def test_a_third_phase_is_a_phase_like_the_others(tmp_path):
    """Weight gradients (W) are a phase of their own where a schedule cuts backwards."""
    profile = simulated(2, 4)
    of_weights = len(profile.tasks)
    tasks = (*profile.tasks, Task("backward", 1, 1, "W", after=(After(2),), piece=4))
    runs = [
        TaskRun(step, step, of_weights, m, 0, 0, (40 * step + 20 + m) * MS, (40 * step + 21 + m) * MS)
        for step in range(3)
        for m in range(4)
    ]
    facts = {**profile.facts, "step_tasks": 20}
    found = Figures(replace(profile, tasks=tasks, runs=(*profile.runs, *runs), facts=facts))
    assert found.stages[1].phases == {"F": MS, "B": MS, "W": MS}
    assert found.stages[0].phases == {"F": MS, "B": MS}
    assert "weight gradients" in summary(found.profile)
    assert "stage 1, weight gradients, per row" in {row.name for row in compare_figures(found, found)}


def test_waiting_for_a_loader_is_told_from_other_time_between_calls():
    profile = simulated(1, 20, steps=4, gap=40 * MS)
    gap = profile.calls[1].start - profile.calls[0].end
    host = tuple(HostEvent("loader", call.end, call.end + gap) for call in profile.calls[:-1])
    assert any("the program between calls" in text for text in told(profile))
    waiting = replace(profile, host=host)
    assert any("the data loader" in text for text in told(waiting))
    assert Figures(waiting).host["loader"] == pytest.approx(3 * gap / 1e9)


@pytest.mark.parametrize("kind", ["compilation", "other calls"])
def test_work_of_another_plan_between_calls_is_not_time_of_the_program(kind):
    profile = simulated(1, 20, steps=4, gap=40 * MS)
    end = profile.calls[0].end
    compiled = replace(profile, host=(HostEvent(kind, end, end + 40 * MS),))
    before, after = Figures(profile).host["between calls"], Figures(compiled).host["between calls"]
    assert after == pytest.approx(before - 0.04)
    all_gaps = tuple(HostEvent(kind, call.end, call.end + 40 * MS) for call in profile.calls[:-1])
    assert not any("idle for" in text for text in told(replace(profile, host=all_gaps)))


def test_a_profile_without_calls_has_no_figures_and_no_fault():
    found = Figures(Profile("training", True))
    assert [found.calls, found.samples_per_second, found.bubble_apart, found.slowest] == [0, *3 * [None]]


def test_a_step_that_failed_half_way_is_left_out():
    profile = simulated(2, 4, steps=4)
    broken = tuple(run for run in profile.runs if run.step != 3 or run.micro_batch < 2)
    found = Figures(replace(profile, runs=broken))
    assert found.bubble_apart == pytest.approx(1 / 5, rel=0.01)
    assert found.idle_here == 0
