"""BERT-base on sequences of 128 words, in bfloat16 where torch.autocast says so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from bert import LENGTH, TASK, WORDS, Bert  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
from task import Task  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM


class BertBase(Bert):
    """BertForMaskedLM as transformers configures it. Without dropout, so that all ways make the same losses."""

    def __init__(self, **sizes: Any) -> None:
        nn.Module.__init__(self)
        config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)
        self.model = BertForMaskedLM(config)

    def forward(self, words: Tensor, labels: Tensor) -> tuple[Tensor]:
        # A model is captured on the CPU, wherever it runs: its own tensors say which device's rules hold.
        with torch.autocast(words.device.type, torch.bfloat16):
            scores = self.model(input_ids=words).logits
        return (nn.functional.cross_entropy(scores.float().flatten(0, 1), labels.flatten()),)


class TinyBert(BertBase):
    """To try the program."""

    def __init__(self) -> None:
        width = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
        super().__init__(vocab_size=WORDS, max_position_embeddings=LENGTH, **width)


BERT: Task = replace(TASK, make=BertBase, rows=32, micro_batches=8, updates=3)
TINY: Task = replace(BERT, make=TinyBert, rows=1, updates=1)
