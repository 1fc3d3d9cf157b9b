"""Plans: what a program would do on machines that need not be there."""

import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap

import pytest
import torch
from simulated import MS, simulated
from test_page import wide
from test_runs import ROWS, WIDTH, Model

import poptorch
from popengine.profile import ProfileError
from popvision.cli import main
from popvision.machine import (
    MachineError,
    all_reduce_seconds,
    load_machine,
    load_machines,
    operation_kind,
    operation_seconds,
)
from popvision.plan import Estimate, Estimates

PROGRAM = """
import poptorch, sys, torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = poptorch.BeginBlock(torch.nn.Linear(8, 8), "first", ipu_id=0)
        self.last = poptorch.BeginBlock(torch.nn.Linear(8, 8), "last", ipu_id=1)
        torch.nn.init.trunc_normal_(self.last.weight)

    def forward(self, x):
        return poptorch.identity_loss(self.last(self.first(x)), "mean")

options = poptorch.Options()
options.Training.gradientAccumulation(int(sys.argv[sys.argv.index("--accumulation") + 1]))
try:
    model = Model().half()
    poptorch.trainingModel(model, options)(torch.randn(4 * 2, 8).half())
finally:
    print("the end")
print("something was computed")
"""
KEYS = ["machine", "items_per_second", "seconds_per_update", "memory_per_ipu", "fits", "bound_by"]


def planned():
    options = poptorch.Options().deviceIterations(2)
    options.Training.gradientAccumulation(5)
    model = Model()
    trainer = poptorch.trainingModel(model, options, poptorch.optim.AdamW(model.parameters(), lr=0.01))
    return poptorch.plan(trainer, batch=torch.randn(2 * 5 * ROWS, WIDTH), on="bow-pod16")


def heavy(*args, **more):
    """A simulated profile of operations that cost far more than what surrounds them."""
    profile = simulated(*args, **more)
    operations = tuple(row._replace(flops=10**12) for row in profile.operations)
    return dataclasses.replace(profile, operations=operations)


def apart(profile, name="bow-pod4", **choices):
    return Estimates({"apart": profile}, load_machines(name), **choices)


