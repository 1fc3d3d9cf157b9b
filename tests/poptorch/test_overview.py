"""`describe` and `executor.plan`: what will run, in words that a person reads."""

import re

import pytest
import torch

import poptorch


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = poptorch.BeginBlock(torch.nn.Linear(3, 4), "B1")
        self.last = poptorch.BeginBlock(torch.nn.Linear(4, 2), "B2")
        self.calls = 0

    def forward(self, x, target):
        self.calls += 1
        return torch.nn.functional.mse_loss(self.last(self.first(x)), target)


def two_stages():
    opts = poptorch.Options().deviceIterations(2)
    opts.Training.gradientAccumulation(3)
    stages = poptorch.Stage("B1").ipu(0), poptorch.Stage("B2").ipu(1)
    return opts.setExecutionStrategy(poptorch.PipelinedExecution(*stages))


BATCH = torch.ones(2 * 3 * 5, 3), torch.ones(2 * 3 * 5, 2)


def test_a_description_says_what_runs_before_anything_has_run():
    model, opts = Two(), two_stages()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = poptorch.describe(model, opts, BATCH)
    text = str(found)
    assert text.startswith(
        "training, 1f1b: 2 stages on 2 ipus, 1 replica; a call is 2 device iterations of\n3 micro-batches\n"
    )
    assert "stage 0 on ipu 0, 16 parameters: B1\nstage 1 on ipu 1, 10 parameters: B2\n" in text
    assert "ipu 0 -> ipu 1: 80 bytes a micro-batch after F0" in text  # 5 rows of 4 float32
    assert "ipu 1 -> ipu 0: 80 bytes a micro-batch after B1" in text
    assert "F0" in found.schedule and "B2" in found.schedule
    assert "ipu 0 | F0 F1 .. B0 F2 B1 .. B2\nipu 1 | .. F0 B0 F1 B1 F2 B2 ..\n" in text
    assert text.endswith('.code["F0"] and so on') and list(found.code) == ["F0", "F1", "B1", "B0"]
    assert all("return" in source for source in found.code.values()) and "addmm" in found.code["F0"]
    # Nothing is kept: the model is plain, the options are not frozen, and training starts from here.
    assert type(model) is Two and all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    opts.deviceIterations(2)
    trainer = poptorch.trainingModel(model, opts)
    trainer(*BATCH)
    assert str(trainer.plan) == text


def test_a_model_on_the_meta_device_is_described_like_one_with_weights():
    with torch.device("meta"):
        model = Two()
    assert str(poptorch.describe(model, two_stages(), BATCH)) == str(
        poptorch.describe(Two(), two_stages(), BATCH)
    )


def test_a_notebook_displays_a_description_as_a_picture_of_its_schedule():
    svg = poptorch.describe(Two(), two_stages(), BATCH)._repr_svg_()
    assert svg.startswith('<svg xmlns="http://www.w3.org/2000/svg" class="schedule"')
    cells = re.findall(r'<text class="cell" x="(\d+)" y="(\d+)">(\w+)</text>', svg)
    by_row = {y: [cell for _, top, cell in cells if top == y] for _, y, _ in cells}
    assert list(by_row.values()) == [
        ["F0", "F1", "B0", "F2", "B1", "B2"],
        ["F0", "B0", "F1", "B1", "F2", "B2"],
    ]
    many = two_stages()
    many.Training.gradientAccumulation(100)
    assert poptorch.describe(Two(), many, (torch.ones(1000, 3), torch.ones(1000, 2)))._repr_svg_() is None


def test_a_description_simulates_a_step_with_given_costs():
    found = poptorch.describe(Two(), two_stages(), BATCH)
    assert found.drawing == "ipu 0 | F0 F1 .. B0 F2 B1 .. B2\nipu 1 | .. F0 B0 F1 B1 F2 B2 .."
    # Each ipu works 3 (F + B) ticks, and waits for one F + B of the other.
    step = found.simulate(F=1, B=2)
    assert (step.length, step.bubble, step.most_in_flight) == (12, 1 - 9 / 12, {0: 2, 1: 1})
    # In zero bubble the first stage runs its backward, B + W, as one action.
    opts = two_stages()
    opts.setExecutionStrategy(poptorch.PipelinedExecution("B1", "B2", schedule="zero-bubble"))
    step = poptorch.describe(Two(), opts, BATCH).simulate(F=1, B=1, W=1)
    assert (step.length, step.most_in_flight) == (10, {0: 2, 1: 2})


def test_a_description_of_a_deep_model_fits_on_a_screen():
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(64)), Last())
    poptorch.annotate(model, {f"{i}": i // 4 for i in range(64)})
    opts = poptorch.Options()
    opts.Training.gradientAccumulation(40)
    found = poptorch.describe(model, opts, torch.ones(40, 8))
    lines = str(found).splitlines()
    assert len(lines) <= 50 and max(map(len, lines)) <= 80
    assert len(found.stages) == 16 and "... and 22 more transfers, in .transfers" in lines
    assert any(line.startswith("ipu 15 |") and line.endswith(" ...") for line in lines)


class Last(torch.nn.Module):
    def forward(self, x):
        return poptorch.identity_loss(x, "mean")


class Shared(torch.nn.Module):
    """One weight on two ipus."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4, bias=False)

    def forward(self, x):
        with poptorch.Block("A", ipu_id=0):
            x = self.layer(x).relu()
        with poptorch.Block("B", ipu_id=1):
            return poptorch.identity_loss(self.layer(x), "mean")


def test_weights_that_two_ipus_read_are_sent_once_a_step():
    opts = poptorch.Options()
    opts.Training.gradientAccumulation(3)
    found = poptorch.describe(Shared(), opts, torch.ones(3 * 5, 4))
    assert "ipu 0 -> ipu 1: 64 bytes a step at its start (shared weights)" in str(found)
    assert "ipu 0 -> ipu 1: 80 bytes a micro-batch after F0" in str(found)
    assert [transfer[:4] for transfer in found.transfers if transfer[3] == "step"] == [(0, 1, 64, "step")]


@pytest.mark.parametrize("named", ["model", "executor"])
def test_a_wrapped_model_is_described_with_the_options_that_are_given(named):
    model = Two()
    trainer = poptorch.trainingModel(model, two_stages())
    sharded = poptorch.Options()
    sharded.setExecutionStrategy(poptorch.ShardedExecution(*two_stages()._execution_strategy._stages))
    target = model if named == "model" else trainer
    found = poptorch.describe(target, sharded, BATCH)
    assert found.title.startswith("training, sharded: 2 stages on 2 ipus")
    assert found.title.endswith("a call is 1 device iteration of 1 micro-batch")
    own = poptorch.describe(target, batch=BATCH)
    assert own.title.endswith("a call is 2 device iterations of 3 micro-batches")


def test_an_executor_is_described_with_its_own_options():
    trainer = poptorch.trainingModel(Two(), two_stages())
    text = str(poptorch.describe(trainer, batch=BATCH))
    assert not trainer.isCompiled()
    with pytest.raises(poptorch.Error, match="Model has not been compiled"):
        _ = trainer.plan
    trainer.compile(*BATCH)
    assert str(trainer.plan) == text


def test_a_batch_may_be_one_tensor_or_keywords():
    layer = torch.nn.Linear(3, 2)
    one = poptorch.describe(layer, batch=torch.ones(4, 3), training=False)
    assert one.title.startswith("inference, 1f1b: 1 stage on 1 ipu, 1 replica; a call is 1 device iteration")
    assert str(poptorch.describe(layer, batch={"input": torch.ones(4, 3)}, training=False)) == str(one)
