"""Weights & Biases, where a user asks for it: the package is not needed otherwise."""

from __future__ import annotations

from typing import Any


class Tracking:
    """Logs each step's numbers, and every so many steps the weights. Does nothing without --wandb."""

    def __init__(self, flags: Any, project: str, shows: bool) -> None:
        self.wandb: Any = None
        if not flags.wandb:
            return
        try:
            import wandb
        except ImportError:
            raise SystemExit(
                "--wandb needs the package wandb\n  fix: pip install wandb, or leave out --wandb"
            ) from None
        self.every = flags.wandb_param_steps
        if shows:  # instance 0 alone
            self.wandb = wandb
            wandb.init(
                project=project,
                config={name: value for name, value in vars(flags).items() if name != "sources"},
            )

    def step(self, step: int, numbers: dict[str, float], model: Any) -> None:
        if self.wandb is None:
            return
        weights = {}
        if self.every and step % self.every == 0:
            weights = {
                name: self.wandb.Histogram(p.detach().float().numpy()) for name, p in model.named_parameters()
            }
        self.wandb.log({**numbers, **weights}, step=step)
