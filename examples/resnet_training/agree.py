"""What flags must agree on."""

from __future__ import annotations

import argparse
import math
import os


def check(made: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    """A usage error for flags that do not fit each other; fills in those that follow from others."""
    counts = (
        "micro_batch_size",
        "gradient_accumulation",
        "replicas",
        "device_iterations",
        "epoch",
        "iterations",
    )
    for name in (*counts, "validation_frequency", "checkpoint_save_freq", "logs_per_epoch", "bn_group_size"):
        if getattr(flags, name) < 1:
            made.error(f"--{name.replace('_', '-')} must be at least 1")
    if flags.seed < 0:
        made.error("--seed must not be negative")
    if not 0 <= flags.label_smoothing < 1:
        made.error("--label-smoothing must be at least 0 and less than 1")
    if flags.data == "imagenet" and flags.imagenet_data_path is None:
        made.error("--data imagenet needs --imagenet-data-path DIR")
    if flags.eight_bit_io and flags.normalization_location == "none":
        made.error("--eight-bit-io needs the model to make numbers of bytes: --normalization-location ipu")
    if flags.recompute_mode == "manual" and not flags.recompute_checkpoints:
        made.error("--recompute-mode manual needs --recompute-checkpoints REGEX...")
    if flags.bn_group_size > 1 and flags.norm_type != "batch":
        made.error(f"--bn-group-size {flags.bn_group_size} needs --norm-type batch, not {flags.norm_type}")
    if flags.bn_group_size > 1 and flags.pipeline_splits:
        made.error("--bn-group-size needs one ipu a replica: leave out --pipeline-splits")
    ipus = len(flags.pipeline_splits) + 1
    if len(flags.available_memory_proportion) not in (0, 1, ipus):
        made.error(
            f"--available-memory-proportion takes one value, or one for each of the {ipus} ipus that"
            " --pipeline-splits makes"
        )
    if flags.initial_loss_scaling is not None:
        ratio = math.log2(flags.loss_scaling / flags.initial_loss_scaling)
        if ratio < 0 or ratio != round(ratio):
            made.error(
                f"--initial-loss-scaling {flags.initial_loss_scaling:g} doubled some times has to be"
                f" --loss-scaling {flags.loss_scaling:g}"
            )
        if flags.auto_loss_scaling:
            made.error("--initial-loss-scaling and --auto-loss-scaling exclude each other: leave one out")
    if flags.weight_avg_strategy != "none" and flags.checkpoint_output_dir is None:
        made.error("--weight-avg-strategy averages checkpoints: it needs --checkpoint-output-dir")
    if flags.eight_bit_io:
        flags.normalization_location = "ipu"
    if flags.dataloader_worker is None:
        flags.dataloader_worker = min(32, os.cpu_count() or 1) if flags.data == "imagenet" else 0
