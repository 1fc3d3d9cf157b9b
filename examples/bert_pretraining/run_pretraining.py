"""Pretrain BERT: masked words and next sentences, on a pipeline of ipus.

python3 run_pretraining.py --dataset generated --config pretrain_base_128_pod4 --training-steps 1
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import arguments
import datasets
import model as models
import numpy as np
import torch
from common import checkpoints, estimates, execution, logs, optimization
from common.logs import say
from common.tracking import Tracking
from metrics import Tracker, averages, step_line
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

import popdist
import poptorch
from popdist import collectives


def main(argv: Sequence[str] | None = None) -> Tracker:
    """Returns: the numbers of each step."""
    flags = arguments.parse_arguments(argv)
    if popdist.isPopdistEnvSet():
        popdist.init()
    first = popdist.getInstanceIndex() == 0
    logs.start(shows=first)
    say(f"Using config: {flags.config}")
    if flags.packed_data:
        say(
            f"Packed data: {flags.gradient_accumulation} micro-batches of a weight update, {flags.unpacked} before"
        )
    if flags.checkpoint_output_dir and first:
        checkpoints.check_unused(flags.checkpoint_output_dir)
    if flags.custom_ops:
        logs.logger.debug("--custom-ops: nothing is loaded, since nothing is needed here")
    np.random.seed(flags.random_seed)
    torch.manual_seed(flags.random_seed)  # the first weights
    training = Training(flags, shows=first)
    if flags.compile_only:
        say("The model is compiled; --compile-only was given, so nothing is trained")
    else:
        training.run()
    training.executor.destroy()
    training.measure_held_out()
    return training.tracker


class Training:
    """A model, its data and its executor, from `start` on."""

    def __init__(self, flags: Any, shows: bool) -> None:
        self.flags, self.shows, self.start = flags, shows, 0
        self.tracking = Tracking(flags, "bert-pretraining", shows)
        self.opts = execution.training_options(flags)
        self.layout = execution.layout(self.opts, flags)
        self.state = self._read_checkpoint()
        with logs.phase("Data Loading Started", "Data loaded in {} secs"):
            self.data = datasets.training_set(flags, self.layout)
            began = time.perf_counter()
            self.loader = datasets.loader(flags, self.opts, self.data, self.layout, self.start)
            forwarding = time.perf_counter() - began  # it begins at that step by itself
        self.model = self._make_model()
        logs.heading("Device Allocation")
        for line in models.device_allocation(flags):
            say(line)
        logs.dashes()
        if self.start:
            say(f"---- Forwarding Data Loader until Checkpoint Step {self.start} ----")
            say(f"Data loader forwarded in {forwarding} secs")
            logs.dashes()
        self.tracker = Tracker(flags, self.layout, self.start)
        self._announce()
        self._compile()

    def _read_checkpoint(self) -> dict[str, Any] | None:
        """The state to go on from, or None for a new training."""
        if not self.flags.resume_training_from_checkpoint:
            return None
        state = checkpoints.read_state(checkpoints.newest(self.flags.checkpoint_input_dir))
        self.start = state["step"]
        if self.start >= self.flags.training_steps:
            raise SystemExit(
                f"the checkpoint has made {self.start} steps already: " + self.flags.named("training_steps")
            )
        return state

    def _make_model(self) -> models.Bert:
        flags = self.flags
        path = checkpoints.newest(flags.checkpoint_input_dir) if flags.checkpoint_input_dir else None
        return models.make_model(flags, path).parallelize(flags).train()

    def _announce(self) -> None:
        """What a step needs, before anything is compiled."""
        rows = torch.utils.data.default_collate([self.data[i] for i in range(self.flags.micro_batch_size)])
        cost = estimates.measured(self.model, tuple(rows))
        half = self.flags.precision == "16.16"
        first_moment = 2 if self.flags.enable_half_first_order_momentum else 4
        if half:
            self.model.half()
        estimates.announce(
            self.model,
            cost,
            self.layout,
            self.flags.stages,
            state_bytes=first_moment + 4,
            gradient_bytes=2 if half else 4,
        )

    def _compile(self) -> None:
        collectives.broadcast(dict(self.model.named_parameters()))
        self.optimizer = optimization.make_optimizer(
            self.model, self.flags, bias_correction=self.flags.optimizer == "LAMB"
        )
        optimization.set_rate(self.optimizer, self._rate(self.start))
        self.executor = poptorch.trainingModel(self.model, self.opts, self.optimizer)
        rows = self.layout.call * self.layout.local // self.layout.replicas
        shapes = datasets.random_row(self.flags, seed=0).values()  # so that no data is used up
        title, done = "Compilation/Loading from Cache Started", "Compiled/Loaded model in {} secs"
        with logs.phase(title, done):
            self.executor.compile(*(torch.zeros((rows, *field.shape), dtype=field.dtype) for field in shapes))
        if self.state is not None:
            self.optimizer.load_state_dict(self.state["optimizer_state_dict"])
            self.executor.rng_state = self.state["executor_random_state"]
            torch.set_rng_state(self.state["torch_random_state"])

    def run(self) -> None:
        """All steps that are left, with their lines and checkpoints."""
        self._save(self.start)
        logs.heading("Training Started")
        began = time.perf_counter()
        bar = tqdm(
            total=self.flags.training_steps, initial=self.start, disable=self._is_quiet(), file=sys.stderr
        )
        batches = iter(self.loader)
        with (
            bar,
            logging_redirect_tqdm(loggers=[logs.logger]) if not bar.disable else contextlib.nullcontext(),
        ):
            for step in range(self.start, self.flags.training_steps):
                waiting = time.perf_counter()
                batch = next(batches)
                self._step(step, batch, time.perf_counter() - waiting, bar)
        if self.flags.async_dataloader:
            self.loader.terminate()
        self.tracker.summary(time.perf_counter() - began)

    def _rate(self, step: int) -> float:
        flags = self.flags
        warmup = int(flags.lr_warmup * flags.training_steps)
        share = optimization.share_of_rate(flags.lr_schedule, warmup, flags.training_steps, step)
        return flags.learning_rate * share

    def _is_quiet(self) -> bool:
        return self.flags.disable_progress_bar or not self.shows

    def _step(self, step: int, batch: Any, waited: float, bar: tqdm) -> None:
        rate = optimization.set_rate(self.optimizer, self._rate(step))
        self.executor.setOptimizer(self.optimizer)
        began = time.perf_counter()
        outputs = self.executor(*batch)
        seconds = time.perf_counter() - began
        numbers = averages(self.flags, outputs)
        numbers |= self.tracker.add(step, rate, numbers, seconds, waited)
        description, postfix = step_line(self.flags, step, rate, numbers)
        if bar.disable:
            say(f"{description} {postfix}")
        else:
            bar.set_description_str(description, refresh=False)
            bar.set_postfix_str(postfix)
            bar.update()
        self.tracking.step(step, {"LR": rate, **numbers}, self.model)
        if not self.flags.synthetic_data:  # what is computed from made-up values has no meaning
            optimization.stop_at_nan(self.optimizer, step, numbers["total loss"])
        done, every = step + 1, self.flags.checkpoint_steps
        if done == self.flags.training_steps or (every and done % every == 0):
            self._save(done)

    def _save(self, step: int) -> None:
        """All instances call this, and the first one writes."""
        if not self.flags.checkpoint_output_dir:
            return
        optimizer = self.optimizer.state_dict()
        self.executor.copyWeightsToHost()
        if not self.shows:
            return
        config = {key: value for key, value in vars(self.flags).items() if key != "sources"}
        state = {
            "step": step,
            "optimizer_state_dict": optimizer,
            "metrics": self.tracker.latest(),
            "config": config,
            "executor_random_state": list(self.executor.rng_state),
            "torch_random_state": torch.get_rng_state(),
            "data_seed": self.flags.random_seed,
            "loss_scaling": self.flags.loss_scaling,
        }
        checkpoints.save(self.flags.checkpoint_output_dir, f"step_{step}", self.model, state)

    def measure_held_out(self) -> None:
        """Say what the trained model makes of samples that it has not seen."""
        rows = None if self.flags.compile_only else datasets.held_out_set(self.flags)
        if rows is None or not self.shows:
            return
        losses = execution.held_out_losses(self.model, rows, self.flags, output=1)
        self.tracker.held_out = float(losses.mean())
        say(f"Held-out masked words: {self.tracker.held_out:.3f} nats" + datasets.what_is_known(self.flags))


if __name__ == "__main__":
    main()
