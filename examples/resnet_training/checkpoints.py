"""Checkpoints: MODEL_DATA_EPOCH.pt, written by instance 0 alone, complete or not there."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def path_of(flags: argparse.Namespace, epoch: int | str) -> Path:
    return flags.checkpoint_output_dir / f"{flags.model}_{flags.data}_{epoch}.pt"


def save(path: Path, content: Mapping[str, Any]) -> None:
    """Under another name first, so that a kill leaves no half file."""
    unfinished = path.with_suffix(".unfinished")
    torch.save(dict(content), unfinished)
    os.replace(unfinished, path)


def all_in(folder: Path) -> list[Path]:
    """The checkpoints of a folder by the number of their epoch."""
    found = {path: re.fullmatch(r".+_(\d+)\.pt", path.name) for path in folder.glob("*.pt")}
    return sorted((path for path, match in found.items() if match), key=lambda path: int(found[path][1]))  # type: ignore[index]


def newest(place: Path) -> Path:
    """A file as it is; of a folder the checkpoint with the highest epoch."""
    if place.is_file():
        return place
    found = all_in(place) if place.is_dir() else []
    if not found:
        raise SystemExit(f"{place} holds no checkpoint MODEL_DATA_EPOCH.pt")
    return found[-1]


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=False)


def arguments_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that a checkpoint was made with, to be the defaults of another run."""
    return {
        name: value
        for name, value in content["args"].items()
        if name not in ("warnings", "config", "sources")
    }


def refuse_folder_in_use(folder: Path) -> None:
    used = all_in(folder) if folder.is_dir() else []
    if used:
        raise SystemExit(
            f"--checkpoint-output-dir {folder} already has {used[-1].name}: name another folder, or go on with"
            f" restore.py --checkpoint-input-path {folder}"
        )


def averaged(paths: list[Path], strategy: str, decay: float) -> dict[str, Tensor]:
    """The average of the weights in these checkpoints, made in float64.

    Args:
        strategy: "mean"; or "exponential": a ← decay · a + (1 − decay) · w, from the first one's weights on
    """
    total: dict[str, Tensor] = {}
    types: dict[str, torch.dtype] = {}
    for count, path in enumerate(paths):
        weights = load(path)["model_state_dict"]
        types = {name: value.dtype for name, value in weights.items()}
        part = 1 / (count + 1) if strategy == "mean" or not count else 1 - decay
        for name, value in weights.items():
            old = total.get(name, value.double())
            total[name] = old + part * (value.double() - old)
    return {name: value.to(types[name]) for name, value in total.items()}
