"""Profiles of real runs: what the page says comes from what the engine did."""

import os
import subprocess
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import poptorch
import quick_python
from popengine.profile import load
from popengine.run import recorder as recording
from popengine.run.recorder import Recorder
from popengine.run.row_functions import RowFunctions
from popvision.analysis import Figures
from popvision.report import summary
from popvision.sentences import plan_sentence, warning_sentences

WIDTH, ROWS = 48, 4
SLOW = 0.03  # seconds
slept: list[float] = []  # seconds of each call of `slow`


@torch.library.custom_op("popvision_test::slow", mutates_args=())
def slow(x: torch.Tensor) -> torch.Tensor:
    begun = time.perf_counter()
    time.sleep(SLOW)
    slept.append(time.perf_counter() - begun)
    return x.clone()


slow.register_fake(torch.empty_like)
slow.register_autograd(lambda context, gradient: gradient)


class Model(nn.Module):
    """Three blocks, of which one may be slow."""

    def __init__(self, slow_block: int | None = None, ipus=(0, 1, 2)):
        super().__init__()
        self.ipus = ipus
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.slow_block = slow_block

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            with poptorch.Block(f"block{i}", ipu_id=self.ipus[i]):
                x = layer(x).relu()
                if i == self.slow_block:
                    x = torch.ops.popvision_test.slow(x)
                if i == 2:
                    loss = poptorch.identity_loss(x.square(), "mean")
        return loss


def train(
    folder: Path, calls: int = 3, slow_block: int | None = None, replicas: int = 1, ipus=(0, 1, 2)
) -> Model:
    model = Model(slow_block, ipus)
    options = poptorch.Options().deviceIterations(2).enableProfiling(folder).replicationFactor(replicas)
    options.showCompilationProgressBar(False)
    options.Training.gradientAccumulation(5)
    trainer = poptorch.trainingModel(model, options, poptorch.optim.AdamW(model.parameters(), lr=0.01))
    for _ in range(calls):
        trainer(torch.randn(2 * 5 * replicas * ROWS, WIDTH))
    trainer.detachFromDevice()
    return model


def inference_of(folder: Path, model=None) -> poptorch.PoplarExecutor:
    options = poptorch.Options().deviceIterations(3).enableProfiling(folder).showCompilationProgressBar(False)
    return poptorch.inferenceModel(model or Model(), options)


def test_a_slowed_block_is_found_with_the_time_that_it_takes(tmp_path):
    slept.clear()
    train(tmp_path, slow_block=1)
    most = 1.7 * max(slept)  # on a loaded machine a sleep lasts longer than it was meant to
    profile = load(tmp_path / "training" / "profile.pop")
    found = Figures(profile)
    assert found.slowest == 1
    assert SLOW <= found.stages[1].phases["F"] / 1e9 < most
    operation = max(profile.operations, key=lambda operation: operation.ns)
    assert (operation.kind, operation.block) == ("popvision_test.slow", "block1")
    assert SLOW <= operation.ns / operation.calls / 1e9 < most
    assert operation.where.startswith(__file__)


_pauses = iter([])


@torch.library.custom_op("popvision_test::pausing", mutates_args=())
def pausing(x: torch.Tensor) -> torch.Tensor:
    """Stands for an operation that another program keeps from the core, once."""
    time.sleep(next(_pauses, 0.0))
    return x.clone()


pausing.register_fake(torch.empty_like)


def test_what_one_micro_batch_waited_is_no_time_of_an_operation(tmp_path):
    global _pauses

    def model(x):
        return torch.ops.popvision_test.pausing(x)

    options = poptorch.Options().deviceIterations(5).enableProfiling(tmp_path)
    inference = poptorch.inferenceModel(model, options.showCompilationProgressBar(False))
    inference.compile(torch.zeros(5, 2))
    _pauses = iter(2 * [0, 0, 2.0, 0, 0])
    for _ in range(2):
        inference(torch.zeros(5, 2))
    inference.detachFromDevice()
    profile = load(tmp_path / "inference" / "profile.pop")
    (operation,) = [row for row in profile.operations if row.kind == "popvision_test.pausing"]
    assert operation.calls == 5 and operation.ns < 1e9


