"""Pando's three Lightning classes, built once for each Lightning package.

`lightning` and `pytorch_lightning` are the same source under two names, each with its own base classes.
Pando's classes are written once, without these bases (the strategy in `strategy.py`), and combined with the
bases of one package at their first use.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from popengine.torch_private import tree_map_only

from .autoload import PACKAGES
from .prepare import Lightning
from .strategy import StrategyPart

_AUTO = 4  # number of devices for `devices="auto"`: ipus are logical, so there are none to count


class AcceleratorPart:
    """The accelerator for ipus, which are logical devices: any number of them is available."""

    def setup_device(self, device: torch.device) -> None:
        pass

    def teardown(self) -> None:
        pass

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> int:
        """Return the number of devices of a list, a number or its text; 4 for -1, which means all."""
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
        """Return 4, the number of devices for `devices="auto"`."""
        return _AUTO

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "ipu"


class PrecisionPart:
    """The precision for ipus: "32-true"; "16-mixed", which casts batches to half; or "16-true", which casts
    weights, too. Raises: ValueError, for any other precision."""

    def __init__(self, precision: Any = "32-true") -> None:
        precision = {"32": "32-true", "16": "16-mixed"}.get(str(precision), precision)
        if precision not in ("32-true", "16-mixed", "16-true"):
            raise ValueError(
                f"`Trainer(accelerator='ipu', precision={precision!r})` is not supported."
                " `precision` must be one of: 32-true, 16-mixed, 16-true."
            )
        self.precision = precision

    def convert_module(self, module: Any) -> Any:
        """Return the module, with "16-true" after its parameters and buffers were cast to float16."""
        return module.half() if self.precision == "16-true" else module

    def cast(self, batch: Any) -> Any:
        """Return the batch with float32 and float64 tensors cast to float16; with "32-true", unchanged."""
        if self.precision == "32-true":
            return batch
        wide = (torch.float32, torch.float64)
        return tree_map_only(Tensor, lambda tensor: tensor.half() if tensor.dtype in wide else tensor, batch)

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the executor's call has already run the backward pass."""

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the executor clips gradients."""

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Call `closure`, which runs the training step, and return its result. The step updates the weights,
        so `optimizer.step` is not called."""
        result = closure()
        self._after_closure(model, optimizer)  # type: ignore[attr-defined]
        model.trainer.strategy.updates -= 1
        optimizer._opt_called = True  # else schedulers warn that `optimizer.step` was never called
        return result


@functools.cache
def build_classes(package: str) -> dict[str, type]:
    """Return Pando's strategy, accelerator and precision for a Lightning package, by class name. Cached."""
    lightning = Lightning(package)
    attributes = {"__module__": "lightning_graphcore", "lightning": lightning, "_is_of_pando": True}
    built = {
        name: type(name, (part, lightning.import_object(base)), {**attributes, "__doc__": part.__doc__})
        for name, part, base in (
            ("IPUStrategy", StrategyPart, "strategies.ParallelStrategy"),
            ("IPUAccelerator", AcceleratorPart, "accelerators.Accelerator"),
            ("IPUPrecision", PrecisionPart, "plugins.precision.Precision"),
        )
    }
    return {**built, "IPUPrecisionPlugin": built["IPUPrecision"]}


def imported_package() -> str:
    """Return the name of the imported Lightning package; "lightning.pytorch" if both or none are imported."""
    imported = [package for package in PACKAGES if package in sys.modules]
    return imported[0] if len(imported) == 1 else PACKAGES[0]
