"""A residual network of 20 layers for images of 28 x 28, with the loss that trains it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        same = stride == 1 and inputs == outputs
        self.short = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.convolutions(x) + self.short(x)).relu()


class Classifier(nn.Module):
    """Scores [rows, 10], and the loss if there are labels."""

    def __init__(self, width: int = 16, blocks: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(1, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        ]
        inputs = width
        for outputs, stride in ((width, 1), (2 * width, 2), (4 * width, 2)):
            for block in range(blocks):
                layers.append(Residual(inputs, outputs, 1 if block else stride))
                inputs = outputs
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        scores = torch.log_softmax(self.layers(images), dim=1)
        return scores if labels is None else (scores, nn.functional.nll_loss(scores, labels))
