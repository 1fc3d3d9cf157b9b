"""The accelerator: says how many ipus there are."""

from __future__ import annotations

from typing import Any

import torch

_AUTO = 4  # what `devices="auto"` means; there is no number to find out, since an ipu is a logical device


class AcceleratorPart:
    """Lightning's accelerator for ipus. They are logical devices, so any number of them is available."""

    def setup_device(self, device: torch.device) -> None:
        pass

    def teardown(self) -> None:
        pass

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> int:
        """A number, a number as text, or a list with as many elements. Raises: ValueError, for anything else."""
        if isinstance(devices, (list, tuple)):
            return len(devices)
        try:
            return int(devices) if int(devices) != -1 else _AUTO
        except (TypeError, ValueError):
            raise ValueError(
                f'Trainer(accelerator="ipu") takes a number of devices; found {devices!r}'
            ) from None

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        return [torch.device("cpu", index) for index in range(devices)]

    @staticmethod
    def auto_device_count() -> int:
        return _AUTO

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "ipu"
