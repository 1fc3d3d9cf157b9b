"""A training of popdist.resumable that writes which rows each call has read; tests kill and stop its processes.

    python elastic_program.py FOLDER EPOCHS [HOLD...]     writes FOLDER/result-INSTANCE.pt, FOLDER/rows/CALL-INSTANCE-OF

With a word CALL-INSTANCE as HOLD, this instance waits at its call until the file FOLDER/go-HOLD exists.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import popdist.poptorch
import poptorch
from poptorch.executor.executable_file import training_state

ROWS = 192  # of 8 replicas, 2 micro-batches of 2 rows: 6 calls an epoch


class Net(nn.Module):
    """Two stages with dropout and BatchNorm; the outputs are the rows' numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x, targets, rows):
        x = self.dropout(self.norm(self.a(x)).relu())
        return rows, poptorch.identity_loss(nn.functional.mse_loss(self.b(x), targets), "mean")


def main():
    folder, epochs, holds = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if popdist.isPopdistEnvSet():
        popdist.init()
        opts = popdist.poptorch.Options()
    else:
        opts = poptorch.Options().replicationFactor(8)
        opts.Distributed.rowsByReplica(True)
    opts.randomSeed(3).showCompilationProgressBar(False).outputMode(poptorch.OutputMode.All)
    opts.Training.gradientAccumulation(2)
    x = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1))
    dataset = torch.utils.data.TensorDataset(x, x[:, :3].cos(), torch.arange(ROWS))
    mode = poptorch.DataLoaderMode[os.environ.get("MODE", "Sync")]
    loader = poptorch.DataLoader(opts, dataset, batch_size=2, shuffle=True, mode=mode)
    model = Net()
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = poptorch.trainingModel(model, opts, optimizer)
    checkpoint = popdist.Checkpoint.every(2, os.environ.get("POPDIST_CHECKPOINT_DIR", folder / "checkpoints"))
    instance, instances = popdist.getInstanceIndex(), popdist.getNumInstances()
    (folder / "rows").mkdir(exist_ok=True)
    for batch in popdist.resumable(loader, checkpoint, trainer, epochs=epochs):
        call = checkpoint.calls
        hold = f"{call}-{instance}"
        if hold in holds and not (folder / f"go-{hold}").exists():
            os.write(1, f"holds {hold} of {instances} in {os.getpid()}\n".encode())
            while not (folder / f"go-{hold}").exists():
                time.sleep(0.005)
        rows, _ = trainer(*batch)
        torch.save(rows, folder / "rows" / f"{call}-{instance}-{instances}")
    if not trainer.isCompiled():  # restored after the last call: the round before was ended late
        trainer.compile(*next(iter(loader)))
    torch.save(training_state(trainer), folder / f"result-{instance}.pt")
    loader.terminate()
    popdist.synchronize()
    restarts = os.environ.get("PANDO_RESTARTS", 0)
    os.write(1, f"instance {instance} of {instances} ends in round {restarts}\n".encode())


if __name__ == "__main__":
    main()
    os._exit(0)  # gloo's threads may take a while to end
