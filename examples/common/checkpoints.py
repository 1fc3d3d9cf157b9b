"""Folders `step_N` with a model in the library's format and `training_state.pt`: complete, or not there."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .logs import say

VERSION = 1  # of training_state.pt
STATE = "training_state.pt"


def check_unused(folder: str) -> None:
    """End the program, if the folder has checkpoints of another training."""
    used = sorted(Path(folder).glob("*_*/*.pt"))
    if used:
        raise SystemExit(
            f"--checkpoint-output-dir {folder} holds checkpoints already, such as {used[0]}\n"
            "  fix: name another folder, or move these away"
        )


def newest(folder: str) -> Path:
    """The checkpoint that a user means: the folder itself, if it is one, else the highest of its folders `step_N`, or
    `epoch_N` where there are none. Ends the program, if there is no checkpoint."""
    path = Path(folder)
    if not path.is_dir():
        raise SystemExit(f"--checkpoint-input-dir {folder}: there is no such folder")
    if (path / "config.json").exists():
        return path
    for kind in ("step", "epoch"):
        found = {
            int(m[1]): each for each in path.iterdir() if (m := re.fullmatch(rf"{kind}_(\d+)", each.name))
        }
        if found:
            return found[max(found)]
    raise SystemExit(
        f"--checkpoint-input-dir {folder} holds no checkpoint: neither config.json nor a folder step_N"
    )


def save(folder: str, name: str, model: Any, state: dict[str, Any]) -> None:
    """Write one checkpoint under another name, then rename it, so that a kill leaves no half of one.

    Args:
        model: a model of transformers; it may be wrapped for training
        state: what `read_state` gives back
    """
    path = Path(folder, name)
    say(f"Saving checkpoint for {name.replace('_', ' ')} to: {path}")
    unfinished = path.with_name(f".{name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    weights = {name: value.detach().clone().contiguous() for name, value in model.named_parameters()}
    model.config.save_pretrained(unfinished)
    save_file(weights, unfinished / "model.safetensors", metadata={"format": "pt"})
    torch.save({"version": VERSION, **state}, unfinished / STATE)
    os.rename(unfinished, path)


def read_state(path: Path) -> dict[str, Any]:
    """A checkpoint's `training_state.pt`. Ends the program, if it is missing or of another version."""
    file = path / STATE
    if not file.exists():
        raise SystemExit(
            f"{path} has weights but no {STATE}, so a training can't go on from it\n"
            "  fix: leave out --resume-training-from-checkpoint, to begin a new one with these weights"
        )
    state = torch.load(file, weights_only=True)
    if state.get("version") != VERSION:
        raise SystemExit(
            f"{file} is of version {state.get('version')}, and this program reads version {VERSION}"
        )
    return state
