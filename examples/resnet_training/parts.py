"""From flags to what a training is made of: place among the instances, options, data, model, optimizer."""

from __future__ import annotations

import argparse
import copy
import difflib
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import folders
import images
import numpy as np
import torch
from common import estimates, logs
from common.logs import say
from common.sampling import Layout
from models import SMALL, Classifier, Norm, Normalise, ResNet
from torch import Tensor, nn

import popart
import popdist.poptorch
import poptorch


def layout_of(flags: argparse.Namespace) -> Layout:
    """Meets the other instances, if poprun has started this one."""
    local = flags.replicas
    if popdist.isPopdistEnvSet():
        popdist.init()
        local = popdist.getNumLocalReplicas()
    logs.start(popdist.getInstanceIndex() == 0)
    for line in flags.warnings:
        say(line)
    if local != flags.replicas:
        say(f"poprun gives {local} replicas to each instance, in place of --replicas {flags.replicas}")
    parts = popdist.getNumInstancesPerReplica()  # the instances of one replica read the same images
    found = Layout(
        flags.micro_batch_size,
        flags.gradient_accumulation,
        flags.device_iterations,
        local * popdist.getNumInstances() // parts,
        local,
        popdist.getInstanceIndex() // parts,
    )
    if found.replicas % flags.bn_group_size:
        raise SystemExit(
            f"--bn-group-size {flags.bn_group_size} does not divide the {found.replicas} replicas"
        )
    if flags.lr_per_256 is not None:
        flags.lr = flags.lr_per_256 * found.global_batch / 256
    if flags.norm_type == "batch" and found.micro_batch * flags.bn_group_size < 4:
        say(
            f"batch norm over {found.micro_batch * flags.bn_group_size} rows is noisy, and often fails in validation:"
            " a larger --micro-batch-size, --bn-group-size, or --norm-type group"
        )
    return found


def ipus_of(flags: argparse.Namespace) -> int:
    """Ipus of a replica, and stages of its forward."""
    return len(flags.pipeline_splits) + 1


# ---- data ------------------------------------------------------------------------------------------------


def dataset(flags: argparse.Namespace, layout: Layout, part: str) -> Any:
    """The images of a part, "train" or "validation", in the form in which they go to the model."""
    if flags.data == "imagenet":
        found: Any = folders.open_part(flags.imagenet_data_path, part, augments=part == "train")
    elif flags.data == "cifar10":
        found = images.cifar10(flags.data_dir, part)
    elif flags.data == "fashion-mnist":
        found = images.fashion(flags.data_dir, "train" if part == "train" else "t10k")
        if flags.data_dir is None and not images.FASHION.is_dir() and part == "train":
            say(f"{images.FASHION} does not exist: handwritten digits take the place of Fashion-MNIST")
    else:
        shape, classes = ((1, 28, 28), 10) if flags.model in SMALL else ((3, 224, 224), 1000)
        rows = flags.iterations * layout.call if part == "train" else layout.call
        found = images.generated(shape, classes, rows, flags.seed)
    found.seed = flags.seed
    if part != "train":
        found.shift, found.flips = 0, False
    found.normalises = flags.normalization_location == "host"
    half = flags.precision == "16.16"  # autocast takes float32
    found.form = torch.uint8 if flags.eight_bit_io else torch.float16 if half else torch.float32
    return found


def blank(data: Any, rows: int) -> tuple[Tensor, Tensor]:
    """A batch to compile with. It takes no memory: numpy's zeros are read-only pages until somebody writes."""
    pixels = np.zeros((rows, *data.shape), torch.empty(0, dtype=data.form).numpy().dtype)
    return torch.from_numpy(pixels), torch.from_numpy(np.zeros(rows, np.int64))


def announce(model: Classifier, data: Any, layout: Layout, stages: int) -> None:
    """Say what a call will need on this machine, from one micro-batch in plain PyTorch, in float32."""
    twin = (
        copy.deepcopy(model).train().float()
    )  # its statistics move, and convolutions of halves take very long
    twin.casts = False
    images, labels = blank(data, layout.micro_batch)
    images = images.float() if images.is_floating_point() else images
    cost = estimates.measured(twin, (images, labels))
    estimates.announce(model, cost, layout, stages, state_bytes=4, gradient_bytes=4)


# ---- the model -------------------------------------------------------------------------------------------


def model_of(flags: argparse.Namespace, data: Any) -> Classifier:
    torch.manual_seed(flags.seed)  # weights are not sent to other instances: all begin with the same
    in_model = flags.normalization_location == "ipu"
    first = Normalise(data.mean, data.deviation) if in_model else nn.Identity()
    small = max(data.shape[1:]) <= 64
    net = ResNet(flags.model, data.classes, data.shape[0], norm_of(flags), flags.width, small)
    model = Classifier(net, flags.label_smoothing, first, casts=flags.precision == "16.32")
    if flags.precision == "16.16":
        model.half()
    for ipu, path in enumerate(flags.pipeline_splits, 1):
        poptorch.BeginBlock(layer(model.net, path), path, ipu_id=ipu)
    if flags.recompute_mode == "manual":
        keep_outputs(model.net, flags.recompute_checkpoints)
    return model