def test_a_run_writes_profiles_of_both_kinds_and_one_page(tmp_path):
    model = train(tmp_path)
    inference = inference_of(tmp_path, model)
    inference(torch.randn(3 * ROWS, WIDTH))
    inference.destroy()
    assert load(tmp_path / "training" / "profile.pop").training
    assert not load(tmp_path / "inference" / "profile.pop").training
    page = (tmp_path / "report.html").read_text()
    assert '"label":"training"' in page and '"label":"inference"' in page


def test_counts_bytes_and_options_are_those_of_the_run(tmp_path):
    train(tmp_path, calls=3)
    profile = load(tmp_path / "training" / "profile.pop")
    assert (profile.facts["calls"], profile.facts["steps"]) == (3, 6)
    found = Figures(profile)
    assert found.samples_per_call == 2 * 5 * ROWS
    loaded = [part.bytes for _, _, part in found.profile.moves() if part.kind == "load"]
    assert loaded == [ROWS * WIDTH * 4]  # of a micro-batch; `Model and options` lists transfers
    assert [entry.name for entry in profile.passes] == ["capture", "partition", "tasks", "load"]
    linear = WIDTH * WIDTH + WIDTH
    assert [block.parameters for block in profile.blocks] == [linear] * 3
    products = [operation for operation in profile.operations if operation.kind == "addmm"]
    assert [operation.flops for operation in products] == [2 * ROWS * WIDTH * WIDTH] * 3
    for row in profile.memory:
        assert row.weights == row.gradients == 4 * linear
        assert row.optimizer == pytest.approx(2 * 4 * linear, rel=0.01)  # two moments, and a step count
    changed = {option.name: option.value for option in profile.options}
    assert changed["device_iterations"] == "2" and changed["gradient_accumulation"] == "5"


class Deep(nn.Module):
    """Two layers with the same weight on each ipu; the last ipu has the first one's weight."""

    def __init__(self):
        super().__init__()
        layers = [nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)]
        stages = (nn.Sequential(*layers), nn.Sequential(nn.Linear(WIDTH, WIDTH), layers[0]))
        self.layers = nn.Sequential(
            *(poptorch.BeginBlock(stage, f"block{i}", ipu_id=i) for i, stage in enumerate(stages))
        )

    def forward(self, x):
        return poptorch.identity_loss(self.layers(x), "mean")


def test_operations_that_backward_computes_again_count_and_a_tied_weight_counts_once(tmp_path):
    def compiled(recompute):
        options = poptorch.Options().enableProfiling(tmp_path).showCompilationProgressBar(False)
        options.Training.gradientAccumulation(3)
        options._Popart.set("autoRecomputation", 3 * recompute)
        trainer = poptorch.trainingModel(Deep(), options)
        trainer.compile(torch.randn(3 * ROWS, WIDTH))
        trainer.destroy()
        return load(tmp_path / "training" / "profile.pop")

    def flops(profile, phase):
        return sum(row.flops for row in profile.operations if profile.tasks[row.task].phase == phase)

    plain, again = compiled(False), compiled(True)
    assert flops(plain, "F") == flops(again, "F")
    # Of each stage, the result of the last layer is not needed in backward.
    assert flops(plain, "B") < flops(again, "B") <= flops(plain, "B") + flops(plain, "F")
    tied, other = 2 * WIDTH * WIDTH + 2 * WIDTH, 2 * WIDTH * WIDTH + WIDTH
    assert [block.parameters for block in plain.blocks] == [tied + other, WIDTH * WIDTH + WIDTH]


