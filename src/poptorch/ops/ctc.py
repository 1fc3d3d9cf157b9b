"""CTC, connectionist temporal classification: the loss, and the search for the most probable label sequences.

Each is a single operation of the graph: it reads lengths, which have no values while a model is captured.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from popengine.errors import Error

from .library import LIBRARY, REDUCTIONS, check_tensors, register_computed

aten = torch.ops.aten
_LOG_ZERO = -math.inf
Path = tuple[int, ...]  # labels


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Return the CTC loss of `torch.nn.functional.ctc_loss`, by operations that can be compiled."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"{reduction} is not a valid value for reduction")
    is_single = log_probs.dim() == 2
    log_probs = log_probs.unsqueeze(1) if is_single else log_probs
    inputs, labels = (
        torch.as_tensor(lengths, device=log_probs.device).reshape(-1).to(torch.long)
        for lengths in (input_lengths, target_lengths)
    )
    if targets.dim() == 1 and is_single:
        targets = targets.unsqueeze(0)
    settings = blank, zero_infinity, torch.is_grad_enabled() and log_probs.requires_grad
    losses, _ = torch.ops.poptorch.ctc_loss(log_probs, targets.to(torch.long), inputs, labels, *settings)
    if zero_infinity:
        losses = torch.where(losses == torch.inf, 0.0, losses)
    if reduction == "mean":
        return (losses / labels.clamp(min=1)).mean()
    if reduction == "sum":
        return losses.sum()
    return losses.squeeze(0) if is_single else losses


def _compute_losses(
    log_probs: Tensor,
    targets: Tensor,
    inputs: Tensor,
    labels: Tensor,
    blank: int,
    zero_infinity: bool,
    needs_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Return the loss of each sequence, [B], and their gradients in float32; without gradients [0, B, C]."""
    scores = log_probs.float()
    lengths, settings = (targets, inputs, labels), (blank, zero_infinity)
    losses, table = aten._ctc_loss(scores, *lengths, *settings)
    gradient = torch.empty_like(scores[:0])
    if needs_gradient:
        ones = torch.ones_like(losses)
        gradient = aten._ctc_loss_backward(ones, scores, *lengths, losses, table, *settings)
    return losses.to(log_probs.dtype), gradient


def _fake_losses(log_probs: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    gradient = torch.empty_like(log_probs if arguments[-1] else log_probs[:0], dtype=torch.float32)
    return log_probs.new_empty(log_probs.shape[1]), gradient


def _save_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.dtype = inputs[0].dtype
    ctx.set_materialize_grads(False)  # the second output has no gradient


def _scale_gradient(ctx: Any, gradient: Tensor, _: Any) -> Any:
    (saved,) = ctx.saved_tensors
    return ((saved * gradient.float().unsqueeze(1)).to(ctx.dtype), *[None] * 6)


register_computed("ctc_loss", _compute_losses, _fake_losses)
torch.library.register_autograd(
    "poptorch::ctc_loss", _scale_gradient, setup_context=_save_gradient, lib=LIBRARY
)


def ctc_beam_search_decoder(
    probs: Tensor, lengths: Tensor, blank: int = 0, beam_width: int = 100, top_paths: int = 1
) -> list[Tensor]:
    """Return the most probable label sequences (paths), found by prefix beam search.

    Args:
        probs:   log-probabilities, [T, B, C]
        lengths: number of valid steps of each sequence, [B]
        beam_width: number of paths that the search keeps after each step
    Returns: a list of three tensors: log-probabilities of the P = `top_paths` best paths, [B, P], best first
        (-inf if there are fewer paths), the lengths of the paths [B, P], and the paths [B, P, T], padded
        with `blank`
    """
    check_tensors("ctc_beam_search_decoder takes tensors: probs [T, B, C] and lengths [B]", probs, lengths)
    if probs.dim() != 3 or lengths.shape != probs.shape[1:2] or not 0 <= blank < probs.shape[2]:
        raise Error(
            f"ctc_beam_search_decoder: probs must be [T, B, C], lengths [B] and blank one of the C classes; found"
            f" {tuple(probs.shape)}, {tuple(lengths.shape)} and {blank}"
        )
    if not 1 <= top_paths <= beam_width:
        raise Error(
            f"ctc_beam_search_decoder: top_paths must be from 1 to beam_width; found {top_paths}, {beam_width}"
        )
    return list(torch.ops.poptorch.ctc_beam_search_decoder(probs, lengths, blank, beam_width, top_paths))


def _fake_paths(
    probs: Tensor, lengths: Tensor, blank: int = 0, beam_width: int = 100, top_paths: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    steps, batch, _ = probs.shape
    counts = probs.new_empty((batch, top_paths), dtype=torch.int32)
    return probs.new_empty(counts.shape), counts, counts.new_empty((batch, top_paths, steps))


def _search_paths(
    probs: Tensor, lengths: Tensor, blank: int = 0, beam_width: int = 100, top_paths: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    steps, batch, _ = probs.shape
    scores = torch.full((batch, top_paths), _LOG_ZERO, dtype=probs.dtype)
    counts = torch.zeros(batch, top_paths, dtype=torch.int32)
    paths = torch.full((batch, top_paths, steps), blank, dtype=torch.int32)
    for sample in range(batch):
        rows = probs[: int(lengths[sample]), sample].tolist()
        for rank, (path, score) in enumerate(_best_paths(rows, blank, beam_width)[:top_paths]):
            scores[sample, rank], counts[sample, rank] = score, len(path)
            paths[sample, rank, : len(path)] = torch.tensor(path, dtype=torch.int32)
    return scores.to(probs.device), counts.to(probs.device), paths.to(probs.device)


def _best_paths(rows: list[list[float]], blank: int, beam_width: int) -> list[tuple[Path, float]]:
    """Return the most probable label paths, at most `beam_width`, with their log-probabilities, best first.

    During the search a path has two log-probabilities: of its alignments that end in a blank, and of those
    that end in its last label. A path can repeat its last label only after a blank.
    """
    beams: dict[Path, list[float]] = {(): [0.0, _LOG_ZERO]}
    for row in rows:
        longer: defaultdict[Path, list[float]] = defaultdict(lambda: [_LOG_ZERO, _LOG_ZERO])
        for path, (ends_blank, ends_label) in beams.items():
            ends_any = _log_add_exp(ends_blank, ends_label)
            for label, chance in enumerate(row):
                if label == blank:
                    longer[path][0] = _log_add_exp(longer[path][0], ends_any + chance)
                    continue
                if repeats := path[-1:] == (label,):
                    longer[path][1] = _log_add_exp(longer[path][1], ends_label + chance)
                ends = longer[*path, label]
                ends[1] = _log_add_exp(ends[1], (ends_blank if repeats else ends_any) + chance)
        best = sorted(longer.items(), key=lambda beam: _log_add_exp(*beam[1]), reverse=True)
        beams = dict(best[:beam_width])
    return [(path, _log_add_exp(*ends)) for path, ends in beams.items()]


def _log_add_exp(a: float, b: float) -> float:
    """Return log(exp(a) + exp(b)), also for minus infinity."""
    high, low = max(a, b), min(a, b)
    return high if low == _LOG_ZERO else high + math.log1p(math.exp(low - high))


register_computed("ctc_beam_search_decoder", _search_paths, _fake_paths)