def norm_of(flags: argparse.Namespace) -> Norm:
    if flags.norm_type == "none":
        return lambda channels: nn.Identity()
    if flags.norm_type == "group":
        groups = flags.norm_num_groups
        return lambda channels: nn.GroupNorm(min(groups, channels), channels, eps=flags.norm_eps)
    size, eps, momentum = flags.bn_group_size, flags.norm_eps, flags.batchnorm_momentum
    return lambda channels: poptorch.GroupedBatchNorm2d(channels, size, eps, momentum)


def layer(net: nn.Module, path: str) -> nn.Module:
    """A layer by its path with slashes, as in layer2/0/conv1."""
    layers = {name.replace(".", "/"): module for name, module in net.named_modules() if name}
    if path not in layers:
        near = difflib.get_close_matches(path, layers, n=5, cutoff=0.3)
        raise SystemExit(f"--pipeline-splits: there is no layer {path}; near it are {', '.join(near)}")
    return layers[path]


def keep_outputs(net: nn.Module, patterns: Iterable[str]) -> None:
    """Keep the outputs of the layers that match from forward to backward; the rest is computed again."""
    for pattern in patterns:
        found = [module for name, module in net.named_modules() if re.search(pattern, name)]
        if not found:
            raise SystemExit(f"--recompute-checkpoints: no layer's name matches {pattern!r}")
        for module in found:
            module.register_forward_hook(
                lambda module, inputs, output: poptorch.recomputationCheckpoint(output)
            )


# ---- options and optimizer -------------------------------------------------------------------------------


def options(flags: argparse.Namespace, layout: Layout) -> poptorch.Options:
    """What training and validation have in common."""
    if popdist.isPopdistEnvSet():
        opts: poptorch.Options = popdist.poptorch.Options(ipus_per_replica=ipus_of(flags))
    else:
        opts = poptorch.Options().replicationFactor(layout.local)
    opts.randomSeed(flags.seed)
    opts.autoRoundNumIPUs(True)
    opts.memoryFormat(flags.memory_format)
    opts.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement))
    opts.Precision.enableFloatingPointExceptions(flags.enable_fp_exceptions)
    opts.showCompilationProgressBar(not flags.disable_progress_bar and layout.instance == 0)
    memory = flags.available_memory_proportion
    if memory:
        each = memory * ipus_of(flags) if len(memory) == 1 else memory
        opts.setAvailableMemoryProportion({f"IPU{ipu}": value for ipu, value in enumerate(each)})
    if flags.half_partial:
        opts.Precision.setPartialsType(torch.half)
    if flags.model_cache_path:
        opts.enableExecutableCaching(flags.model_cache_path)
    return opts


def training_options(flags: argparse.Namespace, layout: Layout) -> poptorch.Options:
    opts = options(flags, layout).deviceIterations(layout.iterations)
    opts.outputMode(poptorch.OutputMode.Sum)
    opts.Training.gradientAccumulation(layout.accumulation)
    opts.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Mean)
    opts.Training.setAutomaticLossScaling(flags.auto_loss_scaling)
    opts.Precision.enableStochasticRounding(flags.enable_stochastic_rounding)
    opts.enableStableNorm(not flags.disable_stable_batchnorm)
    opts._Popart.set("groupNormStridedChannelGrouping", flags.enable_fast_groupnorm)
    if flags.recompute_mode != "none":
        opts._Popart.set("autoRecomputation", int(popart.RecomputationType.Standard))
    location = poptorch.TensorLocationSettings().useOnChipStorage(not flags.offload_optimizer)
    location.useReplicatedTensorSharding(flags.enable_optimizer_rts)
    opts.TensorLocations.setOptimizerLocation(location)
    if flags.data == "synthetic":
        opts.enableSyntheticData(int(popart.SyntheticDataMode.RandomNormal))
    if flags.profile:
        opts.enableProfiling(str(flags.profile_dir))
    return opts


def optimizer_of(flags: argparse.Namespace, model: nn.Module, loss_scaling: float) -> Any:
    """Weight decay is for tensors of two or more dimensions only."""
    weights = list(model.parameters())
    groups = [
        {"params": [w for w in weights if w.dim() >= 2], "weight_decay": flags.weight_decay},
        {"params": [w for w in weights if w.dim() < 2], "weight_decay": 0.0},
    ]
    shared = {"lr": flags.lr, "loss_scaling": loss_scaling}
    if flags.optimizer in ("sgd", "sgd_combined"):
        is_combined = flags.optimizer == "sgd_combined"
        return poptorch.optim.SGD(groups, momentum=flags.momentum, use_combined_accum=is_combined, **shared)
    if flags.optimizer == "lars":
        return poptorch.optim.LARS(groups, momentum=flags.momentum, **shared)
    if flags.optimizer == "adamw":
        return poptorch.optim.AdamW(groups, eps=flags.optimizer_eps, **shared)
    if flags.optimizer == "lamb":
        return poptorch.optim.LAMB(groups, eps=flags.optimizer_eps, **shared)
    return poptorch.optim.RMSprop(
        groups,
        alpha=flags.rmsprop_decay,
        eps=flags.optimizer_eps,
        momentum=flags.momentum,
        use_tf_variant=flags.optimizer == "rmsprop_tf",
        **shared,
    )
