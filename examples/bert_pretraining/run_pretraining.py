"""Pretrain BERT: masked words and next sentences, on a pipeline of ipus.

python3 run_pretraining.py --dataset generated --config pretrain_base_128_pod4 --training-steps 1
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import arguments
import datasets
import model as models
from common import execution, logs, optimization, training
from common.logs import say
from metrics import Tracker, step_line
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm


def main(argv: Sequence[str] | None = None) -> Tracker:
    """Returns: the numbers of each step."""
    return training.train(Pretraining, arguments.parse_arguments(argv)).tracker


class Pretraining(training.Training):
    """Of BERT: a line a step, or a bar, and a summary of all."""

    PROJECT, LOSS = "bert-pretraining", "total loss"

    def __init__(self, flags: Any, shows: bool) -> None:
        say(f"Using config: {flags.config}")
        if flags.packed_data:
            say(
                f"Packed data: {flags.gradient_accumulation} micro-batches of a weight update, {flags.unpacked} before"
            )
        if flags.custom_ops:
            logs.logger.debug("--custom-ops: nothing is loaded, since nothing is needed here")
        self.steps = flags.training_steps
        super().__init__(flags, shows)
        self.tracker = Tracker(flags, self.layout)

    def load_data(self) -> Any:
        return datasets.training_set(self.flags, self.layout)

    def make_model(self, path: Path | None) -> models.Bert:
        return models.make_model(self.flags, path).parallelize(self.flags)

    def placement(self) -> list[str]:
        return models.device_allocation(self.flags)

    def rate(self, step: int) -> float:
        flags = self.flags
        warmup = int(flags.lr_warmup * self.steps)
        return flags.learning_rate * optimization.share_of_rate(flags.lr_schedule, warmup, self.steps, step)

    def corrects_bias(self) -> bool:
        return self.flags.optimizer == "LAMB"

    def run(self) -> None:
        began, quiet = time.perf_counter(), self.flags.disable_progress_bar or not self.shows
        self.bar = tqdm(total=self.steps, initial=self.start, disable=quiet, file=sys.stderr)
        redirected = contextlib.nullcontext() if quiet else logging_redirect_tqdm(loggers=[logs.logger])
        with self.bar, redirected:
            super().run()
        self.tracker.summary(time.perf_counter() - began)

    def add(self, step: int, rate: float, outputs: Any, seconds: float, waited: float) -> dict[str, float]:
        numbers = self.tracker.add(step, rate, self.averages(outputs), seconds, waited)
        description, postfix = step_line(self.flags, step, rate, numbers)
        if self.bar.disable:
            say(f"{description} {postfix}")
        else:
            self.bar.set_description_str(description, refresh=False)
            self.bar.set_postfix_str(postfix)
            self.bar.update()
        return numbers

    def names(self, done: int) -> Iterator[str]:
        every = self.flags.checkpoint_steps
        if done in (self.start, self.steps) or (every and done % every == 0):
            yield f"step_{done}"

    def measure_held_out(self) -> None:
        rows = datasets.held_out_set(self.flags)
        if rows is None:
            return
        losses = execution.held_out_losses(self.model, rows, self.flags, output=1)
        self.tracker.held_out = float(losses.mean())
        say(f"Held-out masked words: {self.tracker.held_out:.3f} nats" + datasets.what_is_known(self.flags))


if __name__ == "__main__":
    main()
