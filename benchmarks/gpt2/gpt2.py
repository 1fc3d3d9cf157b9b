"""GPT-2 nano: 4 layers of width 128 on rows of 64 words, its head tied to the words; and random words."""

from __future__ import annotations

import torch
from task import Task  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

WORDS, WIDTH, LAYERS, LENGTH = 2048, 128, 4, 64


class Start(nn.Module):
    """Words and positions, then the first layers."""

    def __init__(self, words: nn.Module, positions: nn.Module, layers: nn.ModuleList) -> None:
        super().__init__()
        self.words, self.positions, self.layers = words, positions, layers

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.words(words) + self.positions(torch.arange(words.shape[1]))
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class GPT2(nn.Module):
    """The library's model, returning its loss. Without dropout, so that all ways to train make the same losses."""

    def __init__(self) -> None:
        super().__init__()
        none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        sizes = {"n_positions": LENGTH, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4}
        self.model = GPT2LMHeadModel(
            GPT2Config(vocab_size=WORDS, bos_token_id=0, eos_token_id=0, **sizes, **none)
        )

    def forward(self, words: Tensor, labels: Tensor) -> tuple[Tensor]:
        return (loss(self.model(input_ids=words, use_cache=False).logits, labels),)


def data(rows: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    words = torch.randint(0, WORDS, (rows, LENGTH + 1), generator=random)
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """`words`, `layer0` to `layer3`, `head`; the loss belongs to the head."""
    parts = model.get_submodule("model.transformer")
    layers = {f"layer{number}": layer for number, layer in enumerate(parts.get_submodule("h").children())}
    return {"words": parts.get_submodule("wte"), **layers, "head": model.get_submodule("model.lm_head")}


def halves(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The cut that makes both cost about the same: the head costs about two layers."""
    parts, layers = (
        model.get_submodule("model.transformer"),
        list(model.get_submodule("model.transformer.h").children()),
    )
    start = Start(parts.get_submodule("wte"), parts.get_submodule("wpe"), nn.ModuleList(layers[:3]))
    return start, nn.Sequential(
        *layers[3:], parts.get_submodule("ln_f"), model.get_submodule("model.lm_head")
    )


def loss(scores: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.view(-1, WORDS), labels.view(-1))


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.0001)


TASK = Task(
    make=GPT2,
    data=data,
    optimizer=adamw,
    rows=4,
    micro_batches=16,
    updates=2,
    blocks=blocks,
    halves=halves,
    loss=loss,
)
