"""Train a residual network in several instances.

poprun --num-instances=2 --num-replicas=4 python3 popdist_training.py
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import fashion
import torch
from model import Classifier
from tqdm import tqdm

import popdist.poptorch
import poptorch
from popdist import collectives


def main() -> None:
    flags = arguments()
    if popdist.isPopdistEnvSet():
        popdist.init()
        opts = popdist.poptorch.Options()
    else:
        opts = poptorch.Options().replicationFactor(flags.num_replicas)
    opts.randomSeed(flags.seed)  # all instances draw the same order, and each takes its share of it
    first = popdist.getInstanceIndex() == 0
    logging.basicConfig(
        level=logging.INFO if first else logging.WARNING, format="[%(levelname)s] %(message)s"
    )

    torch.manual_seed(flags.seed)  # weights are not sent to other instances: all begin with the same
    model = Classifier(flags.width, flags.blocks)
    train(model, opts, flags, shows=first)
    path = flags.output_dir / f"checkpoint-instance-{popdist.getInstanceIndex()}.pt"
    torch.save(model.state_dict(), path)
    validate(model, opts, flags)


def train(model: Classifier, opts: poptorch.Options, flags: argparse.Namespace, shows: bool) -> None:
    data = fashion.images_and_labels(flags.data_dir, "train")
    loader = poptorch.DataLoader(
        opts, data, batch_size=flags.batch_size, shuffle=True, num_workers=flags.dataloader_workers
    )
    optimizer = poptorch.optim.SGD(
        model.parameters(), lr=flags.learning_rate, momentum=flags.momentum, use_combined_accum=True
    )
    trainer = poptorch.trainingModel(model, opts, optimizer)
    for epoch in range(flags.epochs):
        bar = tqdm(loader, desc=f"Epoch {epoch + 1}/{flags.epochs}", disable=not shows)
        for images, labels in bar:
            _, losses = trainer(images, labels)
            bar.set_postfix(loss=f"{losses.mean():.4f}")
        logging.info("Epoch %d: Loss: %.4f", epoch + 1, losses.mean())
    trainer.destroy()


def validate(model: Classifier, opts: poptorch.Options, flags: argparse.Namespace) -> None:
    """Say how many of all test images are classified correctly; each instance looks at its share."""
    data = fashion.images_and_labels(flags.data_dir, "t10k")
    rows = flags.batch_size * opts.replication_factor * popdist.getNumInstances()
    loader = poptorch.DataLoader(opts, fashion.filled_up(data, rows), batch_size=flags.batch_size)
    inference = poptorch.inferenceModel(model.eval(), opts)
    correct = sum(int((inference(images).argmax(1) == labels).sum()) for images, labels in loader)
    inference.destroy()
    accuracy = collectives.all_reduce(float(correct)) / len(data)
    logging.info("Validation accuracy: %.4f", accuracy)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="rows of one replica's micro-batch")
    parser.add_argument("--learning-rate", type=float, default=0.001)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--num-replicas", type=int, default=4, help="without poprun only")
    parser.add_argument("--dataloader-workers", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-dir", type=Path, default=fashion.FOLDER)
    parser.add_argument("--output-dir", type=Path, default=Path("."))
    parser.add_argument("--width", type=int, default=16, help="channels of the first layers")
    parser.add_argument("--blocks", type=int, default=3, help="residual blocks of each of three sizes")
    return parser.parse_args()


if __name__ == "__main__":
    main()
