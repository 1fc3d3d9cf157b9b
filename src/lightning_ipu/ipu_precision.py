"""The precision: what batches and weights are cast to, and an optimizer step without gradients on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .lightning_package import Lightning

SUPPORTED = ("32-true", "16-mixed", "16-true")
_ALIASES = {"32": "32-true", "16": "16-mixed"}


class PrecisionPart:
    """Lightning's precision for ipus: "32-true"; "16-mixed": batches in half; "16-true": weights too."""

    lightning: Lightning

    def __init__(self, precision: Any = "32-true") -> None:
        precision = _ALIASES.get(str(precision), precision)
        if precision not in SUPPORTED:
            raise ValueError(
                f"`Trainer(accelerator='ipu', precision={precision!r})` is not supported."
                f" `precision` must be one of: {', '.join(SUPPORTED)}."
            )
        self.precision = precision

    def convert_module(self, module: Any) -> Any:
        return module.half() if self.precision == "16-true" else module

    def cast(self, batch: Any) -> Any:
        """The batch as the model takes it; integers stay."""
        if self.precision == "32-true":
            return batch
        return tree_map_only(Tensor, _halved, batch)

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the call of the model has trained it."""

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the executor clips."""

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the step, which trains; the optimizer itself has no gradients to look at."""
        if isinstance(optimizer, torch.optim.LBFGS):
            raise self.lightning.Misconfiguration(
                "IPUs and the LBFGS optimizer are not compatible: it computes the loss several times for one"
                " update. Use SGD, Adam, AdamW or RMSprop."
            )
        result = closure()
        self._after_closure(model, optimizer)  # type: ignore[attr-defined]
        if result is None and model.automatic_optimization:
            raise self.lightning.Misconfiguration(
                "Skipping backward by returning `None` from your `training_step` is not possible with IPUs: the step"
                " is compiled, and trains at each call. Return the loss."
            )
        optimizer._opt_called = True  # schedulers warn of optimizers that have never stepped
        return result


def _halved(tensor: Tensor) -> Tensor:
    return tensor.half() if tensor.dtype in (torch.float32, torch.float64) else tensor