def data_of(found, tmp_path):
    """What the page of a plan hands to its scripts."""
    found.save(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    return json.loads(page.split('id="data">')[1].split("</script>")[0])


def test_the_page_has_machines_memory_and_the_step_with_its_stages_and_operations(tmp_path):
    data = data_of(planned(), tmp_path)
    assert data["title"] == "Plan: 1f1b training, 3 stages on 3 ipus, 1 replica"
    (entry,), plan = data["entries"], data["plan"]
    names, row = plan["table"]
    assert dict(zip(names, row, strict=True))["machine"] == plan["drawn"] == "bow-pod16"
    (memory,) = plan["memory"]
    assert memory["fits"] and memory["limit"] == 941e6
    assert [need["name"] for need in memory["needs"]] == ["ipu 0", "ipu 1", "ipu 2"]
    tasks = entry["profile"]["tasks"]["rows"]
    columns = entry["profile"]["tasks"]["columns"]
    runs = [dict(zip(entry["devices"]["columns"], run, strict=True)) for run in entry["devices"]["rows"]]
    ran = {
        (*(tasks[run["task"]][columns.index(name)] for name in ("phase", "stage")), run["micro_batch"])
        for run in runs
    }
    assert {key for key in ran if key[0]} == {(p, s, m) for p in "FB" for s in range(3) for m in range(5)}
    assert [stage["total"] > 0 for stage in entry["figures"]["stages"]] == [True] * 3
    linear = 2 * ROWS * WIDTH * WIDTH
    assert linear == 18_432 and 3 * linear in [row["flops"] for row in entry["groups"]["where"]]


@pytest.mark.parametrize("view", ["plan", "trace", "operations", "model"])
def test_every_view_of_the_page_opens_and_is_no_wider_than_a_narrow_window(chromium, tmp_path, view):
    planned().save(tmp_path / "plan.html")
    chromium.faults.clear()
    wide(chromium, 400)
    try:
        chromium.open(tmp_path / "plan.html", view)
        assert chromium.value("document.documentElement.scrollWidth") <= 400
        assert chromium.value("document.querySelector('main').innerText.length") > 100
        assert chromium.value("document.querySelector('[aria-selected=true]').id") == f"tab-{view}"
        assert not chromium.faults and not chromium.value("document.querySelector('.fault')")
    finally:
        wide(chromium, 1400)


def test_the_page_draws_memory_against_its_limit(chromium, tmp_path):
    planned().save(tmp_path / "plan.html")
    chromium.open(tmp_path / "plan.html")
    assert chromium.value("document.querySelectorAll('.bar b').length") == 3
    text = chromium.value("document.querySelector('main').innerText")
    assert "bow-pod16, replicas: 1, micro-batches: 5 (fits): limit 897 MiB" in text


def test_the_bottleneck_is_the_ipu_with_the_most_to_do():
    # Each operation has the same FLOPs, so nearly all of an ipu's time is proportional to its blocks.
    say = apart(heavy(3, 60, blocks=("A", "B, C, D, E", "F"))).advice()
    assert say[0].startswith("ipu 1 has the most to do, 2.00 times the mean of all ipus.")
    few = apart(heavy(3, 5)).advice()
    assert few[1].startswith(
        "With options.Training.gradientAccumulation(20), a step is 1.27 times as fast there."
    )


def test_where_more_micro_batches_give_nothing_none_are_advised():
    for micro_batches in (5, 64, 2048, 4096):
        profile = heavy(4, 8)
        profile = dataclasses.replace(
            profile, facts=profile.facts | {"schedule_micro_batches": micro_batches}
        )
        assert len(apart(profile).advice()) == (2 if micro_batches == 5 else 1)


# ---- programs ------------------------------------------------------------------------------------------------


@pytest.fixture
def program(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(textwrap.dedent(PROGRAM))
    monkeypatch.chdir(tmp_path)


def test_a_program_is_run_until_its_first_model_is_compiled(program, capfd):
    assert main(["plan", "--on", "bow-pod4,mk2-pod16", "train.py", "--accumulation", "4"]) == 0
    out, err = capfd.readouterr()
    assert "the end" in err and "something was computed" not in err
    rows = out.splitlines()
    assert rows[0].split()[:2] == ["machine", "replicas"]
    assert [row.split()[0] for row in rows[1:3]] == ["bow-pod4", "mk2-pod16"]
    assert "options.Training.gradientAccumulation(" in out
    with open("plan.html") as page:
        assert "first" in page.read()
    with open("empty.py", "w") as empty:
        empty.write("print('hello')")
    assert main(["plan", "empty.py"]) == 1
    assert "empty.py ended before it compiled a model\n  fix: call an executor" in capfd.readouterr().err


def test_json_is_a_list_of_fixed_keys_and_nothing_else_is_printed(program, capfd):
    assert main(["plan", "--on", "bow-pod4,this-machine", "--json", "train.py", "--accumulation", "4"]) == 0
    rows = json.loads(capfd.readouterr().out)
    assert [list(row) for row in rows] == [KEYS, KEYS]
    assert [row["machine"] for row in rows] == ["bow-pod4", "this-machine"]
    assert all(row["fits"] is True and len(row["memory_per_ipu"]) == 2 for row in rows)
    assert all(
        row["items_per_second"] * row["seconds_per_update"] == pytest.approx(4 * 2 / 4 * 4) for row in rows
    )


def test_a_plan_is_of_this_machine_if_none_is_named(program, capfd):
    assert main(["plan", "--json", "train.py", "--accumulation", "4"]) == 0
    assert [row["machine"] for row in json.loads(capfd.readouterr().out)] == ["this-machine"]
    assert inspect.signature(poptorch.plan).parameters["on"].default == ("this-machine",)


def test_choices_are_a_table_with_the_best_first(program, capfd):
    arguments = ["--replicas", "1,2,4", "--json", "--on", "bow-pod4", "train.py", "--accumulation", "4"]
    assert main(["plan", *arguments]) == 0
    rows = json.loads(capfd.readouterr().out)
    assert [row["fits"] for row in rows] == [True, True, False]  # 4 replicas of 2 ipus are 8 chips
    assert rows[0]["items_per_second"] > 1.8 * rows[1]["items_per_second"]


def test_a_program_may_read_values_of_its_weights_or_have_none(program, capfd):
    reads = PROGRAM.replace("try:\n", "assert Model().first.weight.abs().sum() > 0\ntry:\n")
    lacks = PROGRAM.replace("Model().half()", "Model().half().to('meta')")
    assert len({PROGRAM, reads, lacks}) == 3
    found = []
    for source in (reads, lacks):
        with open("other.py", "w") as text:
            text.write(source)
        assert main(["plan", "--on", "bow-pod16", "--json", "other.py", "--accumulation", "4"]) == 0
        found.append(json.loads(capfd.readouterr().out))
    assert found[0] == found[1] and found[0][0]["machine"] == "bow-pod16"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("import no_such_module", "No module named 'no_such_module'"),
        ("open('no_such_file')", "No such file or directory: 'no_such_file'"),
        ("Model(); open('no_such_file')", "No such file or directory: 'no_such_file'"),
        ("poptorch.trainingModel(Model(), options, 3)", "optimizer"),
    ],
)
def test_a_program_that_fails_is_run_once_and_its_error_is_the_answer(program, line, shown, capfd):
    with open("fails.py", "w") as text:
        text.write(PROGRAM.replace("try:\n", f"print('begins')\n{line}\ntry:\n"))
    assert main(["plan", "fails.py", "--accumulation", "4"]) == 1
    error = capfd.readouterr().err
    assert error.count("begins") == error.count("Traceback") == 1 and shown in error
    assert error.splitlines()[-1].startswith("popvision: fails.py failed before it compiled a model")


