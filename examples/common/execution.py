"""The flags that say how a program runs, and poptorch.Options from them: alone, or as one of poprun's instances."""

from __future__ import annotations

import argparse
from typing import Any

import torch

import popart
import popdist
import popdist.poptorch
import poptorch

from .flags import add_switch, positive
from .logs import say
from .sampling import Layout


def add_execution(parser: argparse.ArgumentParser, *names: str) -> None:
    """`names`: other names of --micro-batch-size."""
    add = parser.add_argument_group("execution").add_argument
    add("--training-steps", type=positive, default=10, help="calls of the executor")
    add("--micro-batch-size", *names, type=positive, default=1, help="rows that a replica sees at once")
    add(
        "--gradient-accumulation",
        type=positive,
        default=16,
        help="micro-batches of a weight update, on each replica",
    )
    add("--device-iterations", type=positive, default=1, help="weight updates in a call")
    add(
        "--replication-factor",
        type=positive,
        default=1,
        help="copies of the model (poprun's word goes before)",
    )
    add("--ipus-per-replica", type=positive, default=4, help="as many as --layers-per-ipu names")
    add("--layers-per-ipu", type=int, nargs="+", default=[0, 1, 1, 1], metavar="N",
        help="encoders on each ipu; one number: as many on each; -1: an even share of the rest")  # fmt: skip
    add(
        "--matmul-proportion",
        type=float,
        nargs="+",
        default=[0.6],
        metavar="P",
        help="one, or one for each ipu (recorded)",
    )
    add(
        "--embedding-serialization-factor",
        type=positive,
        default=1,
        help="pieces in which the decoder is computed",
    )
    add_switch(
        parser, "--recompute-checkpoint-every-layer", default=False, help="keep only what encoders pass on"
    )
    add_switch(parser, "--replicated-tensor-sharding", "--enable-rts", default=False,
               help="share the optimizer's state out over replicas")  # fmt: skip
    add_switch(
        parser, "--optimizer-state-offchip", default=True, help="keep the optimizer's state on the host"
    )
    add_switch(
        parser, "--enable-half-partials", default=False, help="sum products in half precision (recorded)"
    )
    add("--precision", choices=("16.16", "32.32"), default="16.16", help="of weights and computation")
    add_switch(parser, "--stochastic-rounding", default=True, help="of weights of half precision")
    add("--executable-cache-dir", default="", help="folder that keeps compiled models")
    add("--compile-only", action="store_true", help="compile, and end")
    add("--profile-dir", default=None, help="folder for a profile")


def add_checkpoints(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("checkpoints").add_argument
    add("--checkpoint-output-dir", default="", help="for the folders step_N")
    add("--checkpoint-steps", type=positive, default=None, help="calls from one checkpoint to the next")
    add("--checkpoint-input-dir", default="", help="a checkpoint, or a folder of them: the newest is taken")
    add_switch(parser, "--resume-training-from-checkpoint", default=False,
               help="go on where it was saved; else only the weights are taken")  # fmt: skip


def add_rest(parser: argparse.ArgumentParser) -> None:
    add_switch(parser, "--custom-ops", default=True, help="accepted; nothing is needed here")
    add_switch(parser, "--disable-progress-bar", default=False, help="print a line a step")
    add_switch(parser, "--wandb", default=False, help="log to Weights & Biases")
    parser.add_argument(
        "--wandb-param-steps", type=positive, default=None, help="log the weights, every so many steps"
    )


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
    """How a call's rows are shared out over replicas and instances."""
    return Layout(
        micro_batch=flags.micro_batch_size,
        accumulation=flags.gradient_accumulation,
        iterations=flags.device_iterations,
        replicas=opts.replication_factor * popdist.getNumInstances(),
        local=opts.replication_factor,
        instance=popdist.getInstanceIndex(),
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
