"""The zoo: forty tiny configurations of models that others wrote, with a batch and the marks of a two-stage pipeline.

A model is made with its library's own classes, and none is changed. What has no loss of its own gets one by `WithLoss`.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS, LENGTH, CLASSES, PIXELS = 31, 8, 5, 32
Batch = dict[str, Any]  # the arguments of a call: tensors, and constants


@dataclass(frozen=True)
class Configuration:
    """One model of the zoo.

    Args:
        make:    returns a new model, for a dropout probability
        batch:   returns the arguments of a call, for a number of rows
        marks:   what places the second stage from outside, as `poptorch.annotate` takes it
        library: the package that the model is of
    """

    make: Callable[[float], nn.Module]
    batch: Callable[[int], Batch]
    marks: dict[str, int]
    library: str


class WithLoss(nn.Module):
    """A model and the loss of its output."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, target: Tensor, **inputs: Tensor) -> Tensor:
        return self.loss(self.model(**inputs), target)


def words(rows: int) -> Batch:
    ids = torch.randint(2, WORDS, (rows, LENGTH))
    return {"input_ids": ids, "labels": ids.clone()}


def masked_words(rows: int) -> Batch:
    """Rows of different lengths: the mask leaves out their ends."""
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (rows, 1))
    return {**words(rows), "attention_mask": (torch.arange(LENGTH) < lengths).long()}


def spans(rows: int) -> Batch:
    ids = words(rows)["input_ids"]
    places = torch.randint(0, LENGTH, (2, rows))
    return {"input_ids": ids, "start_positions": places[0], "end_positions": places[1]}


def images(rows: int) -> Batch:
    return {"pixel_values": torch.randn(rows, 3, PIXELS, PIXELS), "labels": torch.randint(CLASSES, (rows,))}


def images_of_timm(rows: int) -> Batch:
    return {"x": torch.randn(rows, 3, PIXELS, PIXELS), "target": torch.randint(CLASSES, (rows,))}


def sounds(rows: int) -> Batch:
    return {"input_features": torch.randn(rows, 8, 32), "labels": torch.randint(2, WORDS, (rows, LENGTH))}


def waves(rows: int) -> Batch:
    return {"input_values": torch.randn(rows, 400), "labels": torch.randint(0, CLASSES, (rows,))}


def images_with_words(rows: int) -> Batch:
    pixels = images(rows)["pixel_values"]
    return {"input_ids": words(rows)["input_ids"], "pixel_values": pixels, "return_loss": True}


def noisy_images(rows: int) -> Batch:
    return {
        "sample": torch.randn(rows, 3, 16, 16),
        "timestep": torch.randint(0, 1000, (rows,)),
        "target": torch.randn(rows, 3, 16, 16),
    }


def noisy_images_with_words(rows: int) -> Batch:
    return {**noisy_images(rows), "encoder_hidden_states": torch.randn(rows, LENGTH, 8)}


def noisy_images_with_classes(rows: int) -> Batch:
    return {**noisy_images(rows), "class_labels": torch.randint(CLASSES, (rows,))}


def vectors(rows: int) -> Batch:
    return {"input": torch.randn(rows, LENGTH, 16), "target": torch.randn(rows, LENGTH, 16)}


def pairs(rows: int) -> Batch:
    return {name: torch.randn(rows, LENGTH, 16) for name in ("src", "tgt", "target")}


# ---- transformers ----------------------------------------------------------------------------------------

# Sizes of all configurations: each class reads those that it has, also under other names (`attribute_map`).
TINY = dict(
    hidden_size=16,
    embedding_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    vocab_size=WORDS,
    max_position_embeddings=16,
    bos_token_id=0,
    eos_token_id=0,
    pad_token_id=1,
    decoder_start_token_id=0,
    image_size=PIXELS,
    patch_size=8,
    num_labels=CLASSES,
)
DECODER_OF_TWO = dict(decoder_layers=2, decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32)


