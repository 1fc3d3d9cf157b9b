"""Optimizer state in the host's memory: on its device only while an update works on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from popengine.settings import Optimizer, Settings
from popengine.update.group_update import reads_numbers

from ..devices.base import Device
from .store import Store

State = dict[str, Tensor]

PORTION = 1 << 26  # elements of parameters whose state is on the device at the same time


class Offloading:
    """Moves one ipu's states. The steps that a rule reads as numbers are the host's anyway."""

    def __init__(self, device: Device, optimizer: Optimizer) -> None:
        self._device, self._optimizer = device, optimizer

    def moves(self, weight: Tensor, name: str) -> bool:
        """Whether this state of a parameter is in the host's memory because of the user's wish."""
        return name != "step" or not reads_numbers(self._optimizer, weight)

    def on_host(self, weight: Tensor, state: State) -> State:
        """A new state, in memory of the host that the device can read and write."""
        return {
            name: self.kept(value) if self.moves(weight, name) else value for name, value in state.items()
        }

    def kept(self, value: Tensor) -> Tensor:
        """A copy in such memory."""
        return self._device.host_empty(value.shape, value.dtype).copy_(value)

    def brought(self, weight: Tensor, state: State) -> State:
        """The state on the device."""
        return {
            name: self._device.upload(value) if self.moves(weight, name) else value
            for name, value in state.items()
        }

    def take_back(self, store: Store, key: str, values: State) -> None:
        """Write what an update has made of a parameter's state; what it has begun is added."""
        for name, value in values.items():
            if store.states[key].get(name) is not value:
                self._device.download(store.target(key, name, value), value)


def offloading_of(device: Device, settings: Settings) -> Offloading | None:
    """For optimizer state that the user wants in the host's memory, where that is another memory."""
    if settings.optimizer is None or "optimizer" not in settings.off_device or not device.is_remote:
        return None
    return Offloading(device, settings.optimizer)


def portions(names: Sequence[str], sizes: Sequence[int]) -> Iterator[list[str]]:
    """Neighbours of at most PORTION elements together."""
    some: list[str] = []
    elements = 0
    for name, size in zip(names, sizes, strict=True):
        if some and elements + size > PORTION:
            yield some
            some, elements = [], 0
        some.append(name)
        elements += size
    if some:
        yield some