def test_a_program_that_is_not_there_is_an_error_in_words(program, capfd):
    assert main(["plan", "--on", "bow-pod4", "nosuch.py"]) == 1
    assert capfd.readouterr().err.startswith("popvision: there is no file nosuch.py\n  fix: ")


def test_the_machines_are_named_before_the_program(program, capfd):
    assert main(["plan", "train.py", "--accumulation", "4", "--on", "bow-pod4"]) == 1
    assert "fix: popvision plan --on MACHINE,... train.py" in capfd.readouterr().err


# ---- models in this process ----------------------------------------------------------------------------------


def test_a_model_on_the_meta_device_is_planned_and_described_without_its_weights():
    def found(device):
        with torch.device(device):
            model = Model()
        options = poptorch.Options()
        options.Training.gradientAccumulation(5)
        batch = torch.randn(5 * ROWS, WIDTH)
        text = str(poptorch.describe(model, options, batch))
        return text, poptorch.plan(model, options, batch, on=["bow-pod4"]).to_json()

    assert found("meta") == found("cpu")


def test_choices_of_accumulation_are_planned_without_another_compilation():
    model, options = Model(), poptorch.Options()
    options.Training.gradientAccumulation(5)
    found = poptorch.plan(
        model, options, torch.randn(5 * ROWS, WIDTH), on="bow-pod4", accumulation=[5, 10, 20]
    )
    assert [one.accumulation for one in found.estimates] == [20, 10, 5]  # the bubble becomes smaller
    bubbles = [one.bubble for one in found.estimates]
    assert bubbles == sorted(bubbles)


def test_a_large_model_is_planned_on_all_cores_of_this_machine():
    """Its mode was passed as a bool, and the simulation found no order for it."""
    profile = heavy(2, 4)
    measured = {"rates": {"half": 1e14, "single": 1e14, "local": 1e14}}
    facts = profile.facts | {"measured": measured, "threads": 2, "base": 0, "available": 10**12}
    found = Estimate(dataclasses.replace(profile, facts=facts), load_machine("this-machine"), 1, 4)
    assert found.seconds_per_update == pytest.approx(4 * 4 * 0.01 / 2)
    assert (found.bubble, found.problems) == (pytest.approx(0.0), [])


def test_the_replicas_of_several_processes_are_planned_as_those_of_one():
    def found(*machines, processes=1, replicas=1):
        options = poptorch.Options().replicationFactor(replicas)
        options.Training.gradientAccumulation(5)
        options.Distributed.configureProcessId(0, processes)
        batch = torch.randn(5 * ROWS * replicas, WIDTH)
        return poptorch.plan(Model(), options, batch, on=machines)

    assert found("bow-pod4", processes=2).to_json() == found("bow-pod4", replicas=2).to_json()
    (here,) = found("this-machine", processes=2).estimates
    assert here.replicas == 2 and here.items_per_second > 0


