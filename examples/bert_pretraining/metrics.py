"""The numbers of a step: what they are the mean of, how they are printed, and what is kept of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common import logs
from common.logs import say
from common.sampling import Layout

NAMES = ("total loss", "mlm_loss", "nsp_loss", "mlm_acc", "nsp_acc")


def step_line(flags: Any, step: int, rate: float, numbers: dict[str, float]) -> tuple[str, str]:
    """The bar's description and what follows it. Accuracies are fractions in spite of the sign: parsers want that."""
    description = (
        f"Step: {step} / {flags.training_steps - 1} - LR: {rate:.2e} - total loss: {numbers['total loss']:.3f} - "
        f"mlm_loss: {numbers['mlm_loss']:.3f} - nsp_loss: {numbers['nsp_loss']:.3f} - "
        f"mlm_acc: {numbers['mlm_acc']:.3f} % - nsp_acc: {numbers['nsp_acc']:.3f} %"
    )
    return description, f"throughput: {numbers['throughput']:.1f} samples/sec"


@dataclass
class Tracker:
    """The numbers of all steps of this run."""

    flags: Any
    layout: Layout
    steps: list[dict[str, float]] = field(default_factory=list)
    held_out: float | None = None

    def add(
        self, step: int, rate: float, means: Sequence[float], seconds: float, waited: float
    ) -> dict[str, float]:
        """Keep a step's numbers, and return them.

        Args: means: of NAMES; packed data has the number of sequences in a row, too
        """
        names = (*NAMES, "sequences") if len(means) > len(NAMES) else NAMES
        numbers = dict(zip(names, means, strict=True))
        rows = self.layout.call * numbers.get("sequences", 1.0)
        numbers |= {"throughput": rows / seconds, "seconds": seconds, "waited": waited}
        self.steps.append({"step": step, "LR": rate, **numbers})
        return numbers

    def summary(self, seconds: float) -> None:
        computed, waited = (sum(step[name] for step in self.steps) for name in ("seconds", "waited"))
        logs.dashes()
        say("-------------------- Training Metrics ---------------------")
        say(f"global_batch_size: {self.layout.global_batch}")
        say(f"device_iterations: {self.layout.iterations}")
        say(f"training_steps: {self.flags.training_steps}")
        say(f"Training time: {seconds:.3f} secs")
        logs.dashes()
        say(f"Waited for data: {waited / max(computed + waited, 1e-9):.0%} of the time")
        last = self.steps[-1]
        say(
            f"Right at the end: {last['mlm_acc']:.1%} of masked words, {last['nsp_acc']:.1%} of next sentences"
        )
