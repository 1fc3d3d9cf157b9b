"""BERT with 4 layers of width 256 on sequences of 128 words, its head tied to the embeddings; and random words."""

from __future__ import annotations

import torch
from task import Task  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

WORDS, WIDTH, LAYERS, LENGTH = 8192, 256, 4, 128
UNMASKED = -100  # labels of words that are not to be guessed


class Bert(nn.Module):
    """BertForMaskedLM, returning its loss. Without dropout, so that all ways to train make the same losses."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            num_hidden_layers=layers,
            num_attention_heads=WIDTH // 64,
            intermediate_size=4 * WIDTH,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.model = BertForMaskedLM(config)

    def forward(self, words: Tensor, labels: Tensor) -> tuple[Tensor]:
        return (self.model(input_ids=words, labels=labels).loss,)


def data(rows: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    words = torch.randint(0, WORDS, (rows, LENGTH), generator=random)
    masked = torch.rand(rows, LENGTH, generator=random) < 0.15
    return words, words.where(masked, UNMASKED)


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """`words`, `layer0` to `layer3`, `head`; the loss belongs to the head."""
    bert: BertForMaskedLM = model.get_submodule("model")  # pyright: ignore[reportAssignmentType]
    layers = {f"layer{number}": part for number, part in enumerate(bert.bert.encoder.layer)}
    return {"words": bert.bert.embeddings, **layers, "head": bert.cls}


def halves(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The cut that makes both cost about the same: the head costs two or three layers."""
    parts = list(blocks(model).values())
    return nn.Sequential(*parts[:4]), nn.Sequential(*parts[4:])


def loss(scores: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.view(-1, WORDS), labels.view(-1))


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.0001)


TASK = Task(
    make=Bert,
    data=data,
    optimizer=adamw,
    rows=2,
    micro_batches=16,
    updates=1,
    blocks=blocks,
    halves=halves,
    loss=loss,
)
