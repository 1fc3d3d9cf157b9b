"""ImageNet from folders: DIR/train/<class>/*.JPEG and DIR/validation/<class>/*.JPEG, classes in sorted order.

Or from tar files: DIR/train/*.tar with members KEY.jpg and KEY.cls, the number of the class as text. They are not
unpacked: where each image lies is read once, at the start.
"""

from __future__ import annotations

import io
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from images import IMAGENET_DEVIATION, IMAGENET_MEAN, Images, draws
from torch import Tensor

SIZE, VALIDATION_SIZE = 224, 256
SUFFIXES = (".jpeg", ".jpg", ".png")


class File(NamedTuple):
    """Where an image lies: a file from `start` on, `size` bytes (-1: to its end)."""

    path: Path
    start: int = 0
    size: int = -1

    def read(self) -> io.BytesIO:
        with self.path.open("rb") as file:
            file.seek(self.start)
            return io.BytesIO(file.read(self.size))


@dataclass
class Folders(Images):
    """Images in files, which are read when they are asked for. `pixels` is empty.

    Training: a crop of 8 % to 100 % of the area, of shape 3:4 to 4:3, and half of them mirrored. Else: the middle of
    the image whose shorter side has 256 pixels.
    """

    files: tuple[File, ...] = ()
    augments: bool = False

    def __getitems__(self, keys: list[int]) -> tuple[Tensor, Tensor]:
        places = np.asarray(keys, np.int64) % len(self.labels)
        random = draws(self.seed, keys) / 2.0**64
        pixels = [self._read(self.files[place], row) for place, row in zip(places, random, strict=True)]
        return self.formed(torch.from_numpy(np.stack(pixels))), torch.from_numpy(self.labels[places])

    def _read(self, file: File, random: np.ndarray) -> np.ndarray:
        from PIL import Image

        with Image.open(file.read()) as opened:
            image = opened.convert("RGB")
        if self.augments:
            image = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, _part(image.size, random))
        else:
            ratio = VALIDATION_SIZE / min(image.size)
            width, height = (round(side * ratio) for side in image.size)
            left, top = (width - SIZE) // 2, (height - SIZE) // 2
            image = image.resize((width, height), Image.Resampling.BILINEAR)
            image = image.crop((left, top, left + SIZE, top + SIZE))
        pixels = np.asarray(image).transpose(2, 0, 1)
        mirrored = self.augments and int(random[0] * 2**32) % 2
        return np.ascontiguousarray(pixels[:, :, ::-1] if mirrored else pixels)


def _part(size: tuple[int, int], random: np.ndarray) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a random part of an image of this size."""
    width, height = size
    area, shape = 0.08 + 0.92 * random[0], (4 / 3) ** (2 * random[1] - 1)
    wide = min(width, (area * width * height * shape) ** 0.5)
    high = min(height, (area * width * height / shape) ** 0.5)
    left, top = (width - wide) * random[2], (height - high) * ((random[2] * 1e6) % 1)
    return left, top, left + wide, top + high


def open_part(folder: Path, part: str, augments: bool) -> Folders:
    """A part of ImageNet, "train" or "validation".

    Raises: SystemExit, if a folder, an image or the package Pillow is missing
    """
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise SystemExit("--data imagenet needs the package Pillow: pip install pillow") from None
    if not (folder / part).is_dir():
        raise SystemExit(f"--imagenet-data-path {folder} has no folder {part}")
    shards = sorted((folder / part).glob("*.tar"))
    found, classes = _in_shards(shards) if shards else _in_folders(folder / part)
    if not found:
        raise SystemExit(
            f"{folder / part} has no images <class>/*.JPEG, and no *.tar with KEY.jpg and KEY.cls"
        )
    files, labels = zip(*found, strict=True)
    empty = np.empty((0, 3, SIZE, SIZE), np.uint8)
    made = Folders(empty, np.array(labels, np.int64), IMAGENET_MEAN, IMAGENET_DEVIATION, classes)
    made.files, made.augments = files, augments
    return made


def _in_folders(folder: Path) -> tuple[list[tuple[File, int]], int]:
    """Images with their classes, and the number of classes."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    found = [
        (File(path), label)
        for label, one in enumerate(classes)
        for path in sorted(one.iterdir())
        if path.suffix.lower() in SUFFIXES
    ]
    return found, len(classes)


def _in_shards(shards: list[Path]) -> tuple[list[tuple[File, int]], int]:
    found: list[tuple[File, int]] = []
    for shard in shards:
        with tarfile.open(shard) as tar:
            members = {member.name: member for member in tar if member.isfile()}
            for name, member in members.items():
                key, _, kind = name.rpartition(".")
                if f".{kind.lower()}" not in SUFFIXES:
                    continue
                label = tar.extractfile(members[f"{key}.cls"]) if f"{key}.cls" in members else None
                if label is None:
                    raise SystemExit(f"{shard} has {name}, but no {key}.cls with its class")
                found.append((File(shard, member.offset_data, member.size), int(label.read())))
    return found, max((label for _, label in found), default=0) + 1
