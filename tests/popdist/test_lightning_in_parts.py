"""Lightning trains, validates, saves and resumes a model with BatchNorm whose ipus are in two processes."""

import sys
from pathlib import Path

import processes
import pytest
import torch
from torch import nn
from torch.nn import functional

import popdist
import popdist.poptorch
import poptorch

sys.path.append(str(Path(__file__).parents[1] / "lightning_ipu"))

pl = pytest.importorskip("lightning.pytorch")
from lightning_models import Classifier, loader, made, trainer  # noqa: E402


class Norms(Classifier):
    """BatchNorm on each of two ipus; the values of a step are on the last one."""

    def __init__(self):
        super().__init__(lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
        self.norms = nn.ModuleList([nn.BatchNorm1d(6), nn.BatchNorm1d(3)])

    def forward(self, x):
        with poptorch.Block("A"):
            x = torch.tanh(self.norms[0](self.first(x)))
        with poptorch.Block("B"):
            return self.norms[1](self.last(x))

    def training_step(self, batch, batch_idx):
        output = self(batch[0])
        with poptorch.Block("B"):
            return functional.cross_entropy(output, batch[1])

    def validation_step(self, batch, batch_idx):
        loss = self.training_step(batch, batch_idx)
        with poptorch.Block("B"):
            self.log("val", loss, sync_dist=True)
        return loss


def options(accumulation):
    found = popdist.poptorch.Options(2) if popdist.isPopdistEnvSet() else poptorch.Options()
    found.showCompilationProgressBar(False).deviceIterations(4 // accumulation)
    found.Training.gradientAccumulation(accumulation)
    return found.setExecutionStrategy(
        poptorch.PipelinedExecution(poptorch.Stage("A").ipu(0), poptorch.Stage("B").ipu(1))
    )


def fitted(epochs, checkpoint=None):
    """A module after `fit`, with its trainer, which has validated it before and after each epoch."""
    strategy = pl.strategies.IPUStrategy(training_opts=options(4), inference_opts=options(1))
    module, run = made(Norms), trainer(max_epochs=epochs, strategy=strategy)
    run.fit(module, loader(), loader(), ckpt_path=checkpoint)
    return module, run


def trained(folder):
    """Weights, metrics and saved state of a run, and the weights of one that resumes it."""
    torch.set_num_threads(1)
    module, run = fitted(2)
    run.save_checkpoint(folder / "after.ckpt")
    found = [run.validate(module, loader(), verbose=False), run.test(module, loader(), verbose=False)]
    saved = torch.load(folder / "after.ckpt", weights_only=False)
    state = saved["optimizer_states"][0]["state"]
    found.append({n: {name: value.tolist() for name, value in each.items()} for n, each in state.items()})
    for each in (module, fitted(3, folder / "after.ckpt")[0]):
        found.append({name: value.tolist() for name, value in each.state_dict().items()})
    return found


def test_a_model_with_batchnorm_in_two_processes_is_that_of_one(tmp_path):
    folders = tmp_path / "one", tmp_path / "two"
    for folder in folders:
        folder.mkdir()
    threads = torch.get_num_threads()
    one = trained(folders[0])
    torch.set_num_threads(threads)
    for ended in processes.run(in_processes, 2, folders[1], parts=2):
        assert ended.error == ""
        assert ended.value == one


def in_processes(folder):
    popdist.init()
    return trained(folder)