def test_liveness_is_what_the_engine_holds(tmp_path, monkeypatch):
    """On one ipu and one core, which take one micro-batch after another. (Several ipus hold what they send to each
    other once, and a profile shows it on both.)"""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    counted: dict[int, int] = {}  # bytes after each row for micro-batch 0

    class Counting(recording.Recorder):
        def run_task(self, rows, task, work, core):
            super().run_task(rows, task, work, core)
            row = task.row
            if task.index or not rows.plan.tasks[row].phase:
                return
            state = {value.untyped_storage()._cdata for value in rows.state.values[0].values()}
            state |= {value.untyped_storage()._cdata for value in rows.state.new_buffers[0].values()}
            batch = {value.untyped_storage()._cdata for value in work.args[0].inputs}  # of its call
            found = {}
            for value in rows.frames[0].get(0, {}).values():
                storage = value.untyped_storage()
                if storage._cdata in batch:
                    found[value.data_ptr()] = value.nbytes
                elif storage._cdata not in state:
                    found[storage._cdata] = storage.nbytes()
            counted[row] = sum(found.values())

    monkeypatch.setattr("poptorch.reporter.Recorder", Counting)
    train(tmp_path, ipus=(0, 0, 0))
    profile = load(tmp_path / "training" / "profile.pop")
    held = {
        row: sum(t.bytes for t in profile.tensors if t.born <= row and not 0 <= t.died <= row)
        for row in counted
    }
    assert held == pytest.approx(counted, rel=0.01)
    assert max(counted.values()) > 0


def test_every_replica_and_ipu_is_recorded(tmp_path):
    train(tmp_path, replicas=2)
    profile = load(tmp_path / "training" / "profile.pop")
    places = {(replica, ipu) for replica in range(2) for ipu in range(3)}
    assert {(event.replica, event.ipu) for event in profile.events() if event.computes} == places
    assert {(row.replica, row.ipu) for row in profile.memory} == places
    found = Figures(profile)
    assert [use.place for use in found.device_usages] == [0, 1, 2]
    # Each computation of a step ran once: three stages, two phases, five micro-batches, two replicas.
    ran = [
        (run.step, run.task, run.micro_batch, run.replica)
        for run in profile.runs
        if profile.tasks[run.task].phase
    ]
    assert len(set(ran)) == len(ran) and len([1 for event in profile.events() if event.computes]) == 6 * 60


