"""Small models in four parts, `a` to `d`, that know nothing of ipus. All return (output, loss)."""

import torch
from torch import Tensor, nn
from torch.nn import functional

import poptorch

BLOCKS = ("a", "b", "c", "d")
WORDS, WIDTH, LENGTH = 17, 16, 5


def annotated(model: nn.Module) -> nn.Module:
    """Each of the four parts begins the block of its name."""
    for name in BLOCKS:
        poptorch.BeginBlock(getattr(model, name), name)
    return model


class Digits(nn.Module):
    """The network of the tutorial, for images of 12 x 12."""

    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.ReLU())
        self.b = nn.Sequential(nn.Conv2d(4, 8, 3), nn.MaxPool2d(2), nn.ReLU())
        self.c = nn.Sequential(nn.Flatten(), nn.Linear(8, 16), nn.ReLU())
        self.d = nn.Linear(16, 10)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.d(self.c(self.b(self.a(images))))
        return scores, self.loss(scores, labels)

    @staticmethod
    def data(rows: int) -> list[Tensor]:
        return [torch.randn(rows, 1, 12, 12), torch.randint(0, 10, (rows,))]


class Normed(nn.Module):
    """A convolutional network with BatchNorm in two stages: its running statistics are state."""

    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.b = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(inplace=True))
        self.c = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, momentum=0.3), nn.ReLU())
        self.d = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))

    def forward(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        output = self.d(self.c(self.b(self.a(images))))
        return output, functional.mse_loss(output, targets)

    @staticmethod
    def data(rows: int) -> list[Tensor]:
        return [torch.randn(rows, 1, 8, 8), torch.randn(rows, 3)]


class Head(nn.Module):
    """Norm and scores; its weight is the embedding's."""

    def __init__(self, embedding: nn.Embedding):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.scores = nn.Linear(WIDTH, WORDS)
        self.scores.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.norm(x))


class Transformer(nn.Module):
    """Two encoder layers; the embedding's weight is the head's too: one weight in the first and last stage."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.a = nn.Embedding(WORDS, WIDTH)
        self.b = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout, batch_first=True)
        self.c = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout, batch_first=True, norm_first=True)
        self.d = Head(self.a)

    def forward(self, words: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.d(self.c(self.b(self.a(words))))
        return scores, functional.cross_entropy(scores.transpose(1, 2), targets)

    @staticmethod
    def data(rows: int) -> list[Tensor]:
        return [torch.randint(0, WORDS, (rows, LENGTH)) for _ in range(2)]


class OnTwoIpus(nn.Module):
    """Two layers, each on an ipu, with statistics and dropout between them; returns the loss only.

    tied: the layers have one weight, which both ipus use
    """

    def __init__(self, tied: bool = False, dropout: float = 0.0):
        super().__init__()
        self.a = poptorch.BeginBlock(nn.Linear(3, 3), "a", ipu_id=0)
        self.norm, self.dropout = nn.BatchNorm1d(3), nn.Dropout(dropout)
        self.b = poptorch.BeginBlock(nn.Linear(3, 3), "b", ipu_id=1)
        if tied:
            self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.dropout(self.norm(self.a(x)).relu()))
        return poptorch.identity_loss(y.square(), "mean")
