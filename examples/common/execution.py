"""poptorch.Options from the flags that say how a program runs: alone, or as one of poprun's instances."""

from __future__ import annotations

from typing import Any

import torch

import popart
import popdist
import popdist.poptorch
import poptorch

from .logs import say
from .sampling import Layout


def training_options(flags: Any) -> poptorch.Options:
    if popdist.isPopdistEnvSet():
        opts = popdist.poptorch.Options(ipus_per_replica=flags.ipus_per_replica)
        local = popdist.getNumLocalReplicas()
        if local != flags.replication_factor:
            say(
                f"poprun gives this instance {local} replicas, in place of {flags.named('replication_factor')}"
            )
    else:
        opts = poptorch.Options().replicationFactor(flags.replication_factor)
    opts.autoRoundNumIPUs(True)
    opts.deviceIterations(flags.device_iterations)
    opts.Training.gradientAccumulation(flags.gradient_accumulation)
    opts.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Mean)
    half = flags.precision == "16.16"
    if half:  # a sum of many scaled gradients is too large for half precision
        opts.Training.setMeanAccumulationAndReplicationReductionStrategy(
            poptorch.MeanReductionStrategy.Running
        )
    opts.Training.setAutomaticLossScaling(flags.auto_loss_scaling)
    opts.outputMode(poptorch.OutputMode.Sum)
    opts.randomSeed(flags.random_seed)
    opts.TensorLocations.setOptimizerLocation(
        poptorch.TensorLocationSettings()
        .useOnChipStorage(not flags.optimizer_state_offchip)
        .useReplicatedTensorSharding(flags.replicated_tensor_sharding)
    )
    _set_placement(opts, flags)
    opts.Precision.enableStochasticRounding(half and flags.stochastic_rounding)
    if flags.enable_half_partials:
        opts.Precision.setPartialsType(torch.float16)
    if flags.executable_cache_dir:
        opts.enableExecutableCaching(flags.executable_cache_dir)
    if flags.synthetic_data:
        opts.enableSyntheticData(int(popart.SyntheticDataMode.RandomNormal))
    _set_compiler(opts, flags)
    return opts


def held_out_losses(model: Any, rows: Any, flags: Any, output: int) -> torch.Tensor:
    """What the model makes of rows that it was not trained on: one of its outputs for each micro-batch, in one call."""
    count = len(rows)
    sizes = [n for n in range(1, flags.micro_batch_size + 1) if count % n == 0 and count // n >= flags.stages]
    if not sizes:
        raise SystemExit(f"{count} held-out rows are too few for a pipeline of {flags.stages} stages")
    opts = poptorch.Options().deviceIterations(count // sizes[-1]).randomSeed(flags.random_seed)
    opts.Distributed.disable()  # one instance measures alone
    opts.outputMode(poptorch.OutputMode.All)
    _set_placement(opts, flags)
    executor = poptorch.inferenceModel(model.eval(), opts)
    (batch,) = poptorch.DataLoader(opts, rows, batch_size=sizes[-1])
    found = executor(*batch)[output].reshape(-1)
    executor.destroy()
    return found


def layout(opts: poptorch.Options, flags: Any) -> Layout:
    """How a call's rows are shared out over replicas and instances; those of one replica read the same rows."""
    parts = popdist.getNumInstancesPerReplica()
    return Layout(
        micro_batch=flags.micro_batch_size,
        accumulation=flags.gradient_accumulation,
        iterations=flags.device_iterations,
        replicas=opts.replication_factor * popdist.getNumInstances() // parts,
        local=opts.replication_factor,
        instance=popdist.getInstanceIndex() // parts,
    )


def _set_placement(opts: poptorch.Options, flags: Any) -> None:
    opts.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement))
    proportions = flags.matmul_proportion * (
        flags.ipus_per_replica if len(flags.matmul_proportion) == 1 else 1
    )
    opts.setAvailableMemoryProportion({f"IPU{ipu}": share for ipu, share in enumerate(proportions)})


def _set_compiler(opts: poptorch.Options, flags: Any) -> None:
    """Settings of the original's compiler. Only recomputation and profiles mean something here."""
    if flags.recompute_checkpoint_every_layer:
        opts._Popart.set("autoRecomputation", int(popart.RecomputationType.Standard))
    schedule = popart.AccumulateOuterFragmentSchedule.OverlapMemoryOptimized
    opts._Popart.set("disableGradAccumulationTensorStreams", True)
    opts._Popart.set("accumulateOuterFragmentSettings.schedule", int(schedule))
    opts._Popart.set("accumulateOuterFragmentSettings.excludedVirtualGraphs", ["0"])
    opts._Popart.set("subgraphCopyingStrategy", int(popart.SubgraphCopyingStrategy.JustInTime))
    opts._Popart.set("scheduleNonWeightUpdateGradientConsumersEarly", True)
    opts._Popart.setPatterns(
        {"TiedGather": True, "TiedGatherAccumulate": True, "UpdateInplacePrioritiesForIpu": True}
    )
    engine = {"opt.useAutoloader": "true", "target.syncReplicasIndependently": "true"}
    if flags.profile_dir:
        engine |= {"autoReport.all": "true", "autoReport.directory": str(flags.profile_dir)}
    opts._Popart.set("engineOptions", engine)
