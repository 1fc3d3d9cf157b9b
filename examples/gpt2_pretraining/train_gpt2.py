"""Train GPT-2 to say the next word, on a pipeline of ipus.

python3 train_gpt2.py --model nano --precision 32.32 --loss-scaling 1 --gradient-accumulation 9
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import arguments
import model as models
import text
from common import execution, optimization, training
from common.logs import say


def main(argv: Sequence[str] | None = None) -> Training:
    """Returns: the training, with `losses`, the mean of each call; `held_out`, nats a word; `notes` of the text."""
    return training.train(Training, arguments.parse_arguments(argv))


class Training(training.Training):
    """Of GPT-2: a line every so many calls, and text that it made up at the end."""

    PROJECT = "gpt2-pretraining"

    def __init__(self, flags: Any, shows: bool) -> None:
        self.losses: list[float] = []
        self.held_out: float | None = None
        super().__init__(flags, shows)

    def load_data(self) -> Any:
        flags, call = self.flags, self.layout.call
        if flags.dataset == "generated" or flags.synthetic_data:
            data, self.rest, self.notes = text.generated(flags, 4 * call), None, {}
        else:
            data, self.rest, self.notes = text.training_and_held_out(flags)
        self.calls_an_epoch = len(data) // call
        self.steps = min(flags.training_steps, flags.epochs * self.calls_an_epoch)
        return data

    def make_model(self, path: Path | None) -> models.GPT2:
        return models.make_model(self.flags, path).parallelize(self.flags)

    def placement(self) -> list[str]:
        return models.device_allocation(self.flags)

    def rate(self, step: int) -> float:
        flags = self.flags
        steps = flags.lr_decay_steps or self.steps
        warmup = int(flags.lr_warmup * steps) if flags.lr_warmup_steps is None else flags.lr_warmup_steps
        return flags.learning_rate * optimization.share_of_rate(flags.lr_schedule, warmup, steps, step)

    def add(self, step: int, rate: float, outputs: Any, seconds: float, waited: float) -> dict[str, float]:
        flags, (loss, right) = self.flags, self.averages(outputs)
        self.losses.append(loss)
        if step % flags.log_steps == 0 or step + 1 == self.steps:
            rows = self.layout.call / seconds
            say(
                f"step {step} of epoch {step // self.calls_an_epoch}, loss: {loss:.4f}, acc: {right:.4f}, "
                f"lr: {rate:.2e}, throughput: {rows:.1f} samples/sec, {rows * flags.max_len:.0f} tokens/s, "
                f"perplexity {text.perplexity(loss):.1f}"
            )
        return {"loss": loss, "acc": right}

    def names(self, done: int) -> Iterator[str]:
        flags = self.flags
        if done == self.start:
            return
        if flags.save_per_steps and done % flags.save_per_steps == 0:
            yield f"step_{done}"
        if done % (flags.save_per_epochs * self.calls_an_epoch) == 0 or done == self.steps:
            yield f"epoch_{(done - 1) // self.calls_an_epoch}"

    def measure_held_out(self) -> None:
        """And let the model make text up."""
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
