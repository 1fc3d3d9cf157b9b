"""What a strategy does with weights on the host, and with checkpoints."""

from __future__ import annotations

from typing import Any

import poptorch


class WeightsPart:
    """The part of a strategy that uploads weights, and keeps the ipus' random numbers in checkpoints."""

    poptorch_models: dict[Any, poptorch.PoplarExecutor]
    _loaded_numbers: dict[str, list[int]]

    def upload_weights(self) -> None:
        """Give the devices the weights that the host has, after a callback has changed them."""
        for executor in {id(e): e for e in self.poptorch_models.values()}.values():
            if executor.isAttachedToDevice():
                executor.copyWeightsToDevice()

    def _upload_changes(self, executor: poptorch.PoplarExecutor) -> None:
        """Upload what somebody has written to parameters since they were last copied to the host."""
        if executor.isAttachedToDevice() and executor.hostWeightsChanged():
            executor.copyWeightsToDevice()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        numbers = {s.value: e.rng_state for s, e in self.poptorch_models.items() if e.isCompiled()}
        checkpoint = {**checkpoint, "ipu_random_numbers": numbers} if numbers else checkpoint
        super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        checkpoint = super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]
        self._loaded_numbers = dict(checkpoint.get("ipu_random_numbers", {}))
        return checkpoint

    def _restore_numbers(self, stage: Any, executor: Any, args: Any, kwargs: Any) -> None:
        """Go on with the random numbers of the checkpoint."""
        numbers = self._loaded_numbers.pop(stage.value, None)
        if numbers is not None and not executor.isCompiled():
            executor.compile(*args, **kwargs)
            executor.rng_state = numbers