def test_a_model_larger_than_this_machine_is_planned_and_does_not_fit(tmp_path):
    with torch.device("meta"):
        model = torch.nn.Linear(2**18, 2**18)  # 256 GiB of weights

    class Large(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return poptorch.identity_loss(self.model(x), "mean")

    found = poptorch.plan(Large(), poptorch.Options(), torch.empty(4, 2**18), on="this-machine")
    (here,) = found.estimates
    assert not here.fits
    assert re.match(r"the program needs up to [\d,]{5} GiB, with .* available", here.problems[0])
    (sentence,) = found.advice()  # more would be about another machine
    assert "recomputation" in sentence and "off chip" not in sentence  # there are no chips
    data = data_of(found, tmp_path)
    (entry,), plan = data["entries"], data["plan"]
    assert plan["drawn"] is None and not entry["devices"]["rows"]  # it was the step of a Bow Pod16
    assert plan["memory"][0]["needs"][0]["weights"] >= 256 * 2**30


# ---- machines ------------------------------------------------------------------------------------------------


def test_a_machine_has_the_rates_of_its_data_sheet():
    bow, mk2 = load_machine("bow-pod16"), load_machine("mk2-pod16")
    assert bow.half == pytest.approx(350e12, rel=0.005)
    assert bow.single == pytest.approx(87e12, rel=0.005)
    assert bow.local == pytest.approx(65.4e12, rel=0.005)
    assert bow.exchange == pytest.approx(10.9e12, rel=0.005)
    assert mk2.half == pytest.approx(250e12, rel=0.005)
    assert (bow.chips, load_machine("bow-pod64").chips, bow.memory) == (16, 64, 941e6)


def test_users_add_machines_as_files(tmp_path):
    own = tmp_path / "double.toml"
    own.write_text('extends = "bow"\nchip.clock = { value = 3.7e9, source = "a guess" }')
    assert load_machine(str(own)).half == 2 * load_machine("bow-pod4").half
    with pytest.raises(MachineError, match=r"there is no machine 'bow-pod8'[^$]*known are bow, bow-pod16"):
        load_machines("bow-pod4,bow-pod8")
    own.write_text('kind = "apart"\nchip.tiles = { value = 4, source = "" }')
    with pytest.raises(MachineError, match=r"lacks the constant 'pod'\n  fix: .*extends"):
        load_machine(str(own))


def test_a_users_own_schedule_is_planned_in_its_own_program_only():
    profile = heavy(2, 4)
    other = dataclasses.replace(profile, facts=profile.facts | {"mode": "mine"})
    with pytest.raises(ProfileError, match="the schedule 'mine' is known to the program that made it only"):
        apart(other)


# ---- costs ---------------------------------------------------------------------------------------------------


def test_each_operation_has_a_kind():
    (operation, *_) = simulated(1, 1).operations
    kinds = {
        "addmm": "matmul",
        "bmm": "matmul",
        "convolution_backward": "convolution",
        "native_layer_norm_backward": "normalization",
        "_softmax": "normalization",
        "embedding_dense_backward": "embedding",
        "add.Tensor": "elementwise",
        "gelu": "elementwise",
        "poptorch.recomputation_checkpoint": None,
        "transpose.int": None,
        "view": None,
    }
    assert {name: operation_kind(operation._replace(kind=name)) for name in kinds} == kinds


def test_a_large_product_is_bound_by_computation_and_a_sum_by_memory():
    (operation, *_) = simulated(1, 1).operations
    bow = load_machine("bow-pod4")
    product = operation_seconds(operation._replace(kind="mm", flops=10**12, bytes=10**6, width=2), bow)
    assert product["compute"] == pytest.approx(1e12 / (bow.half * bow.efficiency_of("matmul")))
    assert max(product, key=product.__getitem__) == "compute"
    total = operation_seconds(operation._replace(kind="add.Tensor", flops=0, bytes=10**9, width=2), bow)
    assert total["memory bandwidth"] == pytest.approx(1e9 / (bow.local * bow.efficiency_of("elementwise")))


def test_an_all_reduce_is_a_ring_within_racks_and_one_over_them():
    bow = load_machine("bow-pod64")
    rate = bow.links * bow.efficiency_of("links")
    assert all_reduce_seconds(1e9, 1, 1, bow) == 0
    assert all_reduce_seconds(1e9, 16, 4, bow) == pytest.approx(30 * bow.message + 2 * 15 / 16 * 1e9 / rate)
    over_racks = 2 * bow.message + 2 / 2 * (1e9 / 16) / bow.gateway
    inside = all_reduce_seconds(1e9, 16, 4, bow)
    assert all_reduce_seconds(1e9, 32, 4, bow) == pytest.approx(inside + over_racks)


def test_a_pipeline_of_equal_stages_has_the_known_bubble_and_scales_with_the_clock():
    found = Estimate(heavy(4, 8), load_machine("bow-pod4"), 1, 8)
    assert found.bubble == pytest.approx(3 / 11, rel=0.02)  # of stages that take as long forward as backward
    slower = Estimate(heavy(4, 8), load_machine("mk2-pod16"), 1, 8)
    assert slower.seconds_per_update / found.seconds_per_update == pytest.approx(1.85 / 1.33, rel=0.02)


def test_what_does_not_fit_is_said_with_the_reason():
    profile = heavy(4, 8)
    assert apart(profile).estimates[0].to_dict()["fits"] is True
    rows = tuple(row._replace(weights=10**9) for row in profile.memory)
    found = apart(dataclasses.replace(profile, memory=rows))
    assert found.estimates[0].to_dict()["fits"] is False
    (sentence,) = found.advice()  # and nothing on its speed
    assert (
        "does not fit: ipu 0 needs up to 1.02 GiB, with 897 MiB available. Less memory is needed" in sentence
    )
    assert "off chip (options.TensorLocations.setOptimizerLocation(" in sentence
    assert str(found).endswith(sentence)
    unknown = dataclasses.replace(profile, facts=profile.facts | {"sizes_known": False})
    assert apart(unknown).estimates[0].problems == ["a kernel needs memory of a size that only it knows"]


class Deep(torch.nn.Module):
    """Four blocks of 128 KiB of weights on one ipu, whose activations are larger."""

    def __init__(self):
        super().__init__()
        layers = [torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.Linear(256, 128)) for _ in range(4)]
        self.layers = torch.nn.Sequential(
            *(poptorch.BeginBlock(layer, f"block{i}", ipu_id=i // 2) for i, layer in enumerate(layers))
        )

    def forward(self, x):
        return poptorch.identity_loss(self.layers(x), "mean")


def test_a_plan_with_recomputation_costs_the_products_that_backward_computes_again():
    def found(recompute):
        options = poptorch.Options()
        options.Training.gradientAccumulation(8)
        options._Popart.set("autoRecomputation", 3 * recompute)
        return poptorch.plan(Deep(), options, torch.randn(8 * 64, 128), on="bow-pod16").estimates[0].profile

    def flops(profile, phase):
        pieces = profile.pieces
        return sum(row.flops for row in profile.operations if pieces[row.piece].phase == phase)

    plain, again = found(False), found(True)
    assert flops(plain, "F") == flops(again, "F")
    # Of each stage, the result of the last layer is not needed in backward.
    assert flops(plain, "B") < flops(again, "B") <= flops(plain, "B") + flops(plain, "F")


def test_a_reader_that_has_seen_enough_ends_the_program_quietly(tmp_path):
    simulated(3, 4, cost=lambda phase, stage: MS).save(tmp_path / "training" / "profile.pop")
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "popvision", "summary", tmp_path],
        stdout=write,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("training", [True, False])
def test_a_plan_of_an_executable_without_its_graph_has_a_page_too(tmp_path, training):
    profile = simulated(2, 3, training=training)
    bare = [operation._replace(flops=0, bytes=0) for operation in profile.operations]
    found = apart(profile.__class__(**{**vars(profile), "operations": tuple(bare), "runs": ()}))
    (entry,) = data_of(found, tmp_path)["entries"]
    assert len([run for run in entry["devices"]["rows"] if run[3] >= 0]) == 3 * 2 * (1 + training)
