"""Contenders whose replica spans several processes of one thread each, and a process that tells its memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import ways  # pyright: ignore[reportMissingImports]
from harness import peak_memory  # pyright: ignore[reportMissingImports]
from task import Task  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn

WIDTH, ROWS, MICRO_BATCHES, CALLS = 2048, 4, 16, 2  # of the stack of equal layers


def options_of(rank: int, port: int, processes: int, ipus: int) -> Any:
    """The options of an instance that has met the others, which run one replica together."""
    from popengine.environment import Launch

    torch.set_num_threads(1)
    launch = Launch(1, 1, ipus, 0, rank, processes, rank)
    os.environ.update(
        launch.variables(), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo"
    )
    import popdist.poptorch

    popdist.init()
    return popdist.poptorch.Options()


def ours(rank: int, task: Task, port: int, placement: ways.Placement) -> ways.Unit:
    """Pando: each process has one stage."""
    import poptorch

    options = options_of(rank, port, len(placement), len(placement))
    options.setExecutionStrategy(poptorch.PipelinedExecution(*ways.stages(placement)))
    training_model, inputs = ways.executor(task, options), task.inputs()

    def unit() -> float:
        return training_model(*inputs)[-1].flatten()[-1].item()

    return unit


def times(rank: int, task: Task, port: int, placement: ways.Placement, folder: str) -> None:
    """Write the profile of the calls of a process that has one stage, which all processes' reports share."""
    import poptorch

    options = options_of(rank, port, len(placement), len(placement)).enableProfiling(folder)
    options.setExecutionStrategy(poptorch.PipelinedExecution(*ways.stages(placement)))
    training_model, inputs = ways.executor(task, options), task.inputs()
    for _ in range(CALLS + 1):
        training_model(*inputs)
    training_model.detachFromDevice()


class Stack(nn.Module):
    """Equal layers, as many on each ipu."""

    def __init__(self, ipus: int, layers: int) -> None:
        import poptorch

        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
        for ipu in range(ipus):
            poptorch.BeginBlock(self.layers[ipu * layers // ipus], ipu_id=ipu)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return nn.functional.mse_loss(x, target)


def gpt2() -> nn.Module:
    """GPT-2 small on four ipus: the embeddings, which the head shares, and one layer; then four, four and three layers.
    With their optimizer state, the embeddings are as large as five and a half layers."""
    from tasks import GPT2  # pyright: ignore[reportMissingImports]

    import poptorch

    model = GPT2()
    parts = model.model.transformer
    for ipu, part in enumerate([parts.wte, *parts.h[1::4]]):
        poptorch.BeginBlock(part, ipu_id=ipu)
    return model


def memory(rank: int, port: int, processes: int, layers: int, on_meta: bool) -> tuple[int, int, float]:
    """Bytes at the peak over those at the start, bytes of the optimizer's state here, and the loss, of a process that
    trains its part of a stack of `layers` layers (0: of GPT-2 small) with AdamW."""
    import torch._dynamo  # what a compilation loads
    from tasks import words  # pyright: ignore[reportMissingImports]

    import poptorch

    options = options_of(rank, port, processes, 4).showCompilationProgressBar(False)
    options.Training.gradientAccumulation(MICRO_BATCHES if layers else 8)
    torch.manual_seed(0)
    inputs = [torch.randn(MICRO_BATCHES * ROWS, WIDTH) for _ in range(2)]
    inputs = inputs if layers else words(2 * 8, torch.Generator().manual_seed(1))
    start = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    with torch.device("meta" if on_meta else "cpu"):
        model = Stack(4, layers) if layers else gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    trainer = poptorch.trainingModel(poptorch.materialize(model), options, optimizer)
    results = [trainer(*inputs) for _ in range(CALLS)]
    losses = [(result if layers else result[-1]).item() for result in results]
    states = (value for state in optimizer.state.values() for value in state.values())
    return peak_memory() - start, sum(value.nbytes for value in states), losses[-1]
