"""Train a small network on the points of two spirals: on one ipu, in a pipeline, or in several workers.

python3 train.py --stages 4        # what four_ipus.yaml runs
"""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path

import torch

import popdist.poptorch
import poptorch
from popdist import collectives

FIRST = popdist.getInstanceIndex() == 0
ROWS, MICRO_BATCH = 4096, 8


class Network(torch.nn.Module):
    """Four layers, spread evenly over the stages of a pipeline."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        sizes = [2, 64, 64, 64, 2]
        for layer in range(4):
            stage = layer * stages // 4
            linear = torch.nn.Linear(sizes[layer], sizes[layer + 1])
            self.add_module(f"layer{layer}", poptorch.BeginBlock(linear, f"stage{stage}", ipu_id=stage))
        self.loss = torch.nn.CrossEntropyLoss()

    def scores(self, points):
        for layer in range(3):
            points = torch.tanh(getattr(self, f"layer{layer}")(points))
        return self.layer3(points)

    def forward(self, points, sides):
        scores = self.scores(points)
        return scores, self.loss(scores, sides)


def spirals(count: int) -> torch.utils.data.TensorDataset:
    """Points [count, 2] on two arms, and on which of them each lies [count]."""
    draw = torch.Generator().manual_seed(0)
    along = torch.rand(count, generator=draw) * 3 + 0.3
    sides = torch.randint(2, (count,), generator=draw)
    angles = along * 3 + sides * torch.pi
    noise = 0.05 * torch.randn(count, 2, generator=draw)
    return torch.utils.data.TensorDataset(
        torch.stack([along * angles.cos(), along * angles.sin()], 1) + noise, sides
    )


class Share(torch.utils.data.Sampler):
    """In each epoch another order of all rows, the same in all instances; of each micro-batch of all replicas, the rows
    of this instance's replicas. So any number of instances trains on the same batches, and gives the same bits."""

    def __init__(self, rows: int, micro_batch: int, local_replicas: int) -> None:
        parts = popdist.getNumInstancesPerReplica()  # the instances of one replica read the same rows
        self.shares, self.own = popdist.getNumInstances() // parts, popdist.getInstanceIndex() // parts
        self.shape = (-1, self.shares, local_replicas * micro_batch)
        self.rows, self.draw = rows, torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return self.rows // self.shares

    def __iter__(self):
        order = torch.randperm(self.rows, generator=self.draw).reshape(self.shape)
        return iter(order[:, self.own].flatten().tolist())


def options(flags: argparse.Namespace) -> poptorch.Options:
    """Replicas from poprun, where it runs us, else from the command line."""
    if popdist.isPopdistEnvSet():
        popdist.init()
        opts = popdist.poptorch.Options(ipus_per_replica=flags.stages)
    else:
        opts = poptorch.Options().replicationFactor(flags.replicas)
    opts.randomSeed(0).deviceIterations(
        8
    )  # all instances draw the same order, and each takes its share of it
    opts.Training.gradientAccumulation(2 * flags.stages)
    return opts


def main() -> None:
    flags = arguments()
    opts = options(flags)
    torch.manual_seed(0)  # weights are not sent to other instances: all begin with the same
    model = Network(flags.stages)
    if os.environ.get("PANDO_RESTARTS", "0") != "0" and flags.checkpoint and flags.checkpoint.exists():
        model.load_state_dict(torch.load(flags.checkpoint))
        print("going on from", flags.checkpoint)
    share = Share(ROWS, MICRO_BATCH, opts.replication_factor)
    loader = poptorch.DataLoader(
        opts, spirals(ROWS), batch_size=MICRO_BATCH, sampler=share, auto_distributed_partitioning=False
    )
    trainer = poptorch.trainingModel(model, opts, poptorch.optim.AdamW(model.parameters(), lr=3e-3))
    for epoch in range(flags.epochs):
        losses = torch.cat([trainer(points, sides)[1].reshape(-1) for points, sides in loader])
        loss = collectives.all_reduce(float(losses.mean()), "mean")
        if FIRST:
            print(f"epoch {epoch + 1}: loss {loss:.4f}", flush=True)
            if flags.checkpoint:
                torch.save(model.state_dict(), flags.checkpoint)
    trainer.destroy()
    if FIRST:
        bits = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
        print("weights", hashlib.sha256(bits).hexdigest()[:16])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--stages", type=int, choices=(1, 2, 4), default=1, help="ipus of each replica")
    parser.add_argument("--replicas", type=int, default=1, help="without poprun only")
    parser.add_argument("--checkpoint", type=Path, help="kept after each epoch; read again after a restart")
    return parser.parse_args()


if __name__ == "__main__":
    main()
