"""Modules, data and trainers that the tests of the Lightning strategy share."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class Classifier(pl.LightningModule):
    """Two layers on rows of 8, three classes; `optimizer` takes parameters."""

    def __init__(self, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), scheduler=None):
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 3)
        self.optimizer, self.scheduler = optimizer, scheduler

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return functional.cross_entropy(self(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        return (self(x).argmax(1) == y).float().mean()

    def test_step(self, batch, batch_idx):
        return self.validation_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters())
        if self.scheduler is None:
            return optimizer
        scheduler = {"scheduler": self.scheduler(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def dataset(rows=64):
    numbers = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(rows, 8, generator=numbers), torch.randint(3, (rows,), generator=numbers)
    )


def loader(rows=64, batch_size=4, **more):
    return DataLoader(dataset(rows), batch_size=batch_size, **more)


def made(kind=Classifier, *args, **kwargs):
    torch.manual_seed(1)
    return kind(*args, **kwargs)


def trainer(accelerator="ipu", **more):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    quiet |= {"enable_progress_bar": False, "max_epochs": 1, "devices": 1}
    return pl.Trainer(accelerator=accelerator, **{**quiet, **more})


def weights(module):
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def assert_fits_as_on_the_cpu(kind=Classifier, data=loader, fits=1, optimizer=None, **more):
    """Fit a module on ipus and on the CPU; compare the weights, bit for bit. Return the modules."""
    modules = {}
    for accelerator in ("ipu", "cpu"):
        module = modules[accelerator] = made(kind, **({"optimizer": optimizer} if optimizer else {}))
        for _ in range(fits):
            arguments = {name: value() if callable(value) else value for name, value in more.items()}
            trainer(accelerator, **arguments).fit(module, data())
    assert differing(weights(modules["ipu"]), weights(modules["cpu"])) == []
    return modules


def differing(one, other):
    """The names of weights that are not equal to the last bit."""
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not torch.equal(value, other[name])]
