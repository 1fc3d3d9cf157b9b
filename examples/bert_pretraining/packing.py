"""Several short sequences in one row: which ones share it, and where their pieces go.

A packed row of length L holds the pieces of its sequences one after another, without their [CLS]; the [CLS] of the
j-th (from 1) is at L - j. Masks say j where the j-th sequence is, and 0 where nothing is.
"""

from __future__ import annotations

import bisect

import torch
from torch import Tensor


def shared_rows(lengths: list[int], room: int, most: int) -> list[list[int]]:
    """Which sequences share a row: the longest first, each into the fullest row that it fits into.

    Args:    most: sequences in a row, at most
    Returns: for each row the indices of its sequences
    """
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (room that is left, row), sorted
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect.bisect_left(open_rows, (lengths[index], -1))
        if place == len(open_rows):
            left, row = room, len(rows)
            rows.append([])
        else:
            left, row = open_rows.pop(place)
        rows[row].append(index)
        if len(rows[row]) < most:
            bisect.insort(open_rows, (left - lengths[index], row))
    return rows


def packed(fields: dict[str, Tensor], most: int) -> dict[str, Tensor]:
    """Samples packed into fewer rows, in the order of each row's first sample.

    Args:    fields: as `datasets.FIELDS`
    Returns: input_ids, attention_mask, token_type_ids, position_ids [rows, L]; masked_lm_positions, _labels and
        _mask [rows, P + most - 1], since each sequence rounds its share of masked words up; next_sentence_labels and
        _mask [rows, most], filled from the end
    """
    length, masked = fields["input_ids"].shape[1], fields["masked_lm_labels"].shape[1] + most - 1
    groups = sorted(shared_rows(fields["attention_mask"].sum(1).tolist(), length, most), key=min)
    found = empty(len(groups), length, masked, most)
    for row, group in enumerate(groups):
        start = count = 0
        for number, index in enumerate(group, start=1):
            size = int(fields["attention_mask"][index].sum()) - 1
            pieces, last = slice(start, start + size), length - number
            for name in ("input_ids", "token_type_ids"):
                found[name][row, pieces] = fields[name][index, 1 : size + 1]
                found[name][row, last] = fields[name][index, 0]
            found["attention_mask"][row, pieces] = found["attention_mask"][row, last] = number
            found["position_ids"][row, pieces] = torch.arange(1, size + 1, dtype=torch.int32)
            positions = fields["masked_lm_positions"][index]
            guesses = positions > 0  # 0 is [CLS], so it fills up
            span = slice(count, count + int(guesses.sum()))
            found["masked_lm_positions"][row, span] = positions[guesses] - 1 + start
            found["masked_lm_labels"][row, span] = fields["masked_lm_labels"][index][guesses]
            found["masked_lm_mask"][row, span] = number
            found["next_sentence_labels"][row, most - number] = fields["next_sentence_label"][index, 0]
            found["next_sentence_mask"][row, most - number] = 1
            start, count = start + size, span.stop
    return found


def empty(rows: int, length: int, masked: int, most: int) -> dict[str, Tensor]:
    """Packed rows with nothing in them."""
    sizes = {
        **dict.fromkeys(("input_ids", "attention_mask", "token_type_ids", "position_ids"), length),
        **dict.fromkeys(("masked_lm_positions", "masked_lm_labels", "masked_lm_mask"), masked),
        **dict.fromkeys(("next_sentence_labels", "next_sentence_mask"), most),
    }
    return {name: torch.zeros(rows, size, dtype=torch.int32) for name, size in sizes.items()}
