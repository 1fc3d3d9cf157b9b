"""A weight update in plain PyTorch: what the twins of BERT and GPT-2 share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Any],
    loss_of: Callable[..., Tensor],
) -> float:
    """Gradients are summed over the micro-batches, then divided. Returns their mean loss."""
    optimizer.zero_grad()
    total = 0.0
    for micro_batch in micro_batches:
        loss = loss_of(model, *micro_batch)
        loss.backward()
        total += loss.item()
    for parameter in model.parameters():
        parameter.grad /= len(micro_batches)
    optimizer.step()
    return total / len(micro_batches)
