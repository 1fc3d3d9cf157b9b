"""A loss of one's own: a small network learns the sigmoid on [0, 1] by a squared error written by hand."""

import argparse

import lightning.pytorch as pl
import torch
from simple_lightning_ipu import trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import poptorch


class LearnsSigmoid(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(1, 100), nn.ReLU(), nn.Linear(100, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        x, actual = batch
        return poptorch.identity_loss((self(x) - actual) ** 2, "mean")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    pl.seed_everything(0, verbose=False)
    x = torch.rand(1000, 1)
    module = LearnsSigmoid()
    trainer(args.epochs, accelerator="ipu", devices=1).fit(
        module, DataLoader(TensorDataset(x, x.sigmoid()), batch_size=10)
    )
    points = torch.linspace(0, 1, 100).unsqueeze(1)
    with torch.no_grad():
        found = module(points)
    for pred, actual in zip(found.flatten().tolist(), points.sigmoid().flatten().tolist(), strict=True):
        print(f"pred {pred:.4f}, actual {actual:.4f}, difference {abs(pred - actual):.4f}")


if __name__ == "__main__":
    main()
