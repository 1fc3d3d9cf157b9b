"""The memory of a plan is that of a run, by its meters, in several models and layouts."""

import pytest
import torch
from torch import nn

import poptorch
from popengine.profile import load
from poptorch.planning import planned_profile
from popvision.analysis import Figures
from popvision.machine import load_machine
from popvision.plan import Estimate

WIDTH = 32


class Layers(nn.Module):
    """A layer a stage; the first result goes to the last stage, too. `kind` says what a layer is."""

    def __init__(self, kind: str, stages: int = 4):
        super().__init__()
        self.kind = kind
        parts = {
            "linear": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)),
            "norm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)),
            "convolution": lambda: nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU()),
            "attention": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True),
            "shared": lambda: nn.Linear(WIDTH, WIDTH),
            "lstm": lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True),
        }
        self.layers = nn.ModuleList(parts[kind]() for _ in range(stages))
        if kind == "shared":
            self.layers[-1] = self.layers[0]

    def forward(self, x):
        first = None
        for i, layer in enumerate(self.layers):
            with poptorch.Block(f"block{i}"):
                x = layer(x)[0] if self.kind == "lstm" else layer(x)
                first = x if first is None else first
                if i == len(self.layers) - 1:
                    x = x + first
                    return poptorch.identity_loss(x.square(), "mean") if self.training else x
        return x


SHAPES = {"convolution": (3, 12, 12), "attention": (6, WIDTH), "lstm": (6, WIDTH)}
LAYOUTS = {
    "pipelined": (poptorch.PipelinedExecution, (0, 1, 2, 3), {}),
    "wrapped around": (poptorch.PipelinedExecution, (0, 1, 0, 1), {}),
    "sharded": (poptorch.ShardedExecution, (0, 0, 1, 1), {}),
    "recomputation": (poptorch.PipelinedExecution, (0, 1, 2, 3), {"recompute": True}),
    "replicas": (poptorch.PipelinedExecution, (0, 1, 2, 3), {"replicas": 2}),
    "one update": (poptorch.PipelinedExecution, (0, 1, 2, 3), {"updates": 1}),
    "inference": (poptorch.PipelinedExecution, (0, 1, 2, 3), {"training": False}),
}
CASES = [
    *(("linear", layout) for layout in LAYOUTS),
    *((kind, "pipelined") for kind in ("norm", "convolution", "attention", "shared")),
    ("convolution", "sharded"),
    ("attention", "recomputation"),
    ("norm", "inference"),
    ("shared", "sharded"),
]


def planned_and_used(folder, kind, layout):
    """The bytes of the plan by ipu and kind, and what a run's ipus needed."""
    strategy, ipus, more = LAYOUTS[layout]
    updates, replicas, training = more.get("updates", 2), more.get("replicas", 1), more.get("training", True)
    stages = [poptorch.Stage(f"block{i}").ipu(ipu) for i, ipu in enumerate(ipus)]
    options = poptorch.Options().enableProfiling(folder).showCompilationProgressBar(False)
    options.setExecutionStrategy(strategy(*stages)).replicationFactor(replicas)
    options.deviceIterations(updates if training else 9 * updates)
    model = Layers(kind).train(training)
    if training:
        options.Training.gradientAccumulation(9)
        options._Popart.set("autoRecomputation", 3 * more.get("recompute", False))
        executor = poptorch.trainingModel(model, options, torch.optim.Adam(model.parameters()))
    else:
        executor = poptorch.inferenceModel(model, options)
    batch = torch.randn(updates * 9 * replicas * 4, *SHAPES.get(kind, (WIDTH,)))
    executor.compile(batch)
    compiled = executor._executable
    plan = planned_profile(compiled.plan, compiled.settings, compiled.graph)
    micro_batches = plan.facts["schedule_micro_batches"]
    executor(batch)
    executor(batch)
    executor.detachFromDevice()
    (file,) = folder.rglob("profile.pop")
    return Estimate(plan, load_machine("bow-pod4"), 1, micro_batches), Figures(load(file)).needs


@pytest.mark.parametrize("kind, layout", CASES)
def test_an_ipu_needs_the_memory_that_its_plan_says(tmp_path, kind, layout):
    planned, used = planned_and_used(tmp_path, kind, layout)
    assert list(planned.memory) == [f"ipu {need.ipu}" for need in used]
    for found, need in zip(planned.memory.values(), used, strict=True):
        assert found["weights"] == need.weights + need.buffers
        assert (found["gradients"], found["optimizer"]) == (need.gradients, need.optimizer)
        assert found["activations"] == need.activations  # the same tasks in the same order
        # How many values wait is a matter of time: each stage takes another time on another machine.
        assert bool(found["between"]) == bool(need.between) or need.ipu == 0


def test_where_only_the_kernel_knows_its_workspace_no_bound_is_said(tmp_path):
    planned, _ = planned_and_used(tmp_path, "lstm", "pipelined")
    assert planned.problems == ["a kernel needs memory of a size that only it knows"]


def test_a_schedule_that_begins_all_forwards_first_holds_the_activations_of_all():
    def most_bytes(schedule):
        options = poptorch.Options()
        options.setExecutionStrategy(
            poptorch.PipelinedExecution(*(f"block{i}" for i in range(4)), schedule=schedule)
        )
        options.Training.gradientAccumulation(9)
        (found,) = poptorch.plan(
            Layers("linear"), options, torch.randn(9 * 4, WIDTH), on="bow-pod16"
        ).estimates
        return [found.memory[f"ipu {ipu}"]["activations"] for ipu in (0, 3)]

    first, last = most_bytes("1f1b")
    assert first > last  # as many micro-batches in flight as stages follow
    assert [most > 1.7 * least for most, least in zip(most_bytes("gpipe"), (first, last), strict=True)] == [
        True
    ] * 2


def test_a_tied_weight_counts_in_one_block():
    model = Layers("shared")
    options = poptorch.Options()
    options.setExecutionStrategy(poptorch.PipelinedExecution(*(f"block{i}" for i in range(4))))
    options.Training.gradientAccumulation(9)
    (found,) = poptorch.plan(model, options, torch.randn(9 * 4, WIDTH), on="bow-pod16").estimates
    blocks = {block.name: block.parameters for block in found.profile.blocks}
    layer = WIDTH * WIDTH + WIDTH
    assert blocks == {"block0": layer, "block1": layer, "block2": layer, "block3": 0}
