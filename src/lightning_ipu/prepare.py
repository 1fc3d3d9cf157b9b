"""Preparation of a run: the Lightning package, options, a profile, and checks of the configuration."""

import importlib
import inspect
import os
import sys
import warnings
from contextlib import ExitStack
from typing import Any

import torch

import popdist
import poptorch
from poptorch.optim.freeze_optimizer import supported_optimizers


class Lightning:
    """One of the two Lightning packages, by name. Its modules are imported at their first use."""

    def __init__(self, name: str) -> None:
        self.name = name

    def import_object(self, path: str) -> Any:
        """Return an object of the package by its path, such as `loops.fit_loop._FitLoop`."""
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(f"{self.name}.{module}"), name)

    @property
    def Misconfiguration(self) -> type[Exception]:
        """Return Lightning's exception for configurations that can't run."""
        return self.import_object("utilities.exceptions.MisconfigurationException")

    def is_overridden(self, method: str, module: Any) -> bool:
        return self.import_object("utilities.model_helpers.is_overridden")(method, module)


def make_options(strategy: Any, training: bool) -> poptorch.Options:
    """Return new options from the settings of the strategy, the Trainer, poprun and `seed_everything`."""
    devices = len(strategy.parallel_devices or [0])
    is_of_poprun = popdist.isPopdistEnvSet()
    options = popdist.poptorch.Options() if is_of_poprun else poptorch.Options().replicationFactor(devices)
    options.deviceIterations(strategy.device_iterations)
    options.setExecutionStrategy(poptorch.PipelinedExecution().orSharded())
    seed = os.environ.get("PL_GLOBAL_SEED", "")
    if seed.isdigit():
        # Not randomSeed(), which also seeds torch: the loader would shuffle in another order than on the CPU.
        options.createOrSet(random_seed=int(seed))
    trainer = getattr(strategy._lightning_module, "_trainer", None)
    if trainer is not None and training:
        options.Training.gradientAccumulation(trainer.accumulate_grad_batches)
    if trainer is not None and trainer._detect_anomaly:
        options.Precision.enableFloatingPointExceptions(True)
    return options


_FIXED_ACCUMULATION = (
    "IPUStrategy does not support `accumulate_grad_batches` changing between epochs: it is compiled in. Use"
    " Trainer(accumulate_grad_batches=n)."
)


def reading_accumulation(undo: ExitStack, trainer: Any, package: str) -> None:
    """Let Lightning's loops read 1 as `trainer.accumulate_grad_batches` until `undo` is closed, because the executor
    accumulates; the program reads the given value, and setting another one raises RuntimeError."""
    given, cls = trainer.accumulate_grad_batches, type(trainer)

    def read(trainer: Any) -> int:
        is_lightning = str(sys._getframe(1).f_globals.get("__name__")).startswith(f"{package}.")
        return 1 if is_lightning else given

    def write(trainer: Any, value: int) -> None:
        if value != given:
            raise RuntimeError(_FIXED_ACCUMULATION)

    # Of Lightning's module: a recording of forward does not compare what it reads from objects of Pando's classes.
    names = {"__module__": cls.__module__, "accumulate_grad_batches": property(read, write)}
    trainer.__class__ = type(cls.__name__, (cls,), names)
    undo.callback(setattr, trainer, "__class__", cls)


def with_report(strategy: Any, options: poptorch.Options) -> poptorch.Options:
    """Return the options by which an executor writes a profile, if the strategy has `autoreport`."""
    if not strategy.autoreport:
        return options
    directory = {"autoReport.directory": strategy.autoreport_dir} if strategy.autoreport_dir else {}
    options = options.clone()
    options._popart._merge("engineOptions", {"autoReport.all": "true", **directory})
    return options


def check_before_setup(strategy: Any, trainer: Any, is_fit: bool) -> None:
    """Raise an exception, with a fix, if the configuration can't run on ipus; warn of hooks without effect."""
    lightning, module = strategy.lightning, strategy._lightning_module
    if not getattr(type(strategy.precision_plugin), "_is_of_pando", False):
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
    scheduler = lightning.import_object("callbacks.GradientAccumulationScheduler")
    changing = [
        c for c in trainer.callbacks if isinstance(c, scheduler) and set(c.scheduling.values()) != {1}
    ]
    if changing or isinstance(trainer.accumulate_grad_batches, dict):
        raise RuntimeError(_FIXED_ACCUMULATION)
    averaging = lightning.import_object("callbacks.StochasticWeightAveraging")
    if any(isinstance(c, averaging) for c in trainer.callbacks) and averaging.pl_module_contains_batch_norm(
        module
    ):
        raise lightning.Misconfiguration(
            "StochasticWeightAveraging computes the statistics of BatchNorm in an epoch without backward, which a call"
            " with IPUs can't leave out. Use EMAWeightAveraging; or average with torch.optim.swa_utils.AveragedModel in"
            " `on_train_epoch_end`, and call torch.optim.swa_utils.update_bn after the fit."
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
        for hook in ("on_before_backward", "on_after_backward", "on_before_optimizer_step"):
            if lightning.is_overridden(hook, owner):
                warnings.warn(
                    f"`{type(owner).__name__}.{hook}` runs after the update, and parameter.grad is None there"
                    " (grad_norm gives {}): gradients stay on the ipus. To see one, ask for it in the options, as"
                    ' training_opts.anchorTensor("name", "Gradient___<parameter>"), and read'
                    ' strategy.poptorch_models["train"].getAnchoredTensor("name") in on_train_batch_end.',
                    stacklevel=2,
                )


def check_optimizers(strategy: Any, trainer: Any) -> None:
    """Raise a MisconfigurationException, with a fix, if the optimizers can't run on ipus."""
    misconfiguration = strategy.lightning.Misconfiguration
    if len(strategy.optimizers) > 1:
        raise misconfiguration(
            "IPUs currently only support one optimizer. A call has one loss, one backward pass and one weight update"
            " at its end. Use one optimizer with parameter groups, and one loss."
        )
    if not strategy._lightning_module.automatic_optimization:
        raise misconfiguration(
            "Manual optimization is not possible with IPUs: a call is compiled with one loss, one backward pass and one"
            " weight update at its end. Return the loss from `training_step`, and leave out"
            " `self.automatic_optimization = False`."
        )
    for optimizer in strategy.optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise misconfiguration(
                "IPUs and the LBFGS optimizer are not compatible: it computes the loss several times for one update."
                f" Use one of {supported_optimizers()}."
            )
        max_norm = getattr(optimizer, "max_grad_norm", None)
        if trainer.gradient_clip_val and max_norm not in (None, float("inf"), trainer.gradient_clip_val):
            raise misconfiguration(
                f"Trainer(gradient_clip_val={trainer.gradient_clip_val}) and the optimizer's max_grad_norm={max_norm}"
                " differ. Give one of them."
            )
