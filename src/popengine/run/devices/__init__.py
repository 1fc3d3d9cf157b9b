"""Devices: one file for each kind. `of` says which ipu is on which."""

from __future__ import annotations

from collections.abc import Callable

from .base import Device


def of(kind: str) -> Callable[[int], Device]:
    """From the number of an ipu to a new device of this kind for it.

    Raises:
        Error: there is none
    """
    if kind == "cuda":
        from .cuda import devices  # its module needs parts of torch that are slow to load

        return devices()
    return lambda ipu: Device()


def check(kind: str) -> None:
    """Raises Error, where there is no device of this kind."""
    if kind == "cuda":
        from . import cuda

        cuda.check()
