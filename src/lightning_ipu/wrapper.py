"""The module that executors compile: it runs the step that the trainer is at."""

from __future__ import annotations

from typing import Any

from torch import nn

from popengine.compile.recording.current_capture import current

from .recording import Recording


class StepModule(nn.Module):
    """Holds a LightningModule; its forward is that module's step, and outside a trainer its forward.

    Its parameters and buffers have the names that they have in the LightningModule.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._forward_module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module = self._forward_module
        step = _step_of(module)
        if step is None:
            return module(*args, **kwargs)
        if current() is None:
            return getattr(module, step)(*args, **kwargs)
        with Recording(module, step) as recording:
            return recording.finished(getattr(module, step)(*args, **kwargs))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward_module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward_module.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward_module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward_module.load_state_dict(*args, **kwargs)


def _step_of(module: Any) -> str | None:
    """The name of the step that a module's trainer is at."""
    trainer = module._trainer
    if trainer is None:
        return None
    if trainer.training:
        return "training_step"
    if trainer.testing:
        return "test_step"
    if trainer.sanity_checking or trainer.validating:
        return "validation_step"
    return "predict_step" if trainer.predicting else None
