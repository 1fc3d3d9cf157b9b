"""Phased execution: phases one after another on alternating ipus, with the results of plain PyTorch."""

import functools

import pytest
import torch
from parity_models import Digits, Normed, Transformer
from parity_runs import LAYOUTS, plain, trained
from test_same_bits import ADAM
from torch import nn

import poptorch
from poptorch import Liveness, ParallelPhasedExecution, Phase, SerialPhasedExecution, Stage


def serial(liveness=Liveness.AlwaysLive, separate=False):
    strategy = SerialPhasedExecution("a", ["b", "c"], "d").setTensorsLiveness(liveness)
    return strategy.useSeparateBackwardPhase(separate)


def parallel(off_chip=False, separate=False):
    strategy = ParallelPhasedExecution("a", "b", "c", "d").sendTensorsOffChipAfterFwd(off_chip)
    for index in range(4):
        strategy.phase(index).ipus(index % 2)
    return strategy.useSeparateBackwardPhase(separate)


def on_two_ipus_a_phase():
    strategy = ParallelPhasedExecution(Phase(Stage("a"), Stage("b")), Phase(Stage("c"), Stage("d")))
    strategy.phase(0).ipus(0, 2)
    strategy.phase(1).ipus(1, 3)
    return strategy


PHASED = {
    "serial": serial,
    "serial, one ipu": lambda: SerialPhasedExecution(*(Stage(block).ipu(0) for block in "abcd")),
    **{f"serial, {liveness.name}": lambda liveness=liveness: serial(liveness) for liveness in Liveness},
    "serial, separate backward": lambda: serial(separate=True),
    "parallel": parallel,
    "parallel, off chip": lambda: parallel(off_chip=True),
    "parallel, separate backward": lambda: parallel(separate=True),
    "parallel, two ipus a phase": on_two_ipus_a_phase,
}


@functools.cache
def expected():
    return plain(Digits, ADAM, updates=6)


@pytest.mark.parametrize("strategy", PHASED)
def test_phases_train_as_plain_pytorch_whatever_is_live(strategy):
    assert trained(Digits, ADAM, PHASED[strategy](), updates=6).differs_from(expected()) == []


@pytest.mark.parametrize("model", [Normed, Transformer])
def test_phases_keep_buffers_and_tied_weights(model):
    found = trained(model, ADAM, parallel(), updates=6)
    assert found.differs_from(plain(model, ADAM, updates=6)) == []


def test_phases_need_no_minimum_of_micro_batches():
    found = trained(Digits, ADAM, serial(), updates=4, accumulation=1)
    assert found.differs_from(trained(Digits, ADAM, LAYOUTS["sharded"](), updates=4, accumulation=1)) == []


def test_one_micro_batch_passes_all_phases_before_the_next():
    user = Digits()
    for name in "abcd":
        poptorch.BeginBlock(getattr(user, name), name)
    options = poptorch.Options().setExecutionStrategy(parallel()).showCompilationProgressBar(False)
    options.Training.gradientAccumulation(2)
    executor = poptorch.trainingModel(user, options)
    executor.compile(*Digits.data(4))
    drawn = [
        line.replace("..", "").split()
        for line in executor.plan.schedule.splitlines()
        if line.startswith("ipu ")
    ]
    assert [" ".join(words[3:]) for words in drawn if words[2] == "|"] == [
        "F0.0 F2.0 B2.0 B0.0 F0.1 F2.1 B2.1 B0.1",
        "F1.0 F3.0 B3.0 B1.0 F1.1 F3.1 B3.1 B1.1",
    ]


@pytest.mark.parametrize("index, ipu, needed", [(0, 1, "even"), (1, 2, "odd")])
def test_parallel_phases_alternate_between_even_and_odd_ipus(index, ipu, needed):
    strategy = parallel()
    strategy.phase(index).ipus(ipu)
    with pytest.raises(poptorch.Error, match=f"phase {index} .* on ipu {ipu} (?s:.*) with {needed} ipus"):
        trained(Digits, ADAM, strategy, updates=2)


def test_a_phase_may_name_its_ipus_block_by_block():
    class Inline(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(2, 2) for _ in range(3))

        def forward(self, x):
            with poptorch.Block("a", ipu_id=0):
                x = self.a(x)
            with poptorch.Block("b", ipu_id=1):
                x = self.b(x)
            with poptorch.Block("c", ipu_id=2):
                return poptorch.identity_loss(self.c(x), "mean")

    torch.manual_seed(0)
    model, x = Inline(), torch.randn(2, 2)
    expected = model(x).detach()
    options = poptorch.Options()
    options.setExecutionStrategy(poptorch.SerialPhasedExecution(["a", "b"], "c"))
    executor = poptorch.trainingModel(model, options)
    assert torch.equal(executor(x), expected)
    assert executor._executable.plan.partition.ipus == (0, 1, 2)
