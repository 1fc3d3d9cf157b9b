"""What a strategy does with weights on the host, and with checkpoints."""

from __future__ import annotations

from typing import Any

import poptorch


class WeightsPart:
    """The part of a strategy that uploads weights, and keeps the ipus' random numbers in checkpoints."""

    poptorch_models: dict[Any, poptorch.PoplarExecutor]
    optimizers: list[Any]
    _numbers: dict[str, list[int]]  # of random numbers, by stage, of executors that are gone
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
        self._keep_numbers()
        if self._numbers:
            checkpoint = {**checkpoint, "ipu_random_numbers": self._numbers}
        super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]

    def _keep_numbers(self) -> None:
        """Remember where the random numbers are: a checkpoint may be saved after the executors have gone."""
        compiled = {s.value: e.rng_state for s, e in self.poptorch_models.items() if e.isCompiled()}
        self._numbers = {**self._numbers, **compiled}

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        checkpoint = super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]
        self._loaded_numbers = dict(checkpoint.get("ipu_random_numbers", {}))
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load the optimizers' states; a poptorch optimizer also takes that of a torch optimizer with the same rule."""
        states = [
            {"ipu_state": None, "ipu_param": None, **state}
            if isinstance(optimizer, poptorch.optim.Optimizer)
            else state
            for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False)
        ]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})  # type: ignore[misc]

    def _restore_numbers(self, stage: Any, executor: Any, args: Any, kwargs: Any) -> None:
        """Go on with the random numbers of the checkpoint."""
        numbers = self._loaded_numbers.pop(stage.value, None)
        if numbers is not None and not executor.isCompiled():
            executor.compile(*args, **kwargs)
            executor.rng_state = numbers
