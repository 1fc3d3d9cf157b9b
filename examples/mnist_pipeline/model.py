"""The network of the example, in plain PyTorch: four blocks and a loss.

It knows nothing of ipus: `train_torch.py` trains it as it is, `train_poptorch.py` marks its blocks.
"""

from torch import Tensor, nn


def convolution(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels_in, channels_out, kernel_size=5), nn.MaxPool2d(2), nn.ReLU())


class Network(nn.Module):
    """Two convolutions, two linear layers, cross entropy."""

    def __init__(self):
        super().__init__()
        self.conv1 = convolution(1, 10)  # [n, 10, 12, 12]
        self.conv2 = convolution(10, 20)  # [n, 20, 4, 4]
        self.hidden = nn.Sequential(nn.Flatten(), nn.Linear(320, 256), nn.ReLU())
        self.head = nn.Linear(256, 10)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The ten scores of each image [n, 10]; with labels also their loss, a scalar."""
        scores = self.head(self.hidden(self.conv2(self.conv1(images))))
        if labels is None:
            return scores
        return scores, self.loss(scores, labels)
