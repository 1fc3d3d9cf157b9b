"""The logbook of a training: numbers over all replicas, in training.csv, validation.csv and app.json."""

from __future__ import annotations

import argparse
import csv
import json
from typing import Any

from common.sampling import Layout

from popdist import collectives

NAMES = (
    "loss",
    "train_accuracy",
    "classification_loss",
    "smoothing_loss",
)  # of the model's outputs, in order


class Logbook:
    """Rows of training.csv; instance 0 writes them to the checkpoints' folder, if there is one."""

    def __init__(self, flags: argparse.Namespace, layout: Layout) -> None:
        self.rows: list[dict[str, Any]] = []
        is_first = layout.instance == 0
        self.folder = flags.checkpoint_output_dir if is_first else None
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "app.json").write_text(json.dumps(vars(flags), indent=2, default=str))
        self.wandb = _wandb(flags) if flags.wandb and is_first else None

    def add(
        self, done: float, iteration: int, means: list[list[float]], rates: dict[str, float], speed: float
    ) -> None:
        """A row of training.csv.

        Args:
            done:      epochs
            iteration: calls
            means:     of each call of the epoch so far: the model's outputs, over this instance's replicas
            rates:     learning rate and loss scale
            speed:     images a second by this instance's clock, since the epoch began
        """
        slowest = collectives.all_reduce(speed, "min")
        row: dict[str, Any] = {"epoch": done, "iteration": iteration}
        for name, average, batch in zip(NAMES, averages(means), averages(means[-1:]), strict=True):
            scale = 100 if name == "train_accuracy" else 1  # percent
            row |= {f"{name}_avg": scale * average, f"{name}_batch": scale * batch}
        row |= {**rates, "train_img_per_sec": slowest, "validation_accuracy": None}
        self.rows.append(row)
        if self.wandb is not None:
            self.wandb.log(row)

    def add_validation(self, epoch: int, accuracy: float) -> None:
        if self.rows:
            self.rows[-1]["validation_accuracy"] = 100 * accuracy
        if self.folder is not None:
            path = self.folder / "validation.csv"
            head = "" if path.exists() else "epoch,validation_accuracy\n"
            with path.open("a") as file:
                file.write(f"{head}{epoch},{100 * accuracy}\n")
            self.write()

    def write(self) -> None:
        if self.folder is not None and self.rows:
            with (self.folder / "training.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, list(self.rows[0]))
                writer.writeheader()
                writer.writerows(self.rows)


def averages(means: list[list[float]]) -> list[float]:
    """Over calls and instances, all of which have as many replicas."""
    return [collectives.all_reduce(sum(column) / len(column), "mean") for column in zip(*means, strict=True)]


def _wandb(flags: argparse.Namespace) -> Any:
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise SystemExit("--wandb needs the package wandb: pip install wandb") from None
    return wandb.init(project="resnet", config={name: str(value) for name, value in vars(flags).items()})
