"""Models as programs have them, in small: blocks over a pipeline, dropout off, trained as plain PyTorch trains."""

from functools import partial

import pytest
import torch
from parity_runs import assert_trains_as_plain_pytorch, cut, options
from torch import nn
from torch.nn import functional

import poptorch

BY_IPU = poptorch.PipelinedExecution(poptorch.AutoStage.SameAsIpu)


def spread(*parts):
    """Each part begins the block of its ipu."""
    for ipu, part in enumerate(parts):
        poptorch.BeginBlock(part, f"ipu {ipu}", ipu_id=ipu)


class Residual(nn.Module):
    """Two convolutions with BatchNorm around which the input goes, through a projection where it must."""

    def __init__(self, narrow, wide, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(narrow, wide, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(wide, wide, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(wide), nn.BatchNorm2d(wide)
        self.relu = nn.ReLU(inplace=True)
        self.down = None
        if stride != 1 or narrow != wide:
            self.down = nn.Sequential(nn.Conv2d(narrow, wide, 1, stride, bias=False), nn.BatchNorm2d(wide))

    def forward(self, x):
        around = x if self.down is None else self.down(x)
        x = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        x += around
        return self.relu(x)


class Resnet(nn.Module):
    """Stem, three levels of residual blocks, average and classes, as ResNet-18 has them."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.level1 = nn.Sequential(Residual(4, 4, 1), Residual(4, 4, 1))
        self.level2 = nn.Sequential(Residual(4, 8, 2), Residual(8, 8, 1))
        self.level3 = nn.Sequential(Residual(8, 8, 2), Residual(8, 8, 1))
        self.pool, self.classes = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)
        spread(self.stem, self.level1, self.level2, self.level3)

    def forward(self, images, labels):
        features = self.level3(self.level2(self.level1(self.stem(images))))
        return functional.cross_entropy(
            self.classes(self.pool(features).flatten(1)), labels, label_smoothing=0.1
        )

    @staticmethod
    def data(rows):
        return [torch.randn(rows, 3, 16, 16), torch.randint(0, 5, (rows,))]


class Towers(nn.Module):
    """A mixture of two towers: words and images, each on ipus of its own; a gate weighs what they say."""

    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(13, 8)
        self.reader = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.seer = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(4 * 36, 8))
        self.gate, self.head = nn.Linear(16, 2), nn.Linear(8, 3)
        spread(self.words, self.seer, self.gate)

    def forward(self, words, images, labels):
        read = self.reader(self.words(words))
        seen = self.seer(images)
        weights = functional.softmax(self.gate(torch.cat([read, seen], 1)), 1)
        mixed = weights[:, :1] * read + weights[:, 1:] * seen
        agreement = 1 - functional.cosine_similarity(read, seen).mean()
        loss = functional.cross_entropy(self.head(mixed), labels) + 0.1 * agreement
        return poptorch.identity_loss(loss, "none")

    @staticmethod
    def data(rows):
        return [torch.randint(0, 13, (rows, 4)), torch.randn(rows, 1, 8, 8), torch.randint(0, 3, (rows,))]


@pytest.mark.parametrize("model", [Resnet, Towers])
def test_a_real_model_trains_pipelined_as_plain_pytorch_does(model):
    assert_trains_as_plain_pytorch(model, partial(torch.optim.Adam, lr=0.01), strategy=BY_IPU, updates=3)


def test_a_resnet_that_was_trained_in_a_pipeline_predicts_with_its_running_statistics():
    torch.manual_seed(0)
    user = Resnet()
    executor = poptorch.trainingModel(user, options(BY_IPU), torch.optim.SGD(user.parameters(), lr=0.1))
    executor(*Resnet.data(16))
    images, labels = Resnet.data(8)
    predictor = poptorch.inferenceModel(user.eval(), options(BY_IPU, 1, iterations=4))
    found = predictor(images, labels)
    expected = torch.stack([user(*rows).detach() for rows in cut(2, images, labels)])
    assert torch.equal(found, expected)
    assert user.stem[1].num_batches_tracked == 8
