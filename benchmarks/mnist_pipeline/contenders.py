"""Five ways to make the same weight updates: the MNIST example's network on the same micro-batches.

Each `setup` runs in a process of its own (see `harness.py`), builds the network from the same seed and
returns a unit of work: some weight updates of `ACCUMULATION` micro-batches of `BATCH` images with AdamW.
A unit returns the loss of its last micro-batch: since all start alike, all should return the same.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "mnist_pipeline"))
from model import Network  # pyright: ignore[reportMissingImports]

BATCH, ACCUMULATION = 40, 10
LEARNING_RATE = 0.001


def network() -> Network:
    torch.manual_seed(0)
    return Network().train()


def digits(updates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise of the digits' shape: a fixed batch for one unit, so that no contender waits for a loader."""
    random = torch.Generator().manual_seed(1)
    images = torch.randn(updates * ACCUMULATION * BATCH, 1, 28, 28, generator=random)
    return images, torch.randint(0, 10, (len(images),), generator=random)


def batches(updates: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The batch of each weight update."""
    return list(zip(*(part.split(ACCUMULATION * BATCH) for part in digits(updates)), strict=True))


def poptorch_setup(rank: int, updates: int, ipus: int):
    """Ours: four blocks on `ipus` ipus; with two, the first block is alone on ipu 0 as it costs most."""
    import poptorch

    placement = {4: [["B1"], ["B2"], ["B3"], ["B4"]], 2: [["B1"], ["B2", "B3", "B4"]]}[ipus]
    model = network()
    for number in range(1, 5):
        poptorch.BeginBlock(model.get_submodule(f"block{number}"), f"B{number}")
    opts = poptorch.Options().deviceIterations(updates)
    opts.Training.gradientAccumulation(ACCUMULATION)
    stages = [poptorch.Stage(*blocks).ipu(ipu) for ipu, blocks in enumerate(placement)]
    opts.setExecutionStrategy(poptorch.PipelinedExecution(*stages))
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    training_model = poptorch.trainingModel(model, opts, optimizer)
    images, labels = digits(updates)

    def unit() -> float:
        _, loss = training_model(images, labels)  # of the last micro-batch: OutputMode.Final
        return loss.item()

    return unit


def plain_setup(rank: int, updates: int, threads: int):
    """Plain PyTorch: forward and backward of one micro-batch after another."""
    torch.set_num_threads(threads)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    work = batches(updates)

    def unit() -> float:
        loss = torch.zeros(())
        for images, labels in work:
            optimizer.zero_grad()
            for micro_batch in zip(images.split(BATCH), labels.split(BATCH), strict=True):
                _, loss = model(*micro_batch)
                loss.backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= ACCUMULATION
            optimizer.step()
        return loss.item()

    return unit


def distributed_setup(rank: int, updates: int, port: int):
    """torch.distributed.pipelining: two gloo processes, one-forward-one-backward, cut as ours on two ipus."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = network()
    first, second = model.block1, nn.Sequential(model.block2, model.block3, model.block4)
    part = first if rank == 0 else second
    stage = PipelineStage(part, stage_index=rank, num_stages=2, device=torch.device("cpu"))
    # The schedule divides the summed gradients by the number of micro-batches itself (scale_grads).
    schedule = Schedule1F1B(stage, n_microbatches=ACCUMULATION, loss_fn=model.loss)
    optimizer = torch.optim.AdamW(part.parameters(), lr=LEARNING_RATE)
    work = batches(updates)

    def unit() -> float:
        losses: list[torch.Tensor] = []
        for images, labels in work:
            optimizer.zero_grad()
            losses.clear()
            if rank == 0:
                schedule.step(images, return_outputs=False)
            else:
                schedule.step(target=labels, losses=losses, return_outputs=False)
            optimizer.step()
        return losses[-1].item() if losses else 0.0

    return unit
