"""A made-up language whose entropy is known: what a model of it can reach, and no model can be better than.

Each of its words has four successors, drawn once, with probabilities 0.7, 0.1, 0.1 and 0.1. A row is
`[CLS] A [SEP] B [SEP]`: two runs of the chain, and half of the time B goes on where A ended.
"""

from __future__ import annotations

import torch
from torch import Tensor

PAD, UNK, CLS, SEP, MASK = range(5)
SPECIAL = 5  # words begin here
CHANCES = (0.7, 0.1, 0.1, 0.1)
MASKED, KEPT = 0.8, 0.1  # of the words to guess: shown as [MASK], as they are; else as any word


class Language:
    """Args: length, masked: pieces and masked words of a row; seed: draws the successors"""

    def __init__(self, vocabulary: int, length: int, masked: int, seed: int) -> None:
        self.words, self.length, self.masked = vocabulary - SPECIAL, length, masked
        if self.words < len(CHANCES) or length < 7:
            raise SystemExit(
                f"--dataset markov needs {SPECIAL + len(CHANCES)} words (--vocab-size {vocabulary}) "
                f"and rows of 7 (--sequence-length {length})"
            )
        random = torch.Generator().manual_seed(seed)
        self.successors = torch.rand(self.words, self.words, generator=random).argsort(1)[:, : len(CHANCES)]
        chances = torch.tensor(CHANCES, dtype=torch.float64).expand(self.words, -1)
        self.chain = torch.zeros(self.words, self.words, dtype=torch.float64).scatter_(
            1, self.successors, chances
        )
        stationary = torch.full((self.words,), 1 / self.words, dtype=torch.float64)
        for _ in range(1000):
            stationary = stationary @ self.chain
        self.stationary = stationary / stationary.sum()
        first = (length - 3) // 2
        self.segments = first, length - 3 - first
        self.places = torch.tensor([*range(1, 1 + first), *range(2 + first, length - 1)])

    @property
    def unigram_entropy(self) -> float:
        """Nats of a word, if nothing is known of its neighbours."""
        return float(-(self.stationary * self.stationary.log()).nansum())

    @property
    def next_word_entropy(self) -> float:
        """Nats of a word, if the one before it is known."""
        return float(-(self.stationary[:, None] * torch.xlogy(self.chain, self.chain)).sum())

    def sample(self, rows: int, seed: int) -> dict[str, Tensor]:
        """Rows as the model reads them; see `model.Bert.forward`."""
        random = torch.Generator().manual_seed(seed)
        words = self._texts(rows, random)
        strange = torch.rand(rows, generator=random) < 0.5
        continued = self._chains(words[:, self.segments[0] - 1], self.segments[1], random)
        fresh = self._texts(rows, random)[:, : self.segments[1]]
        words = (
            torch.cat([words[:, : self.segments[0]], fresh.where(strange[:, None], continued)], 1) + SPECIAL
        )
        ids = torch.full((rows, self.length), SEP)
        ids[:, 0], ids[:, self.places] = CLS, words
        picked = (
            torch.rand(rows, len(self.places), generator=random).argsort(1)[:, : self.masked].sort(1).values
        )
        positions, labels = self.places[picked], words.gather(1, picked)
        lot = torch.rand(positions.shape, generator=random)
        other = torch.randint(SPECIAL, SPECIAL + self.words, positions.shape, generator=random)
        shown = torch.where(lot < MASKED, MASK, torch.where(lot < MASKED + KEPT, labels, other))
        return {
            "input_ids": ids.scatter(1, positions, shown),
            "attention_mask": torch.ones_like(ids),
            "token_type_ids": (torch.arange(self.length) > self.segments[0] + 1)
            .long()
            .expand(rows, -1)
            .clone(),
            "masked_lm_positions": positions,
            "masked_lm_labels": labels,
            "next_sentence_label": strange.long()[:, None],
        }

    def bound(self, rows: dict[str, Tensor]) -> float:
        """Mean nats of the masked words of these rows for who knows the chain, by forward and backward passes.

        It also knows which words are masked, which a model that sees only the row does not: none can be better.
        """
        shown = rows["input_ids"][:, self.places] - SPECIAL
        picked = torch.searchsorted(self.places, rows["masked_lm_positions"])
        is_masked = torch.zeros(shown.shape, dtype=torch.bool).scatter(1, picked, True)
        exact = torch.nn.functional.one_hot(shown.clamp(min=0), self.words).double()
        noise = (1 - MASKED - KEPT) / self.words
        seen = torch.where((shown < 0)[..., None], MASKED, KEPT * exact + noise)
        evidence = torch.where(is_masked[..., None], seen, exact)  # [rows, places, words]
        steps = [self.chain] * len(self.places)
        steps[self.segments[0]] = 0.5 * self.chain + 0.5 * self.stationary.expand_as(self.chain)
        before = [self.stationary.expand(len(shown), -1)]
        for place in range(1, len(self.places)):
            before.append(_normal(before[-1] * evidence[:, place - 1]) @ steps[place])
        after = [torch.ones_like(before[0])]
        for place in range(len(self.places) - 1, 0, -1):
            after.append(_normal(after[-1] * evidence[:, place]) @ steps[place].T)
        known = _normal(torch.stack(before, 1) * torch.stack(after[::-1], 1) * evidence)
        chance = known.gather(1, picked[..., None].expand(-1, -1, self.words))
        labels = rows["masked_lm_labels"][..., None] - SPECIAL
        return float(-chance.gather(2, labels).log().mean())

    def _texts(self, rows: int, random: torch.Generator) -> Tensor:
        first = torch.multinomial(self.stationary, rows, replacement=True, generator=random)
        return torch.cat([first[:, None], self._chains(first, max(self.segments) - 1, random)], 1)

    def _chains(self, word: Tensor, length: int, random: torch.Generator) -> Tensor:
        """The next words [rows, length] after each of `word` [rows]."""
        chances = torch.tensor(CHANCES, dtype=torch.float64)
        lots = torch.multinomial(chances, length * len(word), replacement=True, generator=random)
        found = []
        for lot in lots.view(length, -1):
            word = self.successors[word, lot]
            found.append(word)
        return torch.stack(found, 1)


def _normal(values: Tensor) -> Tensor:
    return values / values.sum(-1, keepdim=True)
