"""BERT for pretraining: the library's class, a head that sees only masked words, and its layers on ipus."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForPreTraining

import poptorch

IGNORED = 0  # label of positions that only fill up a row; as a word it is [PAD]


def bert_config(flags: Any) -> BertConfig:
    return BertConfig(
        vocab_size=flags.vocab_size,
        hidden_size=flags.hidden_size,
        num_hidden_layers=flags.num_hidden_layers,
        num_attention_heads=flags.num_attention_heads,
        intermediate_size=4 * flags.hidden_size,
        layer_norm_eps=flags.layer_norm_eps,
        hidden_dropout_prob=flags.hidden_dropout_prob,
        attention_probs_dropout_prob=flags.attention_probs_dropout_prob,
        initializer_range=flags.initializer_range,
        attn_implementation="sdpa",
    )


class Bert(BertForPreTraining):
    """Names and shapes of its weights are the library's, however it is laid out."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.hooks: list[Any] = []

    def _init_weights(self, module: nn.Module) -> None:
        """Linear layers and embeddings from N(0, initializer range), cut off at two standard deviations."""
        super()._init_weights(module)
        if isinstance(module, nn.Linear | nn.Embedding):
            std = self.config.initializer_range
            nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            nn.init.zeros_(module.weight[module.padding_idx])

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor,
        masked_lm_positions: Tensor,
        masked_lm_labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Args:
            input_ids, attention_mask, token_type_ids: [n, L]
            masked_lm_positions, masked_lm_labels: [n, P]
            next_sentence_label: [n, 1]
        Returns: total loss, loss and accuracy of both tasks, as `losses`; without labels the scores of the masked
            words [n, P, vocab] and of the two answers [n, 2]
        """
        hidden, pooled = self.bert(
            input_ids, attention_mask=attention_mask[:, None, None, :].bool(), token_type_ids=token_type_ids
        )[:2]
        words, answers = self.cls(at_positions(hidden, masked_lm_positions), pooled)
        if masked_lm_labels is None or next_sentence_label is None:
            return words, answers
        return losses(words, answers, masked_lm_labels, next_sentence_label.flatten())

    def parallelize(self, flags: Any) -> Bert:
        """Say which ipu runs which part. The heads come back to ipu 0, where the words are that they share."""
        if flags.embedding_serialization_factor > 1:
            self.cls.predictions.decoder = SerializedLinear(
                self.cls.predictions.decoder, flags.embedding_serialization_factor
            )
        ipus = layer_ipus(flags.layers_per_ipu)
        poptorch.BeginBlock(self.bert.embeddings, "Embedding", ipu_id=0)
        for index, (layer, ipu) in enumerate(zip(self.bert.encoder.layer, ipus, strict=True)):
            poptorch.BeginBlock(layer, f"Encoder{index}", ipu_id=ipu)
            if flags.recompute_checkpoint_every_layer:
                self.hooks.append(layer.register_forward_hook(_keep_output))
        poptorch.BeginBlock(self.bert.pooler, "Pooler", ipu_id=0)
        poptorch.BeginBlock(self.cls, "Classifier", ipu_id=0)
        return self

    def deparallelize(self) -> Bert:
        """Undo `parallelize`."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        poptorch.removeBlocks(self)
        if isinstance(self.cls.predictions.decoder, SerializedLinear):
            self.cls.predictions.decoder = self.cls.predictions.decoder.plain()
        return self


class SerializedLinear(nn.Module):
    """A linear layer with the weights of another one, computed for a part of its outputs at a time."""

    def __init__(self, layer: nn.Linear, factor: int) -> None:
        super().__init__()
        self.weight, self.bias, self.factor = layer.weight, layer.bias, factor

    def forward(self, x: Tensor) -> Tensor:
        mode = poptorch.MatMulSerializationMode.OutputChannels
        return poptorch.serializedMatMul(x, self.weight.t(), mode, self.factor) + self.bias

    def plain(self) -> nn.Linear:
        layer = nn.Linear(*reversed(self.weight.shape), device="meta")
        layer.weight, layer.bias = self.weight, self.bias
        return layer


def layer_ipus(layers_per_ipu: list[int]) -> list[int]:
    """The ipu of each layer."""
    return [ipu for ipu, layers in enumerate(layers_per_ipu) for _ in range(layers)]


def at_positions(hidden: Tensor, positions: Tensor) -> Tensor:
    """The rows [n, P, H] of `hidden` [n, L, H] at `positions` [n, P]: a product, since IPUs were slow at gathering."""
    chosen = nn.functional.one_hot(positions, hidden.shape[1]).to(hidden.dtype).detach()
    return chosen @ hidden


def losses(words: Tensor, answers: Tensor, labels: Tensor, next_sentence: Tensor) -> tuple[Tensor, ...]:
    """Total loss, then masked-word loss, next-sentence loss, and the accuracy of both; all float32.

    Args: words [n, P, vocab], answers [n, 2], labels [n, P] (`IGNORED` where there is none), next_sentence [n]
    """
    words, answers = words.float(), answers.float()
    mlm_loss = nn.functional.cross_entropy(words.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    nsp_loss = nn.functional.cross_entropy(answers, next_sentence)
    counted = labels != IGNORED
    correct = (words.argmax(-1) == labels) & counted
    mlm_acc = (correct.sum(-1).float() / counted.sum(-1).float()).mean()
    nsp_acc = (answers.argmax(-1) == next_sentence).float().mean()
    total = poptorch.identity_loss(mlm_loss + nsp_loss, reduction="none")
    return total, mlm_loss, nsp_loss, mlm_acc, nsp_acc


def _keep_output(module: nn.Module, inputs: Any, output: Any) -> Any:
    """A hook: recomputation begins again at this output."""
    if isinstance(output, Tensor):
        return poptorch.recomputationCheckpoint(output)
    return tuple(
        poptorch.recomputationCheckpoint(each) if isinstance(each, Tensor) else each for each in output
    )


def device_allocation(flags: Any) -> list[str]:
    """One line a block: `Encoder 0  --> IPU 1`."""
    encoders = [(f"Encoder {index:<2}", ipu) for index, ipu in enumerate(layer_ipus(flags.layers_per_ipu))]
    blocks = [("Embedding", 0), *encoders, ("Pooler", 0), ("Classifier", 0)]
    return [f"{name:<10} --> IPU {ipu}" for name, ipu in blocks]


def weights_of(path: Any, config: BertConfig) -> Bert:
    """The model of a checkpoint. Ends the program, if the checkpoint is of another size than the flags ask for."""
    theirs = BertConfig.from_pretrained(path)
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    other = [
        f"--{name.replace('_', '-')} {getattr(config, name)}, but there it is {getattr(theirs, name)}"
        for name in sizes
        if getattr(config, name) != getattr(theirs, name)
    ]
    if other:
        raise SystemExit(f"the checkpoint {path} is of another model: {'; '.join(other)}")
    model = Bert.from_pretrained(path, config=config, dtype=torch.float32)
    assert isinstance(model, Bert)
    return model
