"""The network of these programs, in plain PyTorch: it knows of neither Lightning nor ipus."""

from torch import Tensor, nn


def convolution(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(3))


class SimpleTorchModel(nn.Module):
    """Logarithms of the probabilities [n, 10] of images [n, 1, 28, 28]; 45,290 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.the_network = nn.Sequential(
            convolution(1, 32),  # [n, 32, 8, 8]
            convolution(32, 32),  # [n, 32, 2, 2]
            nn.Flatten(),
            nn.Sequential(nn.Linear(128, 256), nn.ReLU()),
            nn.Sequential(nn.Linear(256, 10), nn.LogSoftmax(1)),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.the_network(images)