def of_transformers(
    head: str, mark: str, batch: Callable[[int], Batch] = words, **more: Any
) -> Configuration:
    """Return a tiny model of transformers, whose second stage begins at the module `mark`."""

    def make(dropout: float) -> nn.Module:
        import transformers

        kind = getattr(transformers, head)
        config = kind.config_class(**{**TINY, **more})
        for name in config.to_dict():
            if re.search("dropout|pdrop|drop_path", name):
                setattr(config, name, dropout)
        return kind(config)

    return Configuration(make, batch, {mark: 1}, "transformers")


def decoder(name: str, batch: Callable[[int], Batch] = words, **more: Any) -> Configuration:
    """A language model whose parts are named as Llama's are; two heads of queries have one of keys."""
    return of_transformers(f"{name}ForCausalLM", "model.layers.1", batch, num_key_value_heads=1, **more)


def clip(dropout: float) -> nn.Module:
    """Return two towers with one contrastive loss."""
    import transformers

    tower = {**TINY, "attention_dropout": dropout}
    return transformers.CLIPModel(
        transformers.CLIPConfig(text_config=tower, vision_config=tower, projection_dim=8)
    )


# ---- timm, diffusers, torch ------------------------------------------------------------------------------


def of_timm(name: str, marks: dict[str, int], **more: Any) -> Configuration:
    def make(dropout: float) -> nn.Module:
        model = timm().create_model(name, num_classes=CLASSES, drop_rate=dropout, **more)
        return WithLoss(model, functional.cross_entropy)

    marks = {f"model.{key}": ipu for key, ipu in marks.items()}
    return Configuration(make, images_of_timm, marks, "timm")


def timm() -> Any:
    """Import timm; where torchvision is missing, with empty classes in place of its norms and transforms of images."""
    if importlib.util.find_spec("torchvision") is None:
        finder = _Torchvision()
        sys.meta_path.append(finder)
        try:
            import timm
            import timm.data
        finally:
            sys.meta_path.remove(finder)
            for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
                del sys.modules[name]
    import timm

    return timm


class _Torchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds any module of torchvision, as one in which any name is an empty class."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.split(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Stub(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Names(name, (), {})


