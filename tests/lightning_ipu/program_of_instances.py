"""A training that test_under_poprun.py runs alone and in two processes; writes what it found into the given folder."""

import json
import sys

import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning_models import Classifier, loader, made, trainer
from torch.nn import functional


class Logs(Classifier):
    def training_step(self, batch, batch_idx):
        self.log("mean", batch[0].mean(), on_step=False, on_epoch=True, sync_dist=True)
        self.log("highest", batch[0].max(), on_step=False, on_epoch=True, sync_dist=True, reduce_fx="max")
        self.log("own", batch[0].mean(), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val", functional.cross_entropy(self(x), y), sync_dist=True)


def main(folder):
    module = made(Logs)
    callbacks = [ModelCheckpoint(folder, "best", monitor="val"), EarlyStopping("val")]
    # Two replicas in all: where poprun says so, in two processes. Each reads half of the rows in one call.
    run = trainer(devices=2, max_epochs=3, enable_checkpointing=True, callbacks=callbacks)
    run.fit(module, loader(batch_size=32), loader(batch_size=32))
    found = {name: float(value) for name, value in run.callback_metrics.items()}
    found |= {"world_size": run.world_size, "steps": run.global_step}
    found |= {name: value.tolist() for name, value in module.state_dict().items()}
    with open(f"{folder}/{run.global_rank}.json", "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
