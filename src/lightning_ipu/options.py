"""The options that a strategy makes where the user gives none."""

from __future__ import annotations

import os
from typing import Any

import popdist
import poptorch


def make_options(strategy: Any, training: bool) -> poptorch.Options:
    """Options by the strategy's device iterations, and the Trainer's devices and accumulation."""
    if popdist.isPopdistEnvSet():
        import popdist.poptorch as distributed

        options: poptorch.Options = distributed.Options()
    else:
        options = poptorch.Options().replicationFactor(len(strategy.parallel_devices or [0]))
    options.deviceIterations(strategy.device_iterations)
    options.setExecutionStrategy(poptorch.PipelinedExecution().orSharded())
    seed = os.environ.get("PL_GLOBAL_SEED", "")
    if seed.isdigit():
        options.randomSeed(int(seed))
    module = strategy._lightning_module
    trainer = module._trainer if module is not None else None
    if trainer is not None and training:
        # During a run the Trainer's own count is 1: the executor accumulates.
        given = trainer.accumulate_grad_batches
        options.Training.gradientAccumulation(max(given, strategy._accumulation))
    if trainer is not None and trainer._detect_anomaly:
        options.Precision.enableFloatingPointExceptions(True)
    return options
