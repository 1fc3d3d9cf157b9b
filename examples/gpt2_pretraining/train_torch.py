"""The twin of `train_gpt2.py` in plain PyTorch: same flags, same rows, same weight updates."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import GPT2LMHeadModel

sys.path.insert(0, str(Path(__file__).parents[1]))
import arguments
import model as models
import text
from common.plain import update
from common.sampling import GlobalBatches, Layout


def main(argv: Sequence[str] | None = None) -> SimpleNamespace:
    """AdamW at a constant rate, on one replica. Returns: `losses` of each call, and `held_out`, nats a word."""
    flags = arguments.parse_arguments(argv)
    training, held_out, _ = text.training_and_held_out(flags)
    torch.manual_seed(flags.random_seed)
    model = GPT2LMHeadModel(models.gpt2_config(flags))
    groups = [
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": flags.weight_decay},
    ]
    optimizer = torch.optim.AdamW(groups, lr=flags.learning_rate, eps=1e-6)
    layout = Layout(flags.micro_batch_size, flags.gradient_accumulation, flags.device_iterations, 1, 1)
    steps = min(flags.training_steps, flags.epochs * (len(training) // layout.call))
    order = GlobalBatches(len(training), layout, 0, steps, flags.random_seed)
    micro_batches = iter(DataLoader(training, flags.micro_batch_size, sampler=order))
    losses = []
    for step in range(steps):
        began = time.perf_counter()
        updates = [
            update(model, optimizer, [next(micro_batches) for _ in range(layout.accumulation)], loss_of)
            for _ in range(layout.iterations)
        ]
        losses.append(sum(updates) / len(updates))
        print(f"step {step}, loss: {losses[-1]:.4f}, {time.perf_counter() - began:.2f} s")
    model.eval()
    with torch.no_grad():
        found = [loss_of(model, *rows).item() for rows in DataLoader(held_out, 1)]
    return SimpleNamespace(losses=losses, held_out=sum(found) / len(found))


def loss_of(model: GPT2LMHeadModel, words: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(model(words).logits.flatten(0, 1), labels.flatten(), ignore_index=models.IGNORED)


if __name__ == "__main__":
    main()
