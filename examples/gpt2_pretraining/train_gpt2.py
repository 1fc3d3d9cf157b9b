"""Train GPT-2 to say the next word, on a pipeline of ipus.

python3 train_gpt2.py --model nano --precision 32.32 --loss-scaling 1 --gradient-accumulation 9
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import arguments
import model as models
import text
import torch
from common import checkpoints, estimates, execution, logs, optimization
from common.logs import say
from common.sampling import GlobalBatches
from common.tracking import Tracking

import popdist
import poptorch
from popdist import collectives


def main(argv: Sequence[str] | None = None) -> SimpleNamespace:
    """Returns: `losses`, the mean of each call; `held_out`, nats a word; `notes` of the text."""
    flags = arguments.parse_arguments(argv)
    if popdist.isPopdistEnvSet():
        popdist.init()
    first = popdist.getInstanceIndex() == 0
    logs.start(shows=first)
    if flags.checkpoint_output_dir and first:
        checkpoints.check_unused(flags.checkpoint_output_dir)
    torch.manual_seed(flags.random_seed)  # the first weights
    training = Training(flags, shows=first)
    if flags.compile_only:
        say("The model is compiled; --compile-only was given, so nothing is trained")
    else:
        training.run()
    training.executor.destroy()
    if not flags.compile_only and first:
        training.show()
    return SimpleNamespace(losses=training.losses, held_out=training.held_out, notes=training.notes)


class Training:
    """A model, its data and its executor, from step `start` on."""

    def __init__(self, flags: Any, shows: bool) -> None:
        self.flags, self.shows, self.start = flags, shows, 0
        self.tracking = Tracking(flags, "gpt2-pretraining", shows)
        self.losses: list[float] = []
        self.held_out: float | None = None
        self.opts = execution.training_options(flags)
        self.layout = execution.layout(self.opts, flags)
        path = checkpoints.newest(flags.checkpoint_input_dir) if flags.checkpoint_input_dir else None
        self.state = checkpoints.read_state(path) if path and flags.resume_training_from_checkpoint else None
        self.start = self.state["step"] if self.state else 0
        self._load_data()
        self.model = models.make_model(flags, path).parallelize(flags).train()
        for line in models.device_allocation(flags):
            say(line)
        self._announce()
        self._compile()

    def _load_data(self) -> None:
        flags, layout = self.flags, self.layout
        if flags.dataset == "generated" or flags.synthetic_data:
            self.data, self.rest, self.notes = text.generated(flags, 4 * layout.call), None, {}
        else:
            self.data, self.rest, self.notes = text.training_and_held_out(flags)
        self.calls_an_epoch = len(self.data) // layout.call
        if self.calls_an_epoch == 0:
            raise SystemExit(
                f"{len(self.data)} rows don't fill one call of {layout.call}: "
                + flags.named("micro_batch_size", "gradient_accumulation", "device_iterations")
            )
        self.steps = min(flags.training_steps, flags.epochs * self.calls_an_epoch)
        if self.start >= self.steps:
            raise SystemExit(
                f"the checkpoint has made {self.start} of {self.steps} steps: " + flags.named("epochs")
            )
        mode = (
            poptorch.DataLoaderMode.AsyncRebatched if flags.async_dataloader else poptorch.DataLoaderMode.Sync
        )
        self.loader = poptorch.DataLoader(
            self.opts,
            self.data,
            batch_size=flags.micro_batch_size,
            sampler=GlobalBatches(len(self.data), layout, self.start, self.steps, flags.random_seed),
            num_workers=flags.dataloader_workers,
            auto_distributed_partitioning=False,  # the sampler gives each instance its share
            mode=mode,
        )

    def _announce(self) -> None:
        """What a step needs, before anything is compiled."""
        rows = torch.utils.data.default_collate([self.data[i] for i in range(self.flags.micro_batch_size)])
        cost, half = estimates.measured(self.model, tuple(rows)), self.flags.precision == "16.16"
        if half:
            self.model.half()
        state = 6 if self.flags.enable_half_first_order_momentum else 8
        estimates.announce(
            self.model, cost, self.layout, self.flags.stages, state, gradient_bytes=2 if half else 4
        )

    def _compile(self) -> None:
        collectives.broadcast(dict(self.model.named_parameters()))
        self.optimizer = optimization.make_optimizer(self.model, self.flags, bias_correction=True)
        optimization.set_rate(self.optimizer, self._rate(self.start))
        self.executor = poptorch.trainingModel(self.model, self.opts, self.optimizer)
        rows = self.layout.call * self.layout.local // self.layout.replicas
        words = torch.zeros(rows, self.flags.max_len, dtype=torch.int64)
        with logs.phase("Compilation/Loading from Cache Started", "Compiled/Loaded model in {} secs"):
            self.executor.compile(words, words)
        if self.state is not None:
            self.optimizer.load_state_dict(self.state["optimizer_state_dict"])
            self.executor.rng_state = self.state["executor_random_state"]
            torch.set_rng_state(self.state["torch_random_state"])

    def run(self) -> None:
        for step, batch in enumerate(self.loader, start=self.start):
            self._step(step, batch)
        if self.flags.async_dataloader:
            self.loader.terminate()

    def _rate(self, step: int) -> float:
        flags = self.flags
        steps = flags.lr_decay_steps or self.steps
        warmup = int(flags.lr_warmup * steps) if flags.lr_warmup_steps is None else flags.lr_warmup_steps
        return flags.learning_rate * optimization.share_of_rate(flags.lr_schedule, warmup, steps, step)

    def _step(self, step: int, batch: Any) -> None:
        flags = self.flags
        rate = optimization.set_rate(self.optimizer, self._rate(step))
        self.executor.setOptimizer(self.optimizer)
        began = time.perf_counter()
        outputs = self.executor(*batch)
        seconds = collectives.all_reduce(time.perf_counter() - began, "mean")
        micro_batches = flags.gradient_accumulation * flags.device_iterations
        loss, right = (
            collectives.all_reduce(float(o.float().mean()) / micro_batches, "mean") for o in outputs
        )
        self.losses.append(loss)
        epoch, done = step // self.calls_an_epoch, step + 1
        if step % flags.log_steps == 0 or done == self.steps:
            rows = self.layout.call / seconds
            say(
                f"step {step} of epoch {epoch}, loss: {loss:.4f}, acc: {right:.4f}, lr: {rate:.2e}, throughput: "
                f"{rows:.1f} samples/sec, {rows * flags.max_len:.0f} tokens/s, perplexity {text.perplexity(loss):.1f}"
            )
        self.tracking.step(step, {"loss": loss, "acc": right, "lr": rate}, self.model)
        if not flags.synthetic_data:  # what is computed from made-up values has no meaning
            optimization.stop_at_nan(self.optimizer, step, loss)
        if flags.save_per_steps and done % flags.save_per_steps == 0:
            self._save(f"step_{done}", done)
        if done % (flags.save_per_epochs * self.calls_an_epoch) == 0 or done == self.steps:
            self._save(f"epoch_{epoch}", done)

    def _save(self, name: str, step: int) -> None:
        """All instances call this, and the first one writes."""
        if not self.flags.checkpoint_output_dir:
            return
        optimizer = self.optimizer.state_dict()
        self.executor.copyWeightsToHost()
        if not self.shows:
            return
        state = {
            "step": step,
            "optimizer_state_dict": optimizer,
            "config": {key: value for key, value in vars(self.flags).items() if key != "sources"},
            "executor_random_state": list(self.executor.rng_state),
            "torch_random_state": torch.get_rng_state(),
        }
        checkpoints.save(self.flags.checkpoint_output_dir, name, self.model, state)

    def show(self) -> None:
        """Measure with held-out text, and let the model make some up."""
        if self.rest is None:
            return
        flags = self.flags
        self.held_out = float(execution.held_out_losses(self.model, self.rest, flags, output=0).mean())
        say(
            f"Held-out text: {self.held_out:.3f} nats a word, perplexity {text.perplexity(self.held_out):.1f} "
            f"({self.notes['unigram']:.3f} without the words before, {self.notes['bigram']:.3f} with one of them)"
        )
        if flags.sample_words:
            tokenizer = text.tokenizer_of(flags)
            words = models.made_up(self.model.float(), [0], flags.sample_words, flags.random_seed)
            say(f"Made up: {tokenizer.decode(words[1:])}")


if __name__ == "__main__":
    main()
