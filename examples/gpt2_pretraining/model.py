"""GPT-2: the library's class with its layers on ipus, and the loss of the next word."""

from __future__ import annotations

from typing import Any

import torch
from arguments import position_ipu
from common.placement import layer_ipus
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import poptorch

IGNORED = -100  # label of a word that is not to be guessed


def gpt2_config(flags: Any) -> GPT2Config:
    return GPT2Config(
        vocab_size=flags.vocab_size,
        n_positions=flags.max_len,
        n_embd=flags.hidden_size,
        n_layer=flags.num_hidden_layers,
        n_head=flags.num_attention_heads,
        resid_pdrop=flags.dropout,
        embd_pdrop=flags.dropout,
        attn_pdrop=flags.dropout,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )


class GPT2(GPT2LMHeadModel):
    """Names and shapes of its weights are the library's, however it is laid out."""

    part = 0  # words of a row whose logits are computed at once; 0: all

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        """Args: input_ids, labels: [n, L]; a label is the word after, or `IGNORED`
        Returns: the mean loss over the labels, and the share of them that was guessed; without labels the logits
            [n, L, vocab]
        """
        hidden = self.transformer(input_ids, use_cache=False)[0]
        if labels is None:
            return self.lm_head(hidden)
        length = self.part or hidden.shape[1]
        loss = right = 0
        for words, wanted in zip(hidden.split(length, 1), labels.split(length, 1), strict=True):
            logits = self.lm_head(words).float()
            loss = loss + nn.functional.cross_entropy(
                logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="sum"
            )
            right = right + (logits.argmax(-1) == wanted).sum()
        count = (labels != IGNORED).sum()
        return poptorch.identity_loss(loss / count, reduction="none"), right / count

    def parallelize(self, flags: Any) -> GPT2:
        """Say which ipu runs which part. The head comes back to ipu 0, where the words are that it shares."""
        if flags.enable_sequence_serialized:
            self.part = flags.serialized_seq_len
        if flags.embedding_serialization_factor > 1:
            self.lm_head = SerializedHead(self.lm_head, flags.embedding_serialization_factor)
        poptorch.BeginBlock(self.transformer.wte, "Words", ipu_id=0)
        poptorch.BeginBlock(self.transformer.wpe, "Positions", ipu_id=position_ipu(flags))
        for index, (layer, ipu) in enumerate(
            zip(self.transformer.h, layer_ipus(flags.layers_per_ipu), strict=True)
        ):
            poptorch.BeginBlock(layer, f"Layer{index}", ipu_id=ipu)
            if index in flags.recompute_checkpoint_layers:
                layer.register_forward_hook(_keep_output)
        poptorch.BeginBlock(self.lm_head, "Head", ipu_id=0)
        return self


class SerializedHead(nn.Module):
    """A linear layer with the weight of another one, computed for a part of its outputs at a time."""

    def __init__(self, layer: nn.Linear, factor: int) -> None:
        super().__init__()
        self.weight, self.factor = layer.weight, factor

    def forward(self, x: Tensor) -> Tensor:
        mode = poptorch.MatMulSerializationMode.OutputChannels
        return poptorch.serializedMatMul(x, self.weight.t(), mode, self.factor)


def _keep_output(module: nn.Module, inputs: Any, output: Any) -> Any:
    """A hook: recomputation begins again at this output."""
    if isinstance(output, Tensor):
        return poptorch.recomputationCheckpoint(output)
    return tuple(
        poptorch.recomputationCheckpoint(each) if isinstance(each, Tensor) else each for each in output
    )


def device_allocation(flags: Any) -> list[str]:
    """One line a block: `Layer 0    --> IPU 1`."""
    layers = [(f"Layer {index:<2}", ipu) for index, ipu in enumerate(layer_ipus(flags.layers_per_ipu))]
    blocks = [("Words", 0), ("Positions", position_ipu(flags)), *layers, ("Head", 0)]
    return [f"{name:<10} --> IPU {ipu}" for name, ipu in blocks]


def make_model(flags: Any, path: Any = None) -> GPT2:
    """A new model, or that of a checkpoint. Ends the program, if it is of another size than the flags ask for."""
    config = gpt2_config(flags)
    if path is None:
        return GPT2(config)
    theirs = GPT2Config.from_pretrained(path)
    sizes = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
    other = [
        f"{name} is {getattr(theirs, name)} there, {getattr(config, name)} here"
        for name in sizes
        if getattr(theirs, name) != getattr(config, name)
    ]
    if other:
        raise SystemExit(
            f"the checkpoint {path} is of another model: {'; '.join(other)}\n  fix: --model, --max-len"
        )
    return GPT2.from_pretrained(path, config=config, dtype=torch.float32)


@torch.no_grad()
def made_up(model: GPT2, words: list[int], count: int, seed: int) -> list[int]:
    """The words, and more after them, each drawn by the chance that the model gives it."""
    random = torch.Generator().manual_seed(seed)
    model.eval()
    for _ in range(count):
        latest = torch.tensor([words[-model.config.n_positions :]])
        chances = model(latest)[0, -1].float().softmax(-1)
        words = [*words, int(torch.multinomial(chances, 1, generator=random))]
    return words
