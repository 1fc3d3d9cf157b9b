"""BERT for pretraining: the library's class, a head that sees only masked words, and its layers on ipus."""

from __future__ import annotations

from typing import Any

import torch
from common.placement import layer_ipus
from torch import Tensor, nn
from transformers import BertConfig, BertForPreTraining

import poptorch

IGNORED = 0  # label of positions that only fill up a row; as a word it is [PAD]
NO_SEQUENCE = -100  # label of a sequence that a packed row does not have


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


class PackedBert(Bert):
    """BERT on rows that hold several sequences; see `packing`."""

    def __init__(self, config: BertConfig, most: int = 3) -> None:
        super().__init__(config)
        self.bert.pooler = LastPooler(self.bert.pooler, most)

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor,
        position_ids: Tensor,
        masked_lm_positions: Tensor,
        masked_lm_labels: Tensor,
        masked_lm_mask: Tensor,
        next_sentence_labels: Tensor,
        next_sentence_mask: Tensor,
    ) -> tuple[Tensor, ...]:
        """Returns: what `Bert` returns, and the mean number of sequences in a row."""
        same = attention_mask[:, None, :, None] == attention_mask[:, None, None, :]
        hidden, pooled = self.bert(
            input_ids, attention_mask=same, token_type_ids=token_type_ids, position_ids=position_ids
        )[:2]
        words, answers = self.cls(at_positions(hidden, masked_lm_positions), pooled)
        labels = masked_lm_labels.where(masked_lm_mask > 0, IGNORED)
        following = next_sentence_labels.where(next_sentence_mask > 0, NO_SEQUENCE)
        sequences = next_sentence_mask.sum(-1).float().mean()
        return *losses(words, answers.flatten(0, 1), labels, following.flatten()), sequences


class LastPooler(nn.Module):
    """A pooler of the last positions, where packed rows have the [CLS] of their sequences."""

    def __init__(self, pooler: nn.Module, most: int) -> None:
        super().__init__()
        self.dense, self.activation, self.most = pooler.dense, pooler.activation, most

    def forward(self, hidden: Tensor) -> Tensor:
        return self.activation(self.dense(hidden[:, -self.most :]))


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


def at_positions(hidden: Tensor, positions: Tensor) -> Tensor:
    """The rows [n, P, H] of `hidden` [n, L, H] at `positions` [n, P]: a product, since IPUs were slow at gathering."""
    chosen = nn.functional.one_hot(positions, hidden.shape[1]).to(hidden.dtype).detach()
    return chosen @ hidden


def losses(words: Tensor, answers: Tensor, labels: Tensor, next_sentence: Tensor) -> tuple[Tensor, ...]:
    """Total loss, then masked-word loss, next-sentence loss, and the accuracy of both; all float32.

    Args: words [n, P, vocab], labels [n, P] (`IGNORED` where there is none), answers [m, 2], next_sentence [m]
        (`NO_SEQUENCE` where there is none)
    """
    words, answers = words.float(), answers.float()
    mlm_loss = nn.functional.cross_entropy(words.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    nsp_loss = nn.functional.cross_entropy(answers, next_sentence, ignore_index=NO_SEQUENCE)
    counted = labels != IGNORED
    correct = (words.argmax(-1) == labels) & counted
    mlm_acc = (correct.sum(-1).float() / counted.sum(-1).float()).mean()
    right = (answers.argmax(-1) == next_sentence).sum().float()
    nsp_acc = right / (next_sentence != NO_SEQUENCE).sum().float()
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


def make_model(flags: Any, path: Any = None) -> Bert:
    """A new model, or that of a checkpoint. Ends the program, if it is of another size than the flags ask for."""
    config = bert_config(flags)
    kind, arguments = (PackedBert, (flags.max_sequences_per_pack,)) if flags.packed_data else (Bert, ())
    if path is None:
        return kind(config, *arguments)
    theirs = BertConfig.from_pretrained(path)
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    other = [
        f"--{name.replace('_', '-')} {getattr(config, name)}, but there it is {getattr(theirs, name)}"
        for name in sizes
        if getattr(config, name) != getattr(theirs, name)
    ]
    if other:
        raise SystemExit(f"the checkpoint {path} is of another model: {'; '.join(other)}")
    model = kind.from_pretrained(path, *arguments, config=config, dtype=torch.float32)
    assert isinstance(model, Bert)
    return model
