"""Who trains the digits' network: Lightning's Trainer on ipus and on the CPU, and a loop of our own without Lightning.

All read the same rows through a loader, and make the same weight updates. A unit of work is an epoch.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from queue import SimpleQueue

sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("", "mnist_pipeline"))
import lightning.pytorch as pl
import torch
from digits import TASK  # pyright: ignore[reportMissingImports]
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from ways import Unit  # pyright: ignore[reportMissingImports]

import poptorch


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = TASK.model()

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return self.network(*batch)[1]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return TASK.optimizer(self.parameters())


def dataset(calls: int) -> TensorDataset:
    return TensorDataset(*TASK.data(calls * TASK.unit_rows, torch.Generator().manual_seed(1)))


def trainer(accelerator: str, replicas: int, **more) -> pl.Trainer:
    """A Trainer that makes the task's updates, and neither logs nor saves."""
    if accelerator == "ipu":
        from lightning.pytorch.strategies import IPUStrategy  # pyright: ignore[reportAttributeAccessIssue]

        more["strategy"] = IPUStrategy(device_iterations=TASK.updates)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    return pl.Trainer(
        accelerator=accelerator,
        devices=replicas,
        accumulate_grad_batches=TASK.micro_batches // replicas,
        enable_progress_bar=False,
        **quiet,
        **more,
    )


class Turns(pl.Callback):
    """Lets a fit do one epoch for each `go`, and says the loss of its last micro-batch when it is done."""

    def __init__(self) -> None:
        self.go: SimpleQueue[None] = SimpleQueue()
        self.done: SimpleQueue[float | BaseException] = SimpleQueue()
        self.loss = torch.zeros(())

    def on_train_epoch_start(self, *_) -> None:
        self.go.get()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        # Lightning divides the loss by the accumulation that it does itself; on ipus it does none.
        self.loss = outputs["loss"] * trainer.accumulate_grad_batches

    def on_train_epoch_end(self, *_) -> None:
        self.done.put(self.loss.flatten()[-1].item())


def lightning(rank: int, accelerator: str, calls: int, replicas: int = 1, threads: int = 2) -> Unit:
    """A fit without an end, in a thread of its own, which waits between two units."""
    turns = Turns()

    def fit() -> None:
        torch.set_num_threads(threads)  # counts for the thread that says it
        try:
            run = trainer(accelerator, replicas, max_epochs=-1, callbacks=[turns])
            run.fit(Digits(), DataLoader(dataset(calls), TASK.rows))
        except BaseException as error:
            turns.done.put(error)

    threading.Thread(target=fit, daemon=True).start()

    def unit() -> float:
        turns.go.put(None)
        answer = turns.done.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return unit


def loop(rank: int, calls: int, replicas: int = 1) -> Unit:
    """Our executor, called for each batch of our loader."""
    torch.set_num_threads(2)
    model = TASK.model()
    options = poptorch.Options().deviceIterations(TASK.updates).replicationFactor(replicas)
    options.Training.gradientAccumulation(TASK.micro_batches // replicas)
    training_model = poptorch.trainingModel(model, options, TASK.optimizer(model.parameters()))
    loader = poptorch.DataLoader(options, dataset(calls), TASK.rows)

    def unit() -> float:
        losses = torch.zeros(1)
        for images, labels in loader:
            losses = training_model(images, labels)[1]
        return losses.flatten()[-1].item()

    return unit
