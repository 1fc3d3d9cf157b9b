"""Neighbouring stages of one ipu are one stage, however a model is marked: so more micro-batches fill the pipeline."""

import logging

import pytest
import torch
from executor_models import options
from torch import nn

import poptorch

LAYERS, IPUS, ROWS = 8, 4, 2


class Stack(nn.Module):
    """An embedding and eight layers; `blocks` marks each as a block of its own, two layers on an ipu."""

    def __init__(self, blocks=False):
        super().__init__()
        self.blocks = blocks
        self.embedding = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(LAYERS))

    def forward(self, x, y):
        x = self.embedding(x)
        for i, layer in enumerate(self.layers):
            if self.blocks:
                poptorch.Block.start(f"layer {i}", ipu_id=i // 2)
            x = layer(x).tanh()
        return nn.functional.mse_loss(x, y)


def each_layer_alone():
    return {f"layers.{i}": i // 2 for i in range(LAYERS)}


AUTO = poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement)
WAYS = {
    "blocks by hand": (lambda: Stack(blocks=True), AUTO),
    "stages by hand": (
        lambda: Stack(blocks=True),
        poptorch.PipelinedExecution(*(poptorch.Stage(f"layer {i}").ipu(i // 2) for i in range(LAYERS))),
    ),
    "annotate": (lambda: poptorch.annotate(Stack(), each_layer_alone()), None),
    "layers_per_ipu": (lambda: poptorch.annotate(Stack(), layers_per_ipu=[2] * IPUS), None),
    "split": (lambda: poptorch.split(Stack(), IPUS), None),
    "AutoBalance": (lambda: Stack(), poptorch.PipelinedExecution(poptorch.AutoBalance(IPUS))),
}


def idle_share(model, strategy, micro_batches):
    options = poptorch.Options().showCompilationProgressBar(False)
    options.Training.gradientAccumulation(micro_batches)
    if strategy is not None:
        options.setExecutionStrategy(strategy)
    batch = torch.randn(ROWS * micro_batches, 4), torch.randn(ROWS * micro_batches, 4)
    drawn = poptorch.describe(model, options, batch).schedule
    lanes = [line.split(" | ")[1].split() for line in drawn.splitlines() if line.startswith("ipu ")]
    assert len(lanes) == IPUS
    ticks = max(map(len, lanes))
    return 1 - sum(cell != ".." for lane in lanes for cell in lane) / (ticks * IPUS)


@pytest.mark.parametrize("way", WAYS)
def test_the_drawn_bubble_falls_with_the_number_of_micro_batches(way):
    make, strategy = WAYS[way]
    for micro_batches in (8, 16):
        expected = (IPUS - 1) / (micro_batches + IPUS - 1)
        assert idle_share(make(), strategy, micro_batches) == pytest.approx(expected)


def stages_of(ipus, schedule):
    """Return the ipu of each stage of a model of eight layers, with the embedding, on these ipus."""
    options = poptorch.Options().showCompilationProgressBar(False)
    options.Training.gradientAccumulation(15)
    blocks = [["embedding", "layer 0"], *(f"layer {i}" for i in range(1, LAYERS))]
    stages = [
        poptorch.Stage(*([b] if isinstance(b, str) else b)).ipu(i) for b, i in zip(blocks, ipus, strict=True)
    ]
    options.setExecutionStrategy(poptorch.PipelinedExecution(*stages, schedule=schedule))
    model, batch = Stack(blocks=True), (torch.randn(30, 4), torch.randn(30, 4))
    poptorch.BeginBlock(model.embedding, "embedding")
    return [row[1] for row in poptorch.describe(model, options, batch).stages]


LOOPS, V = [0, 1, 2, 3] * 2, [0, 1, 2, 3, 3, 2, 1, 0]
LAYOUT_OF = {"interleaved": LOOPS, "zero-bubble-v": V, "dualpipe-v": V}


@pytest.mark.parametrize("schedule", LAYOUT_OF)
@pytest.mark.parametrize("ipus", [LOOPS, V, [0, 0, 1, 1, 2, 2, 3, 3], [*range(8)]], ids=str)
def test_a_schedule_needs_its_layout(schedule, ipus):
    if ipus == LAYOUT_OF[schedule]:
        assert stages_of(ipus, schedule) == ipus
        return
    layout = (
        LAYOUT_OF[schedule]
        if max(ipus) == 3
        else [*range(8), *(range(8) if schedule == "interleaved" else V)]
    )
    with pytest.raises(poptorch.Error, match="in the layout " + ", ".join(map(str, layout[:8]))):
        stages_of(ipus, schedule)


def test_a_schedule_of_several_ipus_on_one_ipu_is_said(caplog):
    with caplog.at_level("INFO", "poptorch::python"):
        assert len(set(stages_of([0] * 8, "interleaved"))) == 1
    assert "the schedule 'interleaved' needs several ipus, and all stages are on one" in caplog.text


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble-v"])
@pytest.mark.parametrize("rule", [poptorch.AutoStage.SameAsIpu, poptorch.AutoBalance(IPUS)])
def test_a_rule_that_makes_one_stage_of_an_ipu_is_refused_beside_such_a_schedule(schedule, rule):
    strategy = poptorch.PipelinedExecution(rule, schedule=schedule)
    with pytest.raises(poptorch.Error, match=f"the schedule '{schedule}' needs several stages on each ipu"):
        idle_share(Stack(blocks=True), strategy, 16)


# A pipeline that has too few micro-batches, and a user who allows that.


def executor(strategy, accumulation=1):
    torch.manual_seed(1)
    model = Stack(blocks=True)
    opts = options(accumulation=accumulation).setExecutionStrategy(strategy)
    return poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.1)), model


def test_it_runs_sharded_with_the_same_bits_and_says_so(caplog):
    with caplog.at_level(logging.INFO, logger="poptorch::python"):
        allowed, model = executor(poptorch.PipelinedExecution().orSharded())
        allowed(torch.ones(2, 4), torch.ones(2, 4))
    assert "gradientAccumulation is 1, and from 7 they are a pipeline" in caplog.text
    sharded, twin = executor(poptorch.ShardedExecution())
    sharded(torch.ones(2, 4), torch.ones(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_with_enough_micro_batches_it_stays_a_pipeline():
    allowed, _ = executor(poptorch.PipelinedExecution().orSharded(), accumulation=7)
    allowed(torch.ones(7, 4), torch.ones(7, 4))
    assert allowed._executable.settings.strategy.order == "1f1b"
