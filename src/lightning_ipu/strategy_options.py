"""The options of a strategy: the user's, or those that it makes."""

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
        # Not randomSeed(), which also seeds torch: the loader would shuffle otherwise than on the CPU.
        options.createOrSet(random_seed=int(seed))
    module = strategy._lightning_module
    trainer = module._trainer if module is not None else None
    if trainer is not None and training:
        # During a run the Trainer's own count is 1: the executor accumulates.
        given = trainer.accumulate_grad_batches
        options.Training.gradientAccumulation(max(given, strategy._accumulation))
    if trainer is not None and trainer._detect_anomaly:
        options.Precision.enableFloatingPointExceptions(True)
    return options


class OptionsPart:
    """The part of a strategy that says which options each stage has."""

    poptorch_models: dict[Any, poptorch.PoplarExecutor]
    parallel_devices: Any
    _lightning_module: Any
    _training_opts: poptorch.Options | None
    _inference_opts: poptorch.Options | None

    @property
    def _trainer(self) -> Any:
        return self._lightning_module.trainer

    @property
    def _stage(self) -> Any:
        return self._trainer.state.stage

    @property
    def training_opts(self) -> poptorch.Options:
        if self._training_opts is None:
            self._training_opts = make_options(self, training=True)
        return self._training_opts

    @property
    def inference_opts(self) -> poptorch.Options:
        if self._inference_opts is None:
            self._inference_opts = make_options(self, training=False)
        return self._inference_opts

    def options_for(self, stage: Any) -> poptorch.Options:
        return self.training_opts if stage == "train" else self.inference_opts

    @property
    def replication_factor(self) -> int:
        """Replicas of the current stage; before there are executors, those of the options or the Trainer's devices."""
        if not self.poptorch_models:
            options = self._training_opts or self._inference_opts
            return options.replication_factor if options is not None else len(self.parallel_devices or [0])
        stage = self._stage
        executor = self.poptorch_models.get(stage)
        return (executor.options if executor is not None else self.options_for(stage)).replication_factor
