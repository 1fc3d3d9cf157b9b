"""The digits' network over 8 replicas, as an elastic run; prints each finished call with its time."""

import os
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "examples" / "mnist_pipeline"))
import torch
from mnist import datasets  # pyright: ignore[reportMissingImports]
from model import Network  # pyright: ignore[reportMissingImports]

import popdist.poptorch
import poptorch

EVERY = 20


def training(opts: poptorch.Options) -> tuple[poptorch.DataLoader, poptorch.PoplarExecutor]:
    """A loader of 800 images a call, and an executor that makes two updates of them."""
    torch.manual_seed(0)
    opts.randomSeed(0).deviceIterations(2).showCompilationProgressBar(False)
    opts.Training.gradientAccumulation(10)
    digits, _ = datasets()
    loader = poptorch.DataLoader(opts, digits, batch_size=5, shuffle=True)
    model = Network()
    return loader, poptorch.trainingModel(model, opts, poptorch.optim.AdamW(model.parameters(), lr=1e-3))


def main() -> None:
    popdist.init()
    loader, trainer = training(popdist.poptorch.Options())
    checkpoint = popdist.Checkpoint.every(EVERY)
    for batch in popdist.resumable(loader, checkpoint, trainer, epochs=1000):
        trainer(*batch)
        if popdist.getInstanceIndex() == 0:
            os.write(1, f"call {checkpoint.calls} {os.getpid()} {time.time()}\n".encode())


if __name__ == "__main__":
    main()
