"""Memory of a training pipeline: bounded whatever the accumulation, and less with recomputation. Measured."""

import os
import platform
import subprocess
import sys

import pytest
import torch
from parity_runs import options
from torch import nn

import poptorch
from popengine.profile import load
from popvision.analysis import Figures

STAGES, WIDTH, ROWS = 4, 8, 64
HANDED = WIDTH * ROWS * 4  # bytes that one stage hands to the next, a micro-batch
PLANNED = 5 * HANDED  # held for a backward: what enters each of four layers, and the last one's result


class Deep(nn.Module):
    """Four equal stages of four layers each."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
            for _ in range(STAGES)
        )
        for ipu, stage in enumerate(self.stages):
            poptorch.BeginBlock(stage, f"stage {ipu}", ipu_id=ipu)

    def forward(self, x, y):
        for stage in self.stages:
            x = stage(x)
        return nn.functional.mse_loss(x, y)


def measured(folder, accumulation, recompute=False, strategy=None):
    """What each ipu holds at the most for its micro-batches, and what waits between ipus, in bytes."""
    torch.manual_seed(0)
    model = Deep()
    opts = options(strategy, accumulation, iterations=2).enableProfiling(folder)
    if recompute:
        opts._Popart.set("autoRecomputation", 3)
    executor = poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.1))
    executor(*(torch.randn(2 * accumulation * ROWS, WIDTH) for _ in range(2)))
    executor.destroy()
    (file,) = folder.rglob("profile.pop")
    return Figures(load(file)).needs


def test_accumulation_does_not_raise_what_a_stage_of_a_pipeline_holds(tmp_path):
    few, many = measured(tmp_path / "8", 8), measured(tmp_path / "64", 64)
    assert [need.activations for need in many] == [need.activations for need in few]
    for before, need in zip(few, many, strict=True):
        in_flight = STAGES - need.ipu  # micro-batches between their forward and their backward
        assert (in_flight - 1) * PLANNED < need.activations
        # Beside them: what came for the next one, what goes to the previous stage, gradients not yet added.
        assert need.activations <= in_flight * PLANNED + 3 * HANDED + need.gradients
        assert need.between <= STAGES * HANDED
        assert need.always == before.always


def test_with_recomputation_only_one_micro_batch_at_a_time_has_its_activations(tmp_path):
    kept, again = measured(tmp_path / "kept", 8), measured(tmp_path / "again", 8, recompute=True)
    for before, after in zip(kept, again, strict=True):
        in_flight = STAGES - before.ipu
        assert before.activations - after.activations >= (in_flight - 1) * (PLANNED - HANDED)
        # All wait with what entered; one at a time has its activations again.
        assert after.activations <= in_flight * HANDED + PLANNED + 3 * HANDED + after.gradients


PAGE_FAULTS = """
import resource, poptorch, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(1000, 1000) for _ in range(4)])
    def forward(self, x):
        return poptorch.identity_loss(self.layers(x).square(), "mean")

options = poptorch.Options()
options.Training.gradientAccumulation(4)
trainer, x = poptorch.trainingModel(Net(), options), torch.randn(32, 1000)
for call in range(8):
    if call == 3:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    trainer(x)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's allocator is set")
def test_memory_that_a_micro_batch_frees_is_used_again_unless_the_environment_sets_the_allocator():
    def faults(**more):
        words = [sys.executable, "-c", PAGE_FAULTS]
        done = subprocess.run(
            words, env={**os.environ, **more}, capture_output=True, text=True, check=True, timeout=240
        )
        return int(done.stdout)

    assert 4 * faults() < faults(MALLOC_TRIM_THRESHOLD_="131072")
