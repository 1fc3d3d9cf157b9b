"""Fashion-MNIST from its four files, as pairs of an image [1, 28, 28] in [-1, 1] and a label. Nothing is downloaded."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

FOLDER = Path("/usr/share/datasets/fashion-mnist")
NO_LABEL = -1  # of the rows that fill up the last batch


def images_and_labels(folder: Path, part: str) -> TensorDataset:
    """One of the parts "train" and "t10k"."""
    images = torch.from_numpy(_read(folder, f"{part}-images-idx3-ubyte", 16)).view(-1, 1, 28, 28)
    labels = torch.from_numpy(_read(folder, f"{part}-labels-idx1-ubyte", 8))
    return TensorDataset(images.float() / 127.5 - 1, labels.long())


def filled_up(data: TensorDataset, multiple: int) -> TensorDataset:
    """The same rows and blank ones, so that full batches hold all of them."""
    images, labels = data.tensors
    missing = -len(labels) % multiple
    blank, none = images.new_zeros(missing, *images.shape[1:]), labels.new_full((missing,), NO_LABEL)
    return TensorDataset(torch.cat([images, blank]), torch.cat([labels, none]))


def _read(folder: Path, name: str, header: int) -> np.ndarray:
    for path, opened in ((folder / name, open), (folder / f"{name}.gz", gzip.open)):
        if path.exists():
            with opened(path, "rb") as file:
                return np.frombuffer(bytearray(file.read()[header:]), np.uint8)
    raise FileNotFoundError(
        f"{folder} holds neither {name} nor {name}.gz\n"
        "  fix: apt install dataset-fashion-mnist, or --data-dir with the four files of Fashion-MNIST"
    )
