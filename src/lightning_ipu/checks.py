"""What can't be done on ipus, found before anything trains."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch


def before_setup(strategy: Any, trainer: Any, is_fit: bool) -> None:
    """Raises MisconfigurationException or RuntimeError, each with what to write instead."""
    lightning, module = strategy.lightning, strategy._lightning_module
    if not getattr(type(strategy.precision_plugin), "_is_pandos", False):
        raise lightning.Misconfiguration(
            f"{type(strategy.precision_plugin).__name__} can't be the precision of an IPUStrategy: it computes"
            ' gradients on the host. Leave it out, or write plugins=IPUPrecision("16-mixed").'
        )
    for step in ("training_step", "validation_step", "test_step", "predict_step"):
        if "dataloader_iter" in inspect.signature(getattr(module, step)).parameters:
            raise lightning.Misconfiguration(
                f"`{step}(self, dataloader_iter)` is not possible with IPUs: the step would read data while it is"
                f" compiled. Write `{step}(self, batch, batch_idx)`."
            )
    if not is_fit:
        return
    scheduler = lightning.get("callbacks.GradientAccumulationScheduler")
    changing = [
        c for c in trainer.callbacks if isinstance(c, scheduler) and set(c.scheduling.values()) != {1}
    ]
    if changing or isinstance(trainer.accumulate_grad_batches, dict):
        raise RuntimeError(
            "IPUStrategy does not support `accumulate_grad_batches` changing between epochs: it is compiled in. Use"
            " Trainer(accumulate_grad_batches=n)."
        )
    if lightning.is_overridden("configure_gradient_clipping", module):
        raise lightning.Misconfiguration(
            "`configure_gradient_clipping` can't be overridden with IPUs: there are no gradients on the host. Use"
            " Trainer(gradient_clip_val=..., gradient_clip_algorithm=...)."
        )
    for hook in ("optimizer_zero_grad", "backward"):
        if lightning.is_overridden(hook, module):
            warnings.warn(
                f"You have overridden the `LightningModule.{hook}` hook but it will be ignored since IPUs handle"
                f" the {hook} logic internally.",
                stacklevel=2,
            )
    for owner in (module, *trainer.callbacks):
        for hook in _HOOKS_WITH_GRADIENTS:
            if lightning.is_overridden(hook, owner):
                warnings.warn(
                    f"`{type(owner).__name__}.{hook}` runs, but parameter.grad is None there (grad_norm gives {{}}):"
                    " gradients stay on the ipus. To see one, ask for it in the options, as"
                    ' training_opts.anchorTensor("name", "Gradient___<parameter>"), and read'
                    ' strategy.poptorch_models["train"].getAnchoredTensor("name") in on_train_batch_end.',
                    stacklevel=2,
                )


_HOOKS_WITH_GRADIENTS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")


def after_setup(strategy: Any, trainer: Any) -> None:
    """The optimizers are known. Raises as `before_setup`."""
    misconfiguration = strategy.lightning.Misconfiguration
    if len(strategy.optimizers) > 1:
        raise misconfiguration(
            "IPUs currently only support one optimizer. A call has one loss, one backward pass and one weight update"
            " at its end. Use one optimizer with parameter groups, and one loss."
        )
    for optimizer in strategy.optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise misconfiguration(
                "IPUs and the LBFGS optimizer are not compatible: it computes the loss several times for one update."
                " Use SGD, Adam, AdamW or RMSprop."
            )
        other = getattr(optimizer, "max_grad_norm", None)
        if trainer.gradient_clip_val and other not in (None, float("inf"), trainer.gradient_clip_val):
            raise misconfiguration(
                f"Trainer(gradient_clip_val={trainer.gradient_clip_val}) and the optimizer's max_grad_norm={other}"
                " differ. Give one of them."
            )
