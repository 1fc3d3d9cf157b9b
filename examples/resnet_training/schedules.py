"""Rates that change while a training goes on, as functions of the epochs that are done (a fraction)."""

from __future__ import annotations

import argparse
import math


def learning_rate(flags: argparse.Namespace, done: float, call: float) -> float:
    """The rate of the next call.

    step:         times the decay at each epoch of --lr-epoch-decay
    exponential:  lr · decay^e
    cosine:       lr / 2 · (1 + cos(π·e/E))
    polynomial:   lr · (1 − e/E)², the usual one with LARS
    During the first w epochs it is e/w of that; the first call, where e is 0, takes the rate of the second one.

    Args:
        done: epochs before this call
        call: epochs that one call takes
    """
    ticks = flags.lr_scheduler_freq
    e, total = (math.floor(done * ticks + 1e-9) / ticks if ticks else done), flags.epoch
    factor = {
        "step": lambda: flags.lr_decay ** sum(e >= epoch for epoch in flags.lr_epoch_decay),
        "exponential": lambda: flags.lr_decay**e,
        "cosine": lambda: (1 + math.cos(math.pi * e / total)) / 2,
        "polynomial": lambda: (1 - e / total) ** 2,
    }[flags.lr_schedule]()
    warm = flags.warmup_epoch
    return flags.lr * factor * (min(1.0, max(done, call) / warm) if warm else 1.0)


def loss_scaling(flags: argparse.Namespace, epoch: int) -> float:
    """Doubled from the initial to the final value in equal shares of the epochs: 16, 32, 64, 128, a quarter each."""
    first, last = flags.initial_loss_scaling, flags.loss_scaling
    if first is None:
        return last
    doublings = round(math.log2(last / first))
    return first * 2 ** min(doublings, epoch * (doublings + 1) // flags.epoch)
