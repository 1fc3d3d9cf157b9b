"""Rows to train on: one generated row, random ones, a made-up language, or samples made of text."""

from __future__ import annotations

import glob
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common.sampling import Layout
from markov import Language
from packing import packed
from torch import Tensor
from torch.utils.data import Dataset

FIELDS = (
    *("input_ids", "attention_mask", "token_type_ids"),
    *("masked_lm_positions", "masked_lm_labels", "next_sentence_label"),
)
RANDOM_ROWS, LANGUAGE_ROWS, HELD_OUT_ROWS = 1 << 20, 32768, 512


class Rows(Dataset):
    """Samples in memory: one tensor [rows, ...] for each field, in any integer type."""

    def __init__(self, fields: dict[str, Tensor]) -> None:
        self.fields = fields

    def __len__(self) -> int:
        return len(next(iter(self.fields.values())))

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(field[index].long() for field in self.fields.values())


class RandomRows(Dataset):
    """A fresh random row for each index, to measure time with."""

    def __init__(self, flags: Any) -> None:
        self.flags = flags

    def __len__(self) -> int:
        return RANDOM_ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(random_row(self.flags, self.flags.random_seed + 1 + index).values())


def random_row(flags: Any, seed: int) -> dict[str, Tensor]:
    """Uniform words, positions and labels; packed data has more fields."""
    random = torch.Generator().manual_seed(seed)
    length, masked = flags.sequence_length, flags.mask_tokens
    most = flags.max_sequences_per_pack if flags.packed_data else 1
    masked += most - 1
    row = {
        "input_ids": torch.randint(flags.vocab_size, (length,), generator=random),
        "attention_mask": torch.ones(length, dtype=torch.int64),
        "token_type_ids": torch.zeros(length, dtype=torch.int64),
        "position_ids": torch.arange(length),
        "masked_lm_positions": torch.randint(length, (masked,), generator=random),
        "masked_lm_labels": torch.randint(flags.vocab_size, (masked,), generator=random),
        "masked_lm_mask": torch.ones(masked, dtype=torch.int64),
        "next_sentence_labels": torch.randint(2, (most,), generator=random),
        "next_sentence_mask": torch.ones(most, dtype=torch.int64),
    }
    if flags.packed_data:
        return row
    row["next_sentence_label"] = row["next_sentence_labels"]
    return {name: row[name] for name in FIELDS}


def generated(flags: Any, rows: int) -> Rows:
    """One random row, seen `rows` times; it is stored once."""
    row = random_row(flags, flags.random_seed)
    return Rows({name: value.expand(rows, *value.shape) for name, value in row.items()})


def language_of(flags: Any) -> Language:
    return Language(flags.vocab_size, flags.sequence_length, flags.mask_tokens, seed=0)


def training_set(flags: Any, layout: Layout) -> Dataset:
    """Ends the program where there are no samples."""
    if flags.dataset == "generated" or flags.synthetic_data:
        return generated(flags, layout.call)
    if flags.dataset == "random":
        return RandomRows(flags)
    if flags.dataset == "markov":
        return as_read(flags, language_of(flags).sample(LANGUAGE_ROWS, seed=flags.random_seed))
    return as_read(flags, samples(flags, flags.input_files, "--input-files"))


def held_out_set(flags: Any) -> Rows | None:
    """What the trained model is measured with, if there is something."""
    if flags.dataset == "markov":
        return as_read(flags, held_out_language(flags))
    if flags.dataset == "pretraining" and flags.held_out_files:
        return as_read(flags, samples(flags, flags.held_out_files, "--held-out-files"))
    return None


def held_out_language(flags: Any) -> dict[str, Tensor]:
    return language_of(flags).sample(HELD_OUT_ROWS, seed=flags.random_seed + 1)


def as_read(flags: Any, fields: dict[str, Tensor]) -> Rows:
    """The samples as the model reads them: packed or not."""
    return Rows(packed(fields, flags.max_sequences_per_pack) if flags.packed_data else fields)


def samples(flags: Any, patterns: list[str], flag: str) -> dict[str, Tensor]:
    """The samples of all files that the patterns match, checked against the flags."""
    if not patterns:
        raise SystemExit(
            f"--dataset pretraining reads samples, and {flag} names no files\n"
            "  fix: make them with make_samples.py, or give --dataset generated"
        )
    files = []
    for pattern in patterns:
        matched = sorted(glob.glob(pattern))
        if not matched:
            raise SystemExit(f"{flag} {pattern}: no file matches")
        files += matched
    shards = [_shard(Path(file), flags) for file in files]
    return {name: torch.cat([shard[name] for shard in shards]) for name in FIELDS}


def _shard(path: Path, flags: Any) -> dict[str, Tensor]:
    with np.load(path) as arrays:
        missing = [name for name in FIELDS if name not in arrays]
        if missing:
            raise SystemExit(
                f"{path} holds no samples: it lacks {', '.join(missing)}\n  fix: make_samples.py writes them"
            )
        found = {name: torch.from_numpy(arrays[name]) for name in FIELDS}
    length, masked = found["input_ids"].shape[1], found["masked_lm_labels"].shape[1]
    if (length, masked) != (flags.sequence_length, flags.mask_tokens):
        raise SystemExit(
            f"{path} has sequences of {length} with {masked} masked words, but "
            + flags.named("sequence_length", "mask_tokens")
        )
    words = int(found["input_ids"].max()) + 1
    if words > flags.vocab_size:
        raise SystemExit(f"{path} has words up to {words - 1}, but " + flags.named("vocab_size"))
    return found


def description(flags: Any) -> dict[str, Any]:
    """What make_samples.py noted beside the first file; empty without it."""
    path = Path(sorted(glob.glob(flags.input_files[0]))[0]).with_name("samples.json")
    return json.loads(path.read_text()) if path.exists() else {}


def what_is_known(flags: Any) -> str:
    """What can be reached on held-out rows, for the line that says what was."""
    if flags.dataset == "markov":
        language = language_of(flags)
        bound = language.bound(held_out_language(flags))
        return f" (unigram entropy {language.unigram_entropy:.3f}; no model below {bound:.3f})"
    known = description(flags)
    return f" ({known['held_out_unigram']:.3f} for who looks at no other word)" if known else ""