def test_a_step_runs_the_same_tasks_in_the_same_order_with_a_recorder(tmp_path, monkeypatch):
    """With a recorder each ipu ran a program of its own, so a profile showed another run than the user's."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    ran: list[tuple[int, int]] = []
    run_piece = RowFunctions.bind

    def bind(self, row, replica):
        work = run_piece(self, row, replica)
        if work is None:
            return None

        def run(call, index):
            ran.append((row, index if self.plan.tasks[row].index == "micro_batch" else -1))
            work(call, index)

        return run

    monkeypatch.setattr(RowFunctions, "bind", bind)

    def trained(folder):
        model, options = Model(), poptorch.Options().showCompilationProgressBar(False)
        options.Training.gradientAccumulation(5)
        if folder:
            options.enableProfiling(folder)
        ran.clear()
        trainer = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.01))
        for _ in range(3):
            trainer(torch.randn(5 * ROWS, WIDTH))
        trainer.destroy()
        return list(ran)

    plain, recorded = trained(None), trained(tmp_path)
    assert plain == recorded
    profile = load(tmp_path / "training" / "profile.pop")
    assert [(run.task, run.micro_batch) for run in profile.runs] == recorded


def test_a_long_training_keeps_its_first_and_last_steps_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(Recorder.__init__, "__defaults__", (800,))
    train(tmp_path, calls=20)
    profile = load(tmp_path / "training" / "profile.pop")
    steps = sorted({run.step for run in profile.runs})
    assert 0 in steps and 39 in steps and len(steps) < 20
    assert len(profile.runs) <= 800
    assert any(f"holds {len(steps)} of 40 steps" in text for text in warning_sentences(Figures(profile)))


def test_waiting_for_the_loader_is_noted(tmp_path):
    class Slowly(torch.utils.data.Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            time.sleep(0.02)
            return torch.zeros(WIDTH)

    inference = inference_of(tmp_path)
    for batch in poptorch.DataLoader(poptorch.Options().deviceIterations(3), Slowly(), batch_size=2):
        inference(batch)
    inference.destroy()
    assert Figures(load(tmp_path / "inference" / "profile.pop")).host["loader"] >= 0.24


def test_an_incomplete_batch_has_a_plan_of_its_own_that_the_report_explains(tmp_path):
    options = poptorch.Options().enableProfiling(tmp_path).showCompilationProgressBar(False).allowNewShapes()
    options.Training.gradientAccumulation(5)
    model = Model()
    trainer = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.01))
    for rows in (20, 15, 20):
        trainer(torch.randn(rows, WIDTH))
    trainer.destroy()
    names = ("training", "training_2", "training_3")
    first, second, third = (load(tmp_path / name / "profile.pop") for name in names)
    assert plan_sentence(first) == ""
    assert plan_sentence(second).startswith("This is plan 2 of the model: a later call had another shape")
    assert plan_sentence(second).endswith("Here a step has 12 rows, 4 in each micro-batch.")
    assert plan_sentence(third).endswith("Here a step has 3 rows, 3 in each micro-batch.")
    assert plan_sentence(second) in summary(second).replace("\n", " ")
    # The other plans were compiled and called between two calls of the first one.
    others = [event for event in first.host if first.calls[0].end <= event.start < event.end]
    kinds = [event.kind for event in others if event.end <= first.calls[1].start]
    assert kinds == ["compilation", "other calls"] * 2


def test_a_program_that_never_detaches_has_its_profile_when_it_ends(tmp_path):
    program = (
        "import poptorch, torch\n"
        "model = poptorch.inferenceModel(torch.nn.Linear(2, 2))\n"
        "model(torch.ones(1, 2))\n"
    )
    wish = '{"autoReport.all":"true", "autoReport.directory":"report"}'
    environment = {**os.environ, "POPLAR_ENGINE_OPTIONS": wish}
    subprocess.run([*quick_python.words(), "-c", program], check=True, cwd=tmp_path, env=environment)
    assert load(tmp_path / "report" / "inference" / "profile.pop").facts["calls"] == 1
    assert (tmp_path / "report" / "report.html").exists()


def test_tasks_have_the_time_that_a_core_spent_in_them(tmp_path):
    train(tmp_path, slow_block=1)
    profile = load(tmp_path / "training" / "profile.pop")
    events = list(profile.events())
    assert all(0 < event.computed <= event.end - event.start for event in events)
    assert {event.kind for event in events} >= {"forward", "backward", "sum", "update"}
    asleep = [event for event in events if (event.kind, event.stage) == ("forward", 1)]
    assert all(event.computed / 1e9 < SLOW / 3 for event in asleep)


def test_of_a_call_that_failed_half_way_there_is_what_was_done_until_then(tmp_path):
    inference = inference_of(tmp_path)
    for _ in range(2):  # these are looked at closer, with code of their own
        inference(torch.randn(3 * ROWS, WIDTH))
    codes = inference._plans.engine.workers[0].codes[0]
    before = list(codes)
    codes[2] = lambda values: 1 / 0  # of the last ipu
    with pytest.raises(poptorch.Error):
        inference(torch.randn(3 * ROWS, WIDTH))
    codes[:] = before
    inference(torch.randn(3 * ROWS, WIDTH))
    inference.destroy()
    profile = load(tmp_path / "inference" / "profile.pop")
    assert (profile.facts["calls"], profile.facts["failed_calls"]) == (3, 1)
    broken = [event.ipu for event in profile.events() if event.call == 2]
    assert 0 in broken and broken.count(2) < 3
    found = Figures(profile)
    assert found.calls == 3
    assert warning_sentences(found)[0] == "1 call failed. The figures leave it out."


def test_a_long_run_writes_its_profile_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setattr("poptorch.reporter._SAVE_INTERVAL", 0.0)
    monkeypatch.setattr("poptorch.reporter._SAVE_FACTOR", 0)
    inference = inference_of(tmp_path)
    for calls in (1, 2):
        inference(torch.randn(3 * ROWS, WIDTH))
        assert load(tmp_path / "inference" / "profile.pop").facts["calls"] == calls
    inference.destroy()
