"""`ctc_beam_search_decoder`: the most probable label sequences of a CTC model's output."""

import math

import torch
from torch import Tensor

from popengine.errors import Error

from .library import computed

_NEVER = -math.inf
Path = tuple[int, ...]


def ctc_beam_search_decoder(
    probs: Tensor, lengths: Tensor, blank: int = 0, beam_width: int = 100, top_paths: int = 1
) -> list[Tensor]:
    """Prefix beam search.

    Args:
        probs:   log-probabilities, [T, B, C]
        lengths: how many of the T steps count, [B]
    Returns: log-probabilities of the paths [B, P], their lengths [B, P] and the paths [B, P, T], which are
        filled up with `blank`; best first
    """
    if not isinstance(probs, Tensor) or not isinstance(lengths, Tensor):
        raise Error(
            "ctc_beam_search_decoder takes tensors: probs [T, B, C] and lengths [B]; found"
            f" {type(probs).__name__} and {type(lengths).__name__}"
        )
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


def _shapes(
    probs: Tensor, lengths: Tensor, blank: int = 0, beam_width: int = 100, top_paths: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    steps, batch, _ = probs.shape
    counts = probs.new_empty((batch, top_paths), dtype=torch.int32)
    return probs.new_empty(counts.shape), counts, counts.new_empty((batch, top_paths, steps))


def _decode(
    probs: Tensor, lengths: Tensor, blank: int = 0, beam_width: int = 100, top_paths: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    steps, batch, _ = probs.shape
    scores = torch.full((batch, top_paths), _NEVER, dtype=probs.dtype)
    counts = torch.zeros(batch, top_paths, dtype=torch.int32)
    paths = torch.full((batch, top_paths, steps), blank, dtype=torch.int32)
    for sample in range(batch):
        rows = probs[: int(lengths[sample]), sample].tolist()
        for rank, (path, score) in enumerate(_beams(rows, blank, beam_width)[:top_paths]):
            scores[sample, rank], counts[sample, rank] = score, len(path)
            paths[sample, rank, : len(path)] = torch.tensor(path, dtype=torch.int32)
    return scores.to(probs.device), counts.to(probs.device), paths.to(probs.device)


def _beams(rows: list[list[float]], blank: int, beam_width: int) -> list[tuple[Path, float]]:
    """The best paths with their log-probabilities.

    For each path two numbers: the probability of all alignments that end in a blank, and of those that end
    in its last label. Only after a blank can the same label begin anew.
    """
    beams: dict[Path, tuple[float, float]] = {(): (0.0, _NEVER)}
    for row in rows:
        longer: dict[Path, tuple[float, float]] = {}

        def add(path: Path, ends_blank: float, ends_label: float, into: dict = longer) -> None:
            before = into.get(path, (_NEVER, _NEVER))
            into[path] = (_sum(before[0], ends_blank), _sum(before[1], ends_label))

        for path, (ends_blank, ends_label) in beams.items():
            either = _sum(ends_blank, ends_label)
            for label, chance in enumerate(row):
                if label == blank:
                    add(path, either + chance, _NEVER)
                elif path and label == path[-1]:
                    add(path, _NEVER, ends_label + chance)
                    add((*path, label), _NEVER, ends_blank + chance)
                else:
                    add((*path, label), _NEVER, either + chance)
        best = sorted(longer.items(), key=lambda beam: _sum(*beam[1]), reverse=True)
        beams = dict(best[:beam_width])
    return [(path, _sum(*ends)) for path, ends in beams.items()]


def _sum(one: float, other: float) -> float:
    """log(exp(one) + exp(other))"""
    high, low = max(one, other), min(one, other)
    return high if low == _NEVER else high + math.log1p(math.exp(low - high))


computed(
    "ctc_beam_search_decoder(Tensor probs, Tensor lengths, int blank=0, int beam_width=100, int top_paths=1) ->"
    " (Tensor, Tensor, Tensor)",
    _decode,
    _shapes,
)
