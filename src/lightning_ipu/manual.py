"""Manual optimization, where it is what an executor does anyway: one loss, one backward, one step of one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from popengine.compile.recording.current_capture import current, is_traced
from popengine.compile.recording.graph_recorder import user_line
from popengine.errors import CaptureError
from poptorch.annotating.notes import note


class ManualSteps:
    """Stands in for what a step calls while it is captured, and checks the order."""

    def __init__(self, module: Any, replace: Callable[[Any, str, Any], None]) -> None:
        self._module, self._done = module, []
        (real,) = module.trainer.strategy.optimizers
        stand_in = _Optimizer(real, self._step)
        replace(module, "optimizers", lambda *args, **kwargs: stand_in)
        replace(module, "manual_backward", self._backward)
        for name in ("toggle_optimizer", "untoggle_optimizer"):
            replace(module, name, lambda *args, **kwargs: None)
        replace(
            module,
            "clip_gradients",
            _refusal("self.clip_gradients", "set optimizer.max_grad_norm = ... in configure_optimizers"),
        )
        replace(
            module, "lr_schedulers", _refusal("self.lr_schedulers", "step schedulers in on_train_batch_end")
        )

    def _backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(loss, Tensor) or not is_traced(loss):
            raise CaptureError(f"manual_backward at {user_line()} takes a loss that is computed in the step")
        self._done.append("backward")
        capture = current()
        assert capture is not None
        capture.choose_loss(loss, user_line())

    def _step(self, *args: Any, **kwargs: Any) -> None:
        self._done.append("step")
        note(("optimizer_step",), None)

    def finish(self) -> None:
        """Raises CaptureError, unless there was one backward, and then one step."""
        if self._done != ["backward", "step"]:
            raise CaptureError(
                "manual optimization in training_step must be one `self.manual_backward(loss)`, followed by one"
                f" `optimizer.step()`; found {', '.join(self._done) or 'neither'}\n"
                "  why: the step is compiled into one backward pass and one weight update at its end\n"
                "  fix: sum the losses, or use automatic optimization and return the loss; accumulate with"
                " Trainer(accumulate_grad_batches=...)"
            )


class _Optimizer:
    """The optimizer as a captured step may use it: its rates can be read."""

    def __init__(self, real: Any, step: Callable[..., None]) -> None:
        self._real, self.step = real, step

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Gradients are of one update each, anyway."""

    def toggle_model(self, *args: Any, **kwargs: Any) -> Any:
        return _refusal("optimizer.toggle_model", "leave it out: there is one optimizer")()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _refusal(what: str, fix: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise CaptureError(f"{what} at {user_line()} can't be a part of a compiled step\n  fix: {fix}")

    return refuse
