"""Text as numbers, made once and kept in a folder; and how well words are guessed from none or one before them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import corpus
from common.folders import prepared
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import Dataset

END = "<|endoftext|>"  # word 0: between documents


class Rows(Dataset):
    """Rows of `length` words and the words after them, each row `stride` words after the one before."""

    def __init__(self, words: Tensor, length: int, stride: int) -> None:
        self.words, self.length, self.stride = words, length, stride

    def __len__(self) -> int:
        return max(0, (len(self.words) - self.length - 1) // self.stride + 1)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self.words[index * self.stride :][: self.length + 1].long()
        return row[:-1], row[1:]


def generated(flags: Any, rows: int) -> Rows:
    """Uniform words."""
    random = torch.Generator().manual_seed(flags.random_seed)
    words = torch.randint(flags.vocab_size, (rows * flags.max_len + 1,), generator=random)
    return Rows(words, flags.max_len, flags.max_len)


def training_and_held_out(flags: Any) -> tuple[Rows, Rows, dict[str, Any]]:
    """Rows to train on, rows of other documents, and notes of the text. Ends the program, if it is too short."""
    wanted = {
        "text": corpus.source(flags.input_files),
        "tokenizer": flags.tokenizer,
        "words": flags.vocab_size,
    }
    notes = prepared(flags.text_dir, "text.json", wanted, lambda folder: _make(folder, flags))
    words = torch.from_numpy(np.load(Path(flags.text_dir, "words.npy")))
    apart = flags.val_num * flags.max_len + 1  # at the end, where documents are that were drawn by lot
    if len(words) < 4 * apart:
        raise SystemExit(
            f"the text has {len(words)} words, too few to hold {apart} of them out: "
            + flags.named("val_num", "max_len")
        )
    training, held_out = words[:-apart], words[-apart:]
    notes |= {
        "unigram": unigram(training, held_out, flags.vocab_size),
        "bigram": bigram(training, held_out, flags.vocab_size),
    }
    return Rows(training, flags.max_len, flags.stride), Rows(held_out, flags.max_len, flags.max_len), notes


def tokenizer_of(flags: Any) -> Tokenizer:
    return Tokenizer.from_file(str(Path(flags.text_dir, "tokenizer.json")))


def _make(folder: Path, flags: Any) -> dict[str, Any]:
    documents = ["\n".join(document) for document in corpus.documents(flags.input_files)]
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(1984)).tolist()
    documents = [documents[index] for index in order]
    tokenizer = (
        _characters(documents, flags) if flags.tokenizer == "characters" else _byte_pairs(documents, flags)
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    words = [word for text in tokenizer.encode_batch(documents) for word in (*text.ids, 0)]
    np.save(folder / "words.npy", np.array(words, np.int32))
    return {"documents": len(documents), "length": len(words), "vocabulary": tokenizer.get_vocab_size()}


def _byte_pairs(documents: list[str], flags: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=flags.vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def _characters(documents: list[str], flags: Any) -> Tokenizer:
    """The characters that are used most, as many as there is room for."""
    counts: dict[str, int] = {}
    for text in documents:
        for character in text:
            counts[character] = counts.get(character, 0) + 1
    used = sorted(counts, key=lambda character: (-counts[character], character))[: flags.vocab_size - 2]
    vocabulary = {word: index for index, word in enumerate([END, "<|other|>", *used])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|other|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def unigram(training: Tensor, held_out: Tensor, vocabulary: int) -> float:
    """Nats a held-out word, guessed from the counts of the training's words; one is added to each."""
    chances = _shares(training, vocabulary)
    return float(-chances[held_out[1:].long()].log().mean())


def bigram(training: Tensor, held_out: Tensor, vocabulary: int) -> float:
    """Nats a held-out word, guessed from the one before: p(b|a) = (n(ab) + k·p(b)) / (n(a) + k), with the best k."""
    single = _shares(training, vocabulary)
    a, b = training[:-1].long(), training[1:].long()
    keys, pairs = (a * vocabulary + b).unique(return_counts=True)
    before = torch.bincount(a, minlength=vocabulary)
    x, y = held_out[:-1].long(), held_out[1:].long()
    place = torch.searchsorted(keys, x * vocabulary + y).clamp(max=len(keys) - 1)
    seen = pairs[place].where(keys[place] == x * vocabulary + y, 0)
    return min(
        float(-((seen + k * single[y]) / (before[x] + k)).log().mean())
        for k in (1, 3, 10, 30, 100, 300, 1000)
    )


def _shares(words: Tensor, vocabulary: int) -> Tensor:
    counts = torch.bincount(words.long(), minlength=vocabulary).double() + 1
    return counts / counts.sum()


def perplexity(nats: float) -> float:
    return math.exp(min(nats, 700))
