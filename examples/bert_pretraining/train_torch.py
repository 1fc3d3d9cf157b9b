"""The twin of `run_pretraining.py` in plain PyTorch: same flags, same samples, same weight updates.

python3 train_torch.py --config laptop_markov
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import BertForPreTraining

sys.path.insert(0, str(Path(__file__).parents[1]))
import arguments
import datasets
import model as models
from common.optimization import parameter_groups, share_of_rate
from common.plain import update
from common.sampling import GlobalBatches, Layout


def main(argv: Sequence[str] | None = None) -> SimpleNamespace:
    """Returns: `losses`, the mean of each call, and the `model`."""
    flags = arguments.parse_arguments(argv)
    torch.manual_seed(flags.random_seed)
    first_weights = models.make_model(flags).state_dict()
    model = BertForPreTraining(models.bert_config(flags))
    model.load_state_dict(first_weights)
    optimizer = make_optimizer(model.train(), flags)
    losses, warmup = [], int(flags.lr_warmup * flags.training_steps)
    for step, updates in enumerate(calls(flags)):
        share = share_of_rate(flags.lr_schedule, warmup, flags.training_steps, step)
        for group in optimizer.param_groups:
            group["lr"] = flags.learning_rate * share
        began = time.perf_counter()
        losses.append(
            sum(update(model, optimizer, micro_batches, loss_of) for micro_batches in updates) / len(updates)
        )
        print(f"Step: {step} - total loss: {losses[-1]:.3f} - {time.perf_counter() - began:.2f} s")
    return SimpleNamespace(losses=losses, model=model)


def loss_of(model: BertForPreTraining, *micro_batch: Tensor) -> Tensor:
    """The library's model, whose head is shown the masked positions alone."""
    ids, mask, segments, positions, labels, strange = micro_batch
    hidden, pooled = model.bert(ids, attention_mask=mask, token_type_ids=segments)[:2]
    masked = hidden.gather(1, positions[..., None].expand(-1, -1, hidden.shape[-1]))
    words, answers = model.cls(masked, pooled)
    masked_words = torch.nn.functional.cross_entropy(
        words.flatten(0, 1), labels.flatten(), ignore_index=models.IGNORED
    )
    return masked_words + torch.nn.functional.cross_entropy(answers, strange.flatten())


def calls(flags: Any) -> Iterator[list[list[list[Tensor]]]]:
    """For each call its updates, each a list of micro-batches."""
    replicas = flags.replication_factor
    layout = Layout(
        flags.micro_batch_size, flags.gradient_accumulation, flags.device_iterations, replicas, replicas
    )
    data: Any = datasets.training_set(flags, layout)
    order = GlobalBatches(len(data), layout, 0, flags.training_steps, flags.random_seed)
    micro_batches = iter(DataLoader(data, flags.micro_batch_size, sampler=order))
    for _ in range(flags.training_steps):
        yield [
            [next(micro_batches) for _ in range(layout.accumulation * replicas)]
            for _ in range(layout.iterations)
        ]


def make_optimizer(model: torch.nn.Module, flags: Any) -> torch.optim.Optimizer:
    lamb = flags.optimizer != "AdamW"
    groups = parameter_groups(model, flags.weight_decay, lamb)
    return Adam(groups, flags.learning_rate, trust=lamb, bias_correction=flags.optimizer == "LAMB")


class Adam(torch.optim.Optimizer):
    """AdamW, or LAMB with `trust`: https://arxiv.org/abs/1904.00962. Groups may have a `max_weight_norm`."""

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, *, trust: bool, bias_correction: bool
    ) -> None:
        super().__init__(
            groups, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-6, "max_weight_norm": float("inf")}
        )
        self.trust, self.bias_correction, self.count = trust, bias_correction, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            for weight in group["params"]:
                self.move(weight, weight.grad, self.state[weight], group)

    def move(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        """m ← β₁m + (1 − β₁)g; v ← β₂v + (1 − β₂)g²; u = m/(√v + ε) + λw; w ← w − lr·u·min(‖w‖, most)/‖u‖."""
        for name in ("m", "v"):
            state.setdefault(name, torch.zeros_like(weight))
        (beta1, beta2), corrected = group["betas"], self.bias_correction
        state["m"].lerp_(gradient, 1 - beta1)
        state["v"].lerp_(gradient * gradient, 1 - beta2)
        first = state["m"] / (1 - beta1**self.count if corrected else 1)
        second = state["v"] / (1 - beta2**self.count if corrected else 1)
        change = first / (second.sqrt() + group["eps"]) + group["weight_decay"] * weight
        ratio = min(float(weight.norm()), group["max_weight_norm"]) / max(float(change.norm()), 1e-38)
        weight.sub_(change, alpha=group["lr"] * (ratio or 1.0) if self.trust else group["lr"])


if __name__ == "__main__":
    main()
