"""The options of the device: which one, when it is taken, and how much of its memory is used."""

from __future__ import annotations

import os
from numbers import Real
from typing import Self

from poptorch.enums import ConnectionType, SyncPattern
from poptorch.options.base import OptionsDict

DEVICES = ("cpu", "cuda")


class DeviceOptions(OptionsDict):
    def device(self, kind: str) -> Self:
        """What the ipus are (not in PopTorch): places on the "cpu", or streams of the GPUs of "cuda". Wins over the
        environment variable POPTORCH_DEVICE; without either it is the CPU.
        """
        assert kind in DEVICES, f"device takes one of {', '.join(DEVICES)}; found {kind!r}"
        return self.createOrSet(device_kind=kind)

    def autoRoundNumIPUs(self, auto_round_num_ipus: bool = True) -> Self:
        """Recorded: on an IPU system, reserve more ipus than needed where counts are powers of two."""
        return self.set(auto_round_num_ipus=auto_round_num_ipus)

    def useIpuModel(self, use_model: bool) -> Self:
        """Recorded: all devices are models here. Wins over POPTORCH_IPU_MODEL."""
        assert isinstance(use_model, bool), f"useIpuModel takes a bool; found {use_model!r}"
        return self.createOrSet(use_model=use_model)

    @property
    def _uses_ipu_model(self) -> bool:
        return self.use_model if self.exists("use_model") else os.environ.get("POPTORCH_IPU_MODEL") == "1"

    def useIpuId(self, ipu_id: int) -> Self:
        """Recorded: the device to take."""
        assert isinstance(ipu_id, int), f"useIpuId takes an int; found {ipu_id!r}"
        return self.createOrSet(ipu_id=ipu_id)

    def useOfflineIpuTarget(self, ipu_version: int = 2) -> Self:
        """Compile only: no device is ever taken."""
        assert isinstance(ipu_version, int), f"useOfflineIpuTarget takes an int; found {ipu_version!r}"
        self.connectionType(ConnectionType.Never)
        return self.createOrSet(ipu_version=ipu_version)

    def connectionType(self, connection_type: ConnectionType) -> Self:
        """When the device is taken: at once, at the first call, or never."""
        assert isinstance(connection_type, ConnectionType), (
            f"connectionType takes a poptorch.ConnectionType; found {connection_type!r}"
        )
        return self.set(connection_type=connection_type.value)

    def syncPattern(self, sync_pattern: SyncPattern) -> Self:
        """Recorded: which ipus wait for each other."""
        assert isinstance(sync_pattern, SyncPattern), (
            f"syncPattern takes a poptorch.SyncPattern; found {sync_pattern!r}"
        )
        return self.set(sync_pattern=sync_pattern.value)

    def setAvailableMemoryProportion(self, available_memory_proportion: dict[str, float]) -> Self:
        """Recorded: the share of each ipu's memory for temporary values, as `{"IPU0": 0.5}`."""
        assert isinstance(available_memory_proportion, dict), (
            f'setAvailableMemoryProportion takes a dictionary like {{"IPU0": 0.5}}; found '
            f"{available_memory_proportion!r}"
        )
        proportions = {_ipu(key): value for key, value in available_memory_proportion.items()}
        for ipu, value in proportions.items():
            assert isinstance(value, Real), f"the memory proportion of IPU{ipu} is no number: {value!r}"
        return self.set(available_memory_proportion=proportions)


def _ipu(key: str) -> int:
    valid = isinstance(key, str) and key.startswith("IPU") and key[3:].isdecimal()
    assert valid, f'the keys of available memory proportions start with "IPU", as in "IPU0"; found {key!r}'
    return int(key[3:])
