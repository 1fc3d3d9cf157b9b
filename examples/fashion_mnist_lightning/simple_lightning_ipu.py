"""Train a LightningModule on an ipu: `accelerator="ipu"` is the only word about it."""

import lightning.pytorch as pl
import torch
from images import arguments, datasets
from simple_torch_model import SimpleTorchModel
from torch import Tensor
from torch.nn.functional import nll_loss
from torch.utils.data import DataLoader


class SimpleLightning(pl.LightningModule):
    """Each epoch has `decay` times the learning rate of the one before."""

    def __init__(self, decay: float = 1.0) -> None:
        super().__init__()
        self.model, self.decay = SimpleTorchModel(), decay

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        images, labels = batch
        loss = nll_loss(self.model(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        images, labels = batch
        accuracy = (self.model(images).argmax(1) == labels).float().mean()
        self.log("accuracy", accuracy, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, self.decay)]


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
    module = SimpleLightning(decay=0.3)  # gradients of 16 rows are noisy: the first rate would end anywhere
    run.fit(module, DataLoader(train, 16, shuffle=True), DataLoader(test, 16))
    report(run)


if __name__ == "__main__":
    main()
