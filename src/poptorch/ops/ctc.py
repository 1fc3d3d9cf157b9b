"""The CTC loss as operations of a graph. torch's own reads the lengths, which have no values in one."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .library import computed

aten = torch.ops.aten


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """`torch.nn.functional.ctc_loss`, for a model that is compiled.

    Args:
        log_probs: [T, B, C], or [T, C] for a single sequence
        targets:   [B, S], or all of them in a row: [sum of the target lengths]
        reduction: "mean" divides by the target lengths first, "sum" or "none"
    """
    single = log_probs.dim() == 2
    log_probs = log_probs.unsqueeze(1) if single else log_probs
    inputs, labels = (
        torch.as_tensor(lengths, device=log_probs.device).reshape(-1).to(torch.long)
        for lengths in (input_lengths, target_lengths)
    )
    if targets.dim() == 1 and single:
        targets = targets.unsqueeze(0)
    losses = _CtcLoss.apply(log_probs, targets.to(torch.long), inputs, labels, blank, zero_infinity)
    assert isinstance(losses, Tensor)
    if zero_infinity:
        losses = torch.where(losses == torch.inf, 0.0, losses)
    if reduction == "mean":
        return (losses / labels.clamp(min=1)).mean()
    if reduction == "sum":
        return losses.sum()
    return losses.squeeze(0) if single else losses


class _CtcLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        losses, alpha = torch.ops.poptorch.ctc_loss(*arguments)
        ctx.save_for_backward(*arguments[:4], losses, alpha)
        ctx.settings = arguments[4:]
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = ctx.saved_tensors
        return (torch.ops.poptorch.ctc_loss_backward(gradient, *saved, *ctx.settings), *[None] * 5)


def _alphas(targets: Tensor) -> int:
    """How wide the table of partial sums is in a graph: enough for the longest target there can be."""
    return 2 * targets.shape[-1] + 1


def _run(
    log_probs: Tensor, targets: Tensor, inputs: Tensor, labels: Tensor, blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    losses, alpha = aten._ctc_loss(log_probs.float(), targets, inputs, labels, blank, zero_infinity)
    # The table is as wide as this batch's longest target; in a graph all shapes are fixed.
    missing = _alphas(targets) - alpha.shape[-1]
    return losses.to(log_probs.dtype), torch.nn.functional.pad(alpha, (0, missing)).contiguous()


def _run_backward(
    gradient: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    inputs: Tensor,
    labels: Tensor,
    losses: Tensor,
    alpha: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    alpha = alpha[..., : 2 * int(labels.max()) + 1].contiguous()
    values = (gradient.float(), log_probs.float(), targets, inputs, labels, losses.float(), alpha)
    return aten._ctc_loss_backward(*values, blank, zero_infinity).to(log_probs.dtype)


def _shapes(log_probs: Tensor, targets: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    steps, batch, _ = log_probs.shape
    table = log_probs.new_empty((batch, steps, _alphas(targets)), dtype=torch.float32)
    return log_probs.new_empty(batch), table


computed(
    "ctc_loss(Tensor log_probs, Tensor targets, Tensor inputs, Tensor labels, int blank, bool zero_infinity) ->"
    " (Tensor, Tensor)",
    _run,
    _shapes,
)
computed(
    "ctc_loss_backward(Tensor gradient, Tensor log_probs, Tensor targets, Tensor inputs, Tensor labels,"
    " Tensor losses, Tensor alpha, int blank, bool zero_infinity) -> Tensor",
    _run_backward,
    lambda gradient, log_probs, *rest: torch.empty_like(log_probs),
)
