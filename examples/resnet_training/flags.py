"""Flags: built-in defaults < the named config < the command line; what has to agree is checked here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import common.flags
from agree import check
from common.flags import Flags, add_switch
from models import DEPTHS

CONFIGS = Path(__file__).with_name("configs.yml")
RENAMED = {"--checkpoint-path": "--checkpoint-output-dir", "--batch-size": "--micro-batch-size"}
REFUSED = (
    *("mixup-alpha", "cutmix-lambda-low", "cutmix-lambda-high", "cutmix-disable-prob", "half-res-training"),
    *("fine-tune-epoch", "fine-tune-lr", "fine-tune-first-trainable-layer", "use-bbox-info"),
    *("input-image-padding", "num-io-tiles", "exchange-memory-target"),
)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="ResNet training",
        description="Trains a residual network on images, in one process or under poprun.",
    )
    found.add_argument("--config", help="entry of configs.yml")
    for add in (_model, _batches, _optimizer, _numbers, _running):
        add(found)
    refused = found.add_argument_group("of the original, but not here")
    for name in REFUSED:
        refused.add_argument(
            f"--{name}", action=_Refuse, nargs="*", default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
    for old, new in (*RENAMED.items(), ("--enable-recompute", "--recompute-mode auto")):
        found.add_argument(old, action=_Renamed, nargs="?", const="auto", new=new, help=argparse.SUPPRESS)
    return found


def _model(found: argparse.ArgumentParser) -> None:
    group = found.add_argument_group("model and data")
    add = group.add_argument
    add("--model", choices=tuple(DEPTHS), default="resnet20")
    add("--width", type=int, help="channels of the first stage (16 or 64, as the papers have)")
    add(
        "--data",
        choices=("fashion-mnist", "cifar10", "imagenet", "generated", "synthetic"),
        default="fashion-mnist",
    )
    add("--data-dir", type=Path, help="folder with the four IDX files, or with CIFAR-10's batches")
    add(
        "--imagenet-data-path",
        type=Path,
        help="folder with train/<class>/*.JPEG and validation/<class>/*.JPEG",
    )
    add("--iterations", type=int, default=100, help="calls in an epoch of made-up data")
    add("--norm-type", choices=("batch", "group", "none"), default="batch")
    add("--norm-num-groups", type=int, default=32)
    add("--norm-eps", type=float, default=1e-5)
    add("--batchnorm-momentum", type=float, default=0.1)
    add("--bn-group-size", type=int, default=1, help="replicas that share the statistics of batch norm")
    _switches(group, "disable-stable-batchnorm", "enable-fast-groupnorm", "eight-bit-io")
    add("--normalization-location", choices=("host", "ipu", "none"), default="host")


def _batches(found: argparse.ArgumentParser) -> None:
    group = found.add_argument_group("batches and layout")
    add = group.add_argument
    add("--micro-batch-size", type=int, default=1)
    add("--gradient-accumulation", type=int, default=1)
    add("--replicas", type=int, default=1, help="without poprun; else poprun says how many")
    add("--device-iterations", type=int, default=1, help="weight updates in a call")
    add(
        "--pipeline-splits",
        nargs="+",
        default=[],
        metavar="NAME",
        help="begin an ipu at these: layer2/0/conv1",
    )
    add("--dataloader-worker", type=int, help="processes that load (ImageNet: cores ≤ 32; data in memory: 0)")
    add("--dataloader-rebatch-size", type=int, help="rows that a worker loads at once")
    add("--recompute-mode", choices=("none", "auto", "manual"), default="none")
    add(
        "--recompute-checkpoints",
        nargs="+",
        default=[],
        metavar="REGEX",
        help="layers whose outputs are kept",
    )
    _switches(group, "offload-optimizer", "enable-optimizer-rts")
    layouts = ("preserve", "channels_last", "auto")
    add(
        "--memory-format",
        choices=layouts,
        default="preserve",
        help="of images; auto: channels_last if pooled",
    )
    add(
        "--available-memory-proportion",
        type=float,
        nargs="+",
        default=[],
        help="recorded; one, or one an ipu",
    )


def _optimizer(found: argparse.ArgumentParser) -> None:
    add = found.add_argument_group("optimizer").add_argument
    names = ("sgd", "sgd_combined", "adamw", "rmsprop", "rmsprop_tf", "lars", "lamb")
    add("--optimizer", choices=names, default="sgd")
    add("--lr", type=float, default=0.01)
    add("--lr-per-256", type=float, help="the rate for 256 images an update: lr = this × global batch / 256")
    add("--lr-schedule", choices=("step", "cosine", "exponential", "polynomial"), default="step")
    add("--lr-decay", type=float, default=0.5)
    add("--lr-epoch-decay", type=int, nargs="*", default=[])
    add("--lr-scheduler-freq", type=float, default=0, help="changes of the rate in an epoch; 0: at each call")
    add("--warmup-epoch", type=float, default=0)
    add("--momentum", type=float, default=0.0)
    add("--weight-decay", type=float, default=1e-4, help="of tensors with two or more dimensions")
    add("--optimizer-eps", type=float, default=1e-8)
    add("--rmsprop-decay", type=float, default=0.99)
    add("--label-smoothing", type=float, default=0.0)
    add("--weight-avg-strategy", choices=("none", "mean", "exponential"), default="none")
    add("--weight-avg-exp-decay", type=float, default=0.99)
    add("--weight-avg-N", type=int, default=-1, help="checkpoints in the average; -1: all")


def _numbers(found: argparse.ArgumentParser) -> None:
    group = found.add_argument_group("numbers")
    add = group.add_argument
    add(
        "--precision", choices=("16.16", "16.32", "32.32"), default="16.16", help="of computation, of weights"
    )
    add("--loss-scaling", type=float, default=1.0)
    add(
        "--initial-loss-scaling",
        type=float,
        help="doubled up to --loss-scaling, in equal shares of the epochs",
    )
    _switches(
        group, "auto-loss-scaling", "enable-stochastic-rounding", "enable-fp-exceptions", "half-partial"
    )


def _running(found: argparse.ArgumentParser) -> None:
    group = found.add_argument_group("running")
    add = group.add_argument
    add("--epoch", type=int, default=10)
    add("--epoch-calls", type=int, help="end an epoch after so many calls")
    add("--validation-mode", choices=("none", "during", "after"), default="after")
    add("--validation-frequency", type=int, default=4, help="epochs from one validation to the next")
    add("--logs-per-epoch", type=int, default=1)
    add(
        "--checkpoint-output-dir",
        type=Path,
        help="for checkpoints, training.csv, validation.csv and app.json",
    )
    add("--checkpoint-input-dir", type=Path, help="go on from the newest checkpoint there")
    add("--checkpoint-save-freq", type=int, default=1, help="epochs from one checkpoint to the next")
    add("--model-cache-path", help="has no effect; kept for compatibility")
    add("--seed", type=int, default=42)
    add("--profile-dir", type=Path, default=Path("report"))
    _switches(group, "profile", "compile-only", "wandb", "disable-progress-bar")


def _switches(group: Any, *names: str) -> None:
    for name in names:
        add_switch(group, f"--{name}", default=False, help="")


class _Refuse(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        parser.error(f"{option_string} of the original program does not exist here: leave it out")


class _Renamed(argparse.Action):
    """An old name of a flag, with one line of warning."""

    def __init__(self, *args: Any, new: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, default=argparse.SUPPRESS)
        self.new = new

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        parser.renamed[f"{option_string} is now called {self.new}"] = None
        name, _, fixed = self.new.partition(" ")
        action = next(a for a in parser._actions if name in a.option_strings)
        value = fixed or values
        if fixed and str(values).lower() in common.flags.FALSE:
            value = "none"
        setattr(namespace, action.dest, action.type(value) if action.type else value)


def parse(words: Sequence[str] | None = None, defaults: dict[str, Any] | None = None) -> Flags:
    """The flags; `warnings` holds lines to be said.

    Args:
        defaults: what a checkpoint was made with, in place of the built-in defaults
    """
    made = parser()
    made.set_defaults(**(defaults or {}))
    made.renamed = {}  # type: ignore[attr-defined]
    flags = common.flags.parse(made, words, CONFIGS, default=None)
    flags.warnings = list(made.renamed)  # type: ignore[attr-defined]
    check(made, flags)
    return flags
