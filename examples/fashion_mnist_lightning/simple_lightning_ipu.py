"""Train a LightningModule on an ipu: `accelerator="ipu"` is the only word about it."""

import lightning.pytorch as pl
import torch
from images import arguments, datasets
from simple_torch_model import SimpleTorchModel
from torch import Tensor
from torch.nn.functional import nll_loss
from torch.utils.data import DataLoader


class SimpleLightning(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = SimpleTorchModel()

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        images, labels = batch
        loss = nll_loss(self.model(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        images, labels = batch
        accuracy = (self.model(images).argmax(1) == labels).float().mean()
        self.log("accuracy", accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def trainer(epochs: int, **more) -> pl.Trainer:
    """A Trainer that writes nothing to the disk."""
    return pl.Trainer(max_epochs=epochs, logger=False, enable_checkpointing=False, **more)


def report(run: pl.Trainer) -> None:
    print(f"Accuracy on test set: {float(run.callback_metrics['accuracy']):.2%}")


def main() -> None:
    parser = arguments(__doc__, epochs=3)
    parser.add_argument("--accelerator", default="ipu", help='"cpu" trains the same module without Pando')
    args = parser.parse_args()
    pl.seed_everything(0, verbose=False)
    train, test = datasets(args.data_dir)
    run = trainer(args.epochs, accelerator=args.accelerator, devices=1)
    run.fit(SimpleLightning(), DataLoader(train, 16, shuffle=True), DataLoader(test, 16))
    report(run)


if __name__ == "__main__":
    main()
