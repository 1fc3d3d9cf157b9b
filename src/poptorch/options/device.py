"""The options of the device: which one, when it is taken, and how much of its memory is used."""

from numbers import Real
from typing import Self

from poptorch.enums import ConnectionType, SyncPattern
from poptorch.options.option_base import OptionsDict, Setting, expect, recorded

DEVICES = ("cpu", "cuda", "xpu")


class DeviceOptions(OptionsDict):
    auto_round_num_ipus = Setting(False)
    available_memory_proportion: Setting[dict[int, float]] = Setting({})
    connection_type = Setting(ConnectionType.Always.value)
    device_kind: Setting[str] = Setting()
    ipu_id: Setting[int] = Setting()
    ipu_version: Setting[int] = Setting()
    sync_pattern = Setting(SyncPattern.Full.value)
    use_model: Setting[bool] = Setting()

    def device(self, kind: str) -> Self:
        """*Ours*: what computes, "cpu", or one GPU: "cuda" (NVIDIA's and AMD's), "xpu" (Intel's).

        Wins over the environment variable POPTORCH_DEVICE; without either it is the CPU.
        """
        assert kind in DEVICES, f"device takes one of {', '.join(DEVICES)}; found {kind!r}"
        return self.createOrSet(device_kind=kind)

    @recorded("any number of ipus can be had, see environment.md for the rule of real systems")
    def autoRoundNumIPUs(self, auto_round_num_ipus: bool = True) -> Self:
        return self.set(auto_round_num_ipus=auto_round_num_ipus)

    @recorded("all ipus are models here")
    def useIpuModel(self, use_model: bool) -> Self:
        return self.createOrSet(use_model=expect("useIpuModel", use_model, bool))

    @recorded("there are no devices to choose from")
    def useIpuId(self, ipu_id: int) -> Self:
        assert isinstance(ipu_id, int) and ipu_id >= 0, (
            f"useIpuId takes an int from 0; found ipu_id={ipu_id!r}"
        )
        return self.createOrSet(ipu_id=ipu_id)

    def useOfflineIpuTarget(self, ipu_version: int = 2) -> Self:
        """Compile only: no device is ever taken, and a call of the model is an error."""
        self.createOrSet(ipu_version=expect("useOfflineIpuTarget", ipu_version, int))
        return self.connectionType(ConnectionType.Never)

    def connectionType(self, connection_type: ConnectionType) -> Self:
        """`Never` compiles only; `Always` and `OnDemand` take the device when the model is compiled."""
        return self.set(connection_type=expect("connectionType", connection_type, ConnectionType))

    @recorded("workers wait for the values they need, and for nothing else")
    def syncPattern(self, sync_pattern: SyncPattern) -> Self:
        return self.set(sync_pattern=expect("syncPattern", sync_pattern, SyncPattern))

    @recorded("memory is shared here")
    def setAvailableMemoryProportion(self, available_memory_proportion: dict[str, float]) -> Self:
        """Args: available_memory_proportion: the share of each ipu's memory, as `{"IPU0": 0.5}`"""
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
