"""Small models of every kind, for a look at what a capture of them asks of a device."""

import importlib.util
from typing import Any

import torch
from torch import nn
from torch.nn import functional

IMAGE, ROWS = torch.randn(2, 8, 12, 12), torch.randn(4, 5)
LABELS = torch.randint(0, 5, (4,))
WORDS = torch.randint(0, 50, (2, 8))
SMALL: Any = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}


class Function(nn.Module):
    """A function of tensors, the first one times a weight."""

    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(1))

    def forward(self, first, *others):
        return self.function(first * self.weight, *others)


class UNet(nn.Module):
    """Down and up again, with a skip."""

    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.SiLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)

    def forward(self, x):
        down = self.down(x)
        again = functional.interpolate(self.down(down), size=down.shape[2:], mode="bilinear")
        return self.up(torch.cat([down, again], 1))


class Language(nn.Module):
    """A model of transformers, trained to guess the word that it sees."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, words, *mask):
        return self.model(words, *mask, labels=words).loss


def convolutional():
    yield (
        "conv, batch norm, pooling",
        nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.MaxPool2d(2)),
        IMAGE,
    )
    yield "u-net", UNet(), IMAGE
    yield (
        "adaptive",
        nn.Sequential(nn.AdaptiveAvgPool2d(3), nn.Conv2d(8, 4, 1), nn.AdaptiveMaxPool2d(2)),
        IMAGE,
    )
    yield "grouped", nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.InstanceNorm2d(8, affine=True)), IMAGE
    yield "one dimension", nn.Sequential(nn.Conv1d(8, 4, 3), nn.AvgPool1d(2)), IMAGE[:, :, 0]
    yield "three dimensions", nn.Sequential(nn.Conv3d(8, 4, 3), nn.MaxPool3d(2)), IMAGE.reshape(2, 8, 4, 6, 6)
    for mode in ("nearest", "bicubic", "area"):
        up = nn.Upsample(scale_factor=2) if mode == "nearest" else None
        yield mode, Function(up or (lambda x, m=mode: functional.interpolate(x, size=7, mode=m))), IMAGE
    yield "shuffled", Function(nn.Sequential(nn.PixelShuffle(2), nn.ReflectionPad2d(1))), IMAGE
    yield "local response", Function(nn.LocalResponseNorm(2)), IMAGE
    yield "half", nn.Conv2d(8, 8, 3).bfloat16(), IMAGE.bfloat16()


def activations():
    names = "ELU GELU GLU Hardsigmoid Hardswish LeakyReLU LogSigmoid LogSoftmax Mish ReLU6 RReLU SELU SiLU Softplus"
    for name in [*names.split(), "AlphaDropout", "Dropout", "Dropout2d", "Hardtanh", "Softmax", "Tanhshrink"]:
        yield name, Function(getattr(nn, name)()), IMAGE


def losses():
    signs = torch.sign(ROWS)
    for name, *given in [
        *((name, signs) for name in ("L1Loss", "MSELoss", "SmoothL1Loss", "HuberLoss", "SoftMarginLoss")),
        *((name, LABELS) for name in ("CrossEntropyLoss", "MultiMarginLoss", "NLLLoss")),
        *((name, ROWS.sigmoid()) for name in ("BCEWithLogitsLoss", "KLDivLoss", "PoissonNLLLoss")),
        ("HingeEmbeddingLoss", signs),
        ("MarginRankingLoss", ROWS + 1, signs),
        ("MultiLabelSoftMarginLoss", ROWS.sigmoid().round()),
        ("MultiLabelMarginLoss", torch.randint(0, 5, (4, 5))),
        ("CosineEmbeddingLoss", ROWS + 1, torch.ones(4)),
        ("TripletMarginLoss", ROWS + 1, ROWS - 1),
    ]:
        yield name, Function(getattr(nn, name)()), ROWS, *given
    yield (
        "BCELoss",
        Function(lambda x, y: functional.binary_cross_entropy(x.sigmoid(), y)),
        ROWS,
        ROWS.sigmoid(),
    )


def sequences():
    yield "embedding", nn.Sequential(nn.Embedding(50, 8, padding_idx=0), nn.LayerNorm(8)), WORDS
    yield "embedding bag", nn.EmbeddingBag(50, 8, mode="mean"), WORDS
    for name in ("LSTM", "GRU", "RNN"):
        yield name, getattr(nn, name)(5, 6, 2, batch_first=True, dropout=0.1), ROWS[None]
    yield (
        "encoder",
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True),
        ROWS.new_ones(2, 6, 8),
    )
    heads = torch.randn(2, 4, 6, 8)
    narrow, seen = torch.randn(2, 2, 6, 8), torch.ones(6, 6, dtype=torch.bool).tril()
    attend = functional.scaled_dot_product_attention
    yield "attention", Function(attend), heads, heads, heads
    yield "causal attention", Function(lambda *qkv: attend(*qkv, is_causal=True)), heads, heads, heads
    yield "masked attention", Function(lambda *qkv: attend(*qkv, attn_mask=seen)), heads, heads, heads
    yield "grouped attention", Function(lambda *qkv: attend(*qkv, enable_gqa=True)), heads, narrow, narrow


def numbers():
    def made(x):
        more = (
            x.new_zeros(5)
            + x.new_full((5,), 2.0)
            + torch.zeros_like(x)
            + torch.tensor([1.0])
            + torch.eye(4, 5)
        )
        return x + torch.arange(5) + torch.linspace(0, 1, 5) + torch.ones(5) + torch.full((), 0.5) + more

    def drawn(x):
        return (
            x
            + torch.rand(5)
            + torch.randn_like(x)
            + torch.randperm(5)
            + torch.bernoulli(torch.full((5,), 0.5))
        )

    yield "factories", Function(made), ROWS
    yield "draws", Function(drawn), ROWS
    yield (
        "indices",
        Function(lambda x: x[torch.tensor([0, 2])].scatter_add(1, LABELS[:2, None], x[:2, :1])),
        ROWS,
    )
    yield "sorting", Function(lambda x: x.sort(1)[0] + x.cumsum(1) + x.logsumexp(1, True)), ROWS
    yield (
        "matrices",
        Function(lambda x: torch.linalg.inv(x @ x.T + torch.eye(4)) + torch.linalg.qr(x)[0]),
        ROWS,
    )
    yield "types", Function(lambda x: x * x.to(torch.int8).float() + x.double().round().float()), ROWS


def pretrained():
    if importlib.util.find_spec("transformers") is None:
        return
    import transformers as hf

    bert = Language(hf.BertForMaskedLM(hf.BertConfig(vocab_size=50, **SMALL)))
    yield "bert", bert, WORDS
    yield "bert with a mask", bert, WORDS, WORDS.clamp(1, 1)
    gpt2 = hf.GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    yield "gpt2", Language(hf.GPT2LMHeadModel(gpt2)), WORDS
    vit = hf.ViTConfig(image_size=12, patch_size=4, num_channels=8, **SMALL)
    yield "vit", Function(hf.ViTForImageClassification(vit)), IMAGE


def everything():
    """Name, module and sample inputs of each."""
    for kind in (convolutional, activations, losses, sequences, numbers, pretrained):
        yield from kind()
