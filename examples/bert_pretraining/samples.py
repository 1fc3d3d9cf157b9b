"""From documents of word pieces to samples: two segments, of which some words are masked; does the second follow?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

Pieces = list[int]
Document = list[Pieces]  # its sentences

SHOWN_AS_MASK, SHOWN_AS_IT_IS = 0.8, 0.1  # of masked words; the others are shown as any word


@dataclass(frozen=True)
class Words:
    """The ids of the special words, and how many words there are."""

    pad: int
    unknown: int
    begin: int
    separator: int
    mask: int
    size: int


@dataclass(frozen=True)
class Sample:
    """`pieces` has [CLS] and [SEP]s; the first `first` of them are segment 0. `strange`: the second does not follow."""

    pieces: Pieces
    first: int
    positions: list[int]
    labels: Pieces
    strange: bool


def samples_of(documents: list[Document], words: Words, flags: Any, chance: Random) -> Iterator[Sample]:
    """The samples of all documents, each read once. A random second segment is cut from another of them."""
    room = flags.sequence_length - 3  # [CLS] and two [SEP]
    for index, document in enumerate(documents):
        target = room if chance.random() >= flags.short_share else chance.randint(2, room)
        place = 0
        while place < len(document):
            chunk = _chunk(document, place, target)
            cut = chance.randint(1, max(1, len(chunk) - 1))
            a = [piece for sentence in chunk[:cut] for piece in sentence]
            strange = len(chunk) == 1 or chance.random() < 0.5
            if strange:
                b = _elsewhere(documents, index, target - len(a), chance)
                place += cut  # the other sentences of the chunk are used next
            else:
                b = [piece for sentence in chunk[cut:] for piece in sentence]
                place += len(chunk)
            _shorten(a, b, room, chance)
            pieces = [words.begin, *a, words.separator, *b, words.separator]
            yield _masked(pieces, len(a) + 2, strange, words, flags, chance)


def _chunk(document: Document, place: int, target: int) -> list[Pieces]:
    """Sentences from `place` on until they are as long as the target, or the document ends."""
    length = 0
    for end in range(place, len(document)):
        length += len(document[end])
        if length >= target:
            break
    return document[place : end + 1]


def _elsewhere(documents: list[Document], index: int, target: int, chance: Random) -> Pieces:
    """At least one sentence of another document, from a random one on, until they are as long as the target."""
    for _ in range(10):
        other = chance.randrange(len(documents))
        if other != index:
            break
    sentences = documents[other]
    start = chance.randrange(len(sentences))
    return [piece for sentence in _chunk(sentences, start, target) for piece in sentence]


def _shorten(a: Pieces, b: Pieces, room: int, chance: Random) -> None:
    """Take pieces away from the longer segment, at either end, until both fit."""
    while len(a) + len(b) > room:
        longer = a if len(a) > len(b) else b
        longer.pop(0 if chance.random() < 0.5 else -1)


def _masked(pieces: Pieces, first: int, strange: bool, words: Words, flags: Any, chance: Random) -> Sample:
    candidates = [i for i, piece in enumerate(pieces) if piece not in (words.begin, words.separator)]
    chance.shuffle(candidates)
    count = min(flags.mask_tokens, max(1, round(flags.masked_share * len(pieces))))
    positions = sorted(candidates[:count])
    labels, shown = [pieces[i] for i in positions], list(pieces)
    for i in positions:
        lot = chance.random()
        if lot < SHOWN_AS_MASK:
            shown[i] = words.mask
        elif lot >= SHOWN_AS_MASK + SHOWN_AS_IT_IS:
            shown[i] = chance.randrange(words.size)
    return Sample(shown, first, positions, labels, strange)


def arrays(samples: list[Sample], words: Words, flags: Any) -> dict[str, np.ndarray]:
    """Rows of all samples, filled up with `words.pad`; int32."""
    length, masked = flags.sequence_length, flags.mask_tokens
    found = {
        "input_ids": np.full((len(samples), length), words.pad, np.int32),
        "attention_mask": np.zeros((len(samples), length), np.int32),
        "token_type_ids": np.zeros((len(samples), length), np.int32),
        "masked_lm_positions": np.zeros((len(samples), masked), np.int32),
        "masked_lm_labels": np.zeros((len(samples), masked), np.int32),
        "next_sentence_label": np.array([[sample.strange] for sample in samples], np.int32).reshape(-1, 1),
    }
    for row, sample in enumerate(samples):
        size, count = len(sample.pieces), len(sample.positions)
        found["input_ids"][row, :size] = sample.pieces
        found["attention_mask"][row, :size] = 1
        found["token_type_ids"][row, sample.first : size] = 1
        found["masked_lm_positions"][row, :count] = sample.positions
        found["masked_lm_labels"][row, :count] = sample.labels
    return found
