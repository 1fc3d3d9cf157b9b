"""Phased execution: `ShardedExecution` over the stages of the phases, with the results of plain PyTorch."""

import functools

import pytest
import torch
from parity_models import Digits, annotated
from parity_runs import plain, trained
from test_same_bits import ADAM
from torch import nn

import poptorch
from poptorch import Liveness, ParallelPhasedExecution, Phase, SerialPhasedExecution, ShardedExecution, Stage
from small_models import module


def serial():
    strategy = SerialPhasedExecution("a", ["b", "c"], "d").setTensorsLiveness(Liveness.OffChipAfterEachPhase)
    return strategy.useSeparateBackwardPhase(True)


def parallel():
    strategy = ParallelPhasedExecution(Phase(Stage("a"), Stage("b")), Phase(Stage("c"), Stage("d")))
    strategy.phase(0).ipus(0, 2)
    strategy.phase(1).ipus(1, 3)
    return strategy.sendTensorsOffChipAfterFwd(True)


PHASED = {
    "serial": (serial, ShardedExecution("a", ["b", "c"], "d")),
    "serial, one ipu": (
        lambda: SerialPhasedExecution(*(Stage(block).ipu(0) for block in "abcd")),
        ShardedExecution(*(Stage(block).ipu(0) for block in "abcd")),
    ),
    "parallel": (
        parallel,
        ShardedExecution(*(Stage(name).ipu(ipu) for name, ipu in zip("abcd", (0, 2, 1, 3), strict=True))),
    ),
}


@functools.cache
def expected():
    return plain(Digits, ADAM, updates=4)


@pytest.mark.parametrize("strategy", PHASED)
def test_phases_train_as_plain_pytorch_and_run_as_their_stages_in_sharded_execution(strategy):
    phased, sharded = PHASED[strategy]
    assert trained(Digits, ADAM, phased(), updates=4).differs_from(expected()) == []

    def described(strategy):
        options = poptorch.Options().setExecutionStrategy(strategy)
        options.Training.gradientAccumulation(2)
        return str(poptorch.describe(annotated(Digits()), options, Digits.data(4)))

    assert described(phased()) == described(sharded)


def test_a_phase_may_name_its_ipus_block_by_block():
    def forward(self, x):
        for ipu, layer in enumerate(self.layers):
            with poptorch.Block("abc"[ipu], ipu_id=ipu):
                x = layer(x)
        with poptorch.Block("c"):
            return poptorch.identity_loss(x, "mean")

    model, x = module(forward, layers=nn.ModuleList(nn.Linear(2, 2) for _ in "abc")), torch.randn(2, 2)
    expected = model(x).detach()
    options = poptorch.Options()
    options.setExecutionStrategy(poptorch.SerialPhasedExecution(["a", "b"], "c"))
    executor = poptorch.trainingModel(model, options)
    assert torch.equal(executor(x), expected)
    assert [ipu for _, ipu, _, _ in executor.plan.stages] == [0, 1, 2]
