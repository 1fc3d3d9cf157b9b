"""Large models: GPT-2 small (124 M parameters) on rows of 128 words, and ViT-B/16 (86 M) on images of 224 x 224."""

from __future__ import annotations

import torch
from task import Task  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, ViTConfig, ViTForImageClassification

WORDS, LENGTH, CLASSES = 50257, 128, 1000


class GPT2(nn.Module):
    """The library's model, returning its loss. Without dropout, so that all ways to train make the same losses."""

    def __init__(self) -> None:
        super().__init__()
        none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        self.model = GPT2LMHeadModel(GPT2Config(**none))

    def forward(self, words: Tensor, labels: Tensor) -> tuple[Tensor]:
        scores = self.model(input_ids=words, use_cache=False).logits
        return (loss(scores, labels),)


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = ViTForImageClassification(ViTConfig(num_labels=CLASSES))

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor]:
        return (loss(self.model(images).logits, labels),)


def loss(scores: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, -2), labels.flatten())


def words(rows: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    made = torch.randint(0, WORDS, (rows, LENGTH + 1), generator=random)
    return made[:, :-1].contiguous(), made[:, 1:].contiguous()


def images(rows: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    made = torch.randn(rows, 3, 224, 224, generator=random)
    return made, torch.randint(0, CLASSES, (rows,), generator=random)


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    return {"model": model.get_submodule("model")}


def halves(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    raise NotImplementedError("no contender cuts these models")


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.0001)


SHARED = {"optimizer": adamw, "updates": 1, "blocks": blocks, "halves": halves, "loss": loss}
TASKS = {
    "gpt2": Task(make=GPT2, data=words, rows=4, micro_batches=8, **SHARED),
    "vit": Task(make=ViT, data=images, rows=4, micro_batches=8, **SHARED),
}
