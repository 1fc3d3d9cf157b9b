"""The training of a model on a pipeline of ipus, from its flags to its last checkpoint: what BERT and GPT-2 share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import popdist
import poptorch
from popdist import collectives

from . import checkpoints, estimates, execution, logs, optimization
from .logs import say
from .sampling import GlobalBatches
from .tracking import Tracking


class Training:
    """A model, its data and its executor, from `start` on. A program says what follows here:"""

    PROJECT: str  # its name for Weights & Biases
    LOSS = "loss"  # what `add` calls it
    steps: int  # calls in all; known when the data is

    def load_data(self) -> Any:
        """The rows to train on; sets `steps`."""
        raise NotImplementedError

    def make_model(self, path: Path | None) -> Any:
        """On its ipus. Args: path: a checkpoint to take the weights from"""
        raise NotImplementedError

    def placement(self) -> list[str]:
        """A line for each block."""
        raise NotImplementedError

    def rate(self, step: int) -> float:
        """The learning rate of a call."""
        raise NotImplementedError

    def corrects_bias(self) -> bool:
        """Whether the first moments are corrected for their start at 0."""
        return True

    def add(self, step: int, rate: float, outputs: Any, seconds: float, waited: float) -> dict[str, float]:
        """Keep and say the numbers of a call. Args: seconds: of its computation, the mean of all instances"""
        raise NotImplementedError

    def names(self, done: int) -> Iterator[str]:
        """The checkpoints that are due after so many calls; 0: before the first."""
        raise NotImplementedError

    def measure_held_out(self) -> None:
        """Say what the trained model makes of rows that it has not seen."""

    # ---- from the flags to the executor --------------------------------------------------------------------

    def __init__(self, flags: Any, shows: bool) -> None:
        self.flags, self.shows = flags, shows
        self.numbers: dict[str, float] = {}  # of the last call
        self.tracking = Tracking(flags, self.PROJECT, shows)
        self.opts = execution.training_options(flags)
        self.layout = execution.layout(self.opts, flags)
        path = checkpoints.newest(flags.checkpoint_input_dir) if flags.checkpoint_input_dir else None
        self.state = checkpoints.read_state(path) if path and flags.resume_training_from_checkpoint else None
        self.start = self.state["step"] if self.state else 0
        with logs.phase("Data Loading Started", "Data loaded in {} secs"):
            self.data = self.load_data()
            self._check_data()
            began = time.perf_counter()
            self.loader = self._loader()
            forwarding = time.perf_counter() - began  # it begins at that step by itself
        self.model = self.make_model(path).train()
        logs.heading("Device Allocation")
        for line in self.placement():
            say(line)
        logs.dashes()
        if self.start:
            say(f"---- Forwarding Data Loader until Checkpoint Step {self.start} ----")
            say(f"Data loader forwarded in {forwarding} secs")
            logs.dashes()
        self._announce()
        self._compile()

    def _check_data(self) -> None:
        if len(self.data) < self.layout.call:
            sizes = ("micro_batch_size", "gradient_accumulation", "device_iterations", "replication_factor")
            raise SystemExit(
                f"{len(self.data)} samples don't fill one call of {self.layout.call}: {self.flags.named(*sizes)}"
                "\n  fix: lower one of these, or give more --input-files"
            )
        if self.start >= self.steps:
            raise SystemExit(
                f"the checkpoint has made {self.start} of {self.steps} steps already: "
                + self.flags.named("training_steps")
            )

    def _loader(self) -> poptorch.DataLoader:
        """Calls `start` to the last, in one epoch of the loader."""
        flags, modes = self.flags, poptorch.DataLoaderMode
        return poptorch.DataLoader(
            self.opts,
            self.data,
            batch_size=flags.micro_batch_size,
            sampler=GlobalBatches(len(self.data), self.layout, self.start, self.steps, flags.random_seed),
            num_workers=flags.dataloader_workers,
            auto_distributed_partitioning=False,  # the sampler gives each instance its share
            mode=modes.AsyncRebatched if flags.async_dataloader else modes.Sync,
        )

    def _announce(self) -> None:
        """What a step needs, before anything is compiled."""
        rows = torch.utils.data.default_collate([self.data[i] for i in range(self.flags.micro_batch_size)])
        cost, half = estimates.measured(self.model, tuple(rows)), self.flags.precision == "16.16"
        if half:
            self.model.half()
        state = 6 if self.flags.enable_half_first_order_momentum else 8
        stages = self.flags.stages
        estimates.announce(self.model, cost, self.layout, stages, state, gradient_bytes=2 if half else 4)

    def _compile(self) -> None:
        collectives.broadcast(dict(self.model.named_parameters()))
        self.optimizer = optimization.make_optimizer(self.model, self.flags, self.corrects_bias())
        optimization.set_rate(self.optimizer, self.rate(self.start))
        self.executor = poptorch.trainingModel(self.model, self.opts, self.optimizer)
        rows = self.layout.call * self.layout.local // self.layout.replicas
        with logs.phase("Compilation/Loading from Cache Started", "Compiled/Loaded model in {} secs"):
            self.executor.compile(*(_blank(field, rows) for field in self.data[0]))  # no data is used up
        if self.state is not None:
            self.optimizer.load_state_dict(self.state["optimizer_state_dict"])
            self.executor.rng_state = self.state["executor_random_state"]
            torch.set_rng_state(self.state["torch_random_state"])

    # ---- calls and checkpoints -----------------------------------------------------------------------------

    def run(self) -> None:
        """All calls that are left, with their lines and checkpoints."""
        self._save(self.start)
        logs.heading("Training Started")
        asked = time.perf_counter()
        for step, batch in enumerate(self.loader, start=self.start):
            waited = time.perf_counter() - asked
            self._call(step, batch, waited)
            asked = time.perf_counter()
        if self.flags.async_dataloader:
            self.loader.terminate()

    def _call(self, step: int, batch: Any, waited: float) -> None:
        rate = optimization.set_rate(self.optimizer, self.rate(step))
        self.executor.setOptimizer(self.optimizer)
        began = time.perf_counter()
        outputs = self.executor(*batch)
        seconds = collectives.all_reduce(time.perf_counter() - began, "mean")
        self.numbers = self.add(step, rate, outputs, seconds, waited)
        self.tracking.step(step, {"LR": rate, **self.numbers}, self.model)
        if not self.flags.synthetic_data:  # what is computed from made-up values has no meaning
            optimization.stop_at_nan(self.optimizer, step, self.numbers[self.LOSS])
        self._save(step + 1)

    def averages(self, outputs: Any) -> list[float]:
        """Means over micro-batches, replicas and instances, of outputs that are sums over a replica's micro-batches."""
        micro_batches = self.layout.accumulation * self.layout.iterations
        own = (float(value.float().mean()) / micro_batches for value in outputs)
        return [collectives.all_reduce(value, "mean") for value in own]

    def _save(self, step: int) -> None:
        """All instances call this, and the first one writes."""
        for name in self.names(step) if self.flags.checkpoint_output_dir else ():
            optimizer = self.optimizer.state_dict()
            self.executor.copyWeightsToHost()
            if not self.shows:
                continue
            state = {
                "step": step,
                "optimizer_state_dict": optimizer,
                "metrics": self.numbers,
                "config": {key: value for key, value in vars(self.flags).items() if key != "sources"},
                "executor_random_state": list(self.executor.rng_state),
                "torch_random_state": torch.get_rng_state(),
                "data_seed": self.flags.random_seed,
                "loss_scaling": self.flags.loss_scaling,
            }
            checkpoints.save(self.flags.checkpoint_output_dir, name, self.model, state)


def train(kind: type[Training], flags: Any) -> Any:
    """Run a program's training, alone or as one of poprun's instances. Returns the training."""
    if popdist.isPopdistEnvSet():
        popdist.init()
    first = popdist.getInstanceIndex() == 0
    logs.start(shows=first)
    if flags.checkpoint_output_dir and first:
        checkpoints.check_unused(flags.checkpoint_output_dir)
    np.random.seed(flags.random_seed)
    torch.manual_seed(flags.random_seed)  # the first weights
    training = kind(flags, shows=first)
    if flags.compile_only:
        say("The model is compiled; --compile-only was given, so nothing is trained")
    else:
        training.run()
    training.executor.destroy()
    if first and not flags.compile_only:
        training.measure_held_out()
    return training


def _blank(field: Tensor, rows: int) -> Tensor:
    """A batch to compile with. It takes no memory: numpy's zeros are pages that are there when somebody writes."""
    return torch.from_numpy(np.zeros((rows, *field.shape), np.int64))
