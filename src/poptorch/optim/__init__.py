"""Torch's optimizers with PopTorch's arguments. They hold the rates; executors update the weights."""

from . import optimizers
from .optimizers import *  # noqa: F403

__all__: list[str] = []
__all__ += optimizers.__all__