class _Names(type):
    """A class with any name as a text."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


def of_diffusers(
    name: str, marks: dict[str, int], batch: Callable[[int], Batch], **more: Any
) -> Configuration:
    def make(dropout: float) -> nn.Module:
        import diffusers

        model = getattr(diffusers, name)(**{**more, "dropout": dropout})
        return WithLoss(model, lambda output, target: functional.mse_loss(output.sample, target))

    return Configuration(make, batch, {f"model.{key}": ipu for key, ipu in marks.items()}, "diffusers")


class Recurrent(nn.Module):
    """Two recurrent layers, one after another, and a projection."""

    def __init__(self, kind: type[nn.RNNBase], dropout: float) -> None:
        super().__init__()
        self.first, self.second = (kind(16, 16, batch_first=True) for _ in range(2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, input: Tensor) -> Tensor:
        return self.second(self.dropout(self.first(input)[0]))[0]


def recurrent(kind: type[nn.RNNBase]) -> Configuration:
    return Configuration(
        lambda dropout: WithLoss(Recurrent(kind, dropout), functional.mse_loss),
        vectors,
        {"model.second": 1},
        "torch",
    )


def torch_transformer(dropout: float) -> nn.Module:
    model = nn.Transformer(16, 2, 2, 2, 32, dropout, batch_first=True)
    return WithLoss(model, functional.mse_loss)


ZOO: dict[str, Configuration] = {
    "bert": of_transformers("BertForMaskedLM", "bert.encoder.layer.1", masked_words),
    "bert, questions": of_transformers(
        "BertForQuestionAnswering", "bert.encoder.layer.1", spans, num_labels=2
    ),
    "roberta": of_transformers("RobertaForMaskedLM", "roberta.encoder.layer.1", masked_words),
    "deberta": of_transformers(
        "DebertaV2ForMaskedLM",
        "deberta.encoder.layer.1",
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
    ),
    "electra": of_transformers("ElectraForMaskedLM", "electra.encoder.layer.1"),
    "albert": of_transformers("AlbertForMaskedLM", "predictions"),
    "distilbert": of_transformers("DistilBertForMaskedLM", "distilbert.transformer.layer.1", hidden_dim=32),
    "gpt2": of_transformers("GPT2LMHeadModel", "transformer.h.1", masked_words),
    "gpt-neox": of_transformers("GPTNeoXForCausalLM", "gpt_neox.layers.1"),
    "opt": of_transformers("OPTForCausalLM", "model.decoder.layers.1", ffn_dim=32, word_embed_proj_dim=16),
    "bloom": of_transformers("BloomForCausalLM", "transformer.h.1"),
    "phi": decoder("Phi"),
    "llama": decoder("Llama", masked_words),
    "mistral": decoder("Mistral", sliding_window=4),
    "qwen2": decoder("Qwen2"),
    "qwen3": decoder("Qwen3", head_dim=8),
    "gemma": decoder("Gemma", head_dim=8),
    "gemma2": decoder("Gemma2", head_dim=8, sliding_window=4),
    "olmo2": decoder("Olmo2"),
    "mixtral": decoder("Mixtral", num_local_experts=4, output_router_logits=True),
    "qwen2-moe": decoder(
        "Qwen2Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1
    ),
    "mamba": of_transformers("MambaForCausalLM", "backbone.layers.1", state_size=4),
    "t5": of_transformers(
        "T5ForConditionalGeneration", "decoder", masked_words, d_kv=8, d_ff=32, num_decoder_layers=2
    ),
    "bart": of_transformers("BartForConditionalGeneration", "model.decoder", masked_words, **DECODER_OF_TWO),
    "pegasus": of_transformers("PegasusForConditionalGeneration", "model.decoder", **DECODER_OF_TWO),
    "whisper": of_transformers(
        "WhisperForConditionalGeneration",
        "model.decoder",
        sounds,
        **DECODER_OF_TWO,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
    ),
    "wav2vec2": of_transformers(
        "Wav2Vec2ForSequenceClassification",
        "wav2vec2.encoder.layers.1",
        waves,
        conv_dim=(8, 8),
        conv_stride=(5, 4),
        conv_kernel=(10, 4),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        classifier_proj_size=8,
        apply_spec_augment=False,
        layerdrop=0.0,
    ),
    "vit": of_transformers("ViTForImageClassification", "vit.layers.1", images),
    "swin": of_transformers(
        "SwinForImageClassification",
        "swin.encoder.layers.1",
        images,
        patch_size=4,
        embed_dim=8,
        depths=[2, 2],
        num_attention_heads=[2, 2],
        window_size=4,
    ),
    "convnext": of_transformers(
        "ConvNextForImageClassification",
        "convnext.encoder.stages.1",
        images,
        patch_size=4,
        hidden_sizes=[8, 16],
        depths=[2, 2],
    ),
    "resnet": of_transformers(
        "ResNetForImageClassification",
        "resnet.encoder.stages.1",
        images,
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
    ),
    "clip": Configuration(clip, images_with_words, {"text_model": 1}, "transformers"),
    "timm vit": of_timm("test_vit", {"blocks.3": 1}, img_size=PIXELS),
    "timm resnet": of_timm("test_resnet", {"layer3": 1}),
    "timm efficientnet": of_timm("test_efficientnet", {"blocks.2": 1}),
    "timm convnext": of_timm("test_convnext", {"stages.2": 1}),
    "diffusers unet": of_diffusers(
        "UNet2DModel",
        {"mid_block": 1},
        noisy_images,
        sample_size=16,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=4,
    ),
    "diffusers unet, conditioned": of_diffusers(
        "UNet2DConditionModel",
        {"mid_block": 1},
        noisy_images_with_words,
        sample_size=16,
        in_channels=3,
        out_channels=3,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=4,
        cross_attention_dim=8,
    ),
    "torch transformer": Configuration(torch_transformer, pairs, {"model.decoder": 1}, "torch"),
    "torch lstm": recurrent(nn.LSTM),
}
