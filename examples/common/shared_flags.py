"""The flags that BERT and GPT-2 share, and what has to agree among them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from .flags import Flags, add_switch, positive, share
from .placement import least_accumulation


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
    add("--executable-cache-dir", default="", help="has no effect; kept for compatibility")
    add("--compile-only", action="store_true", help="compile, and end")
    add_switch(parser, "--synthetic-data", default=False, help="no input: values that the engine makes up")
    add_switch(parser, "--async-dataloader", default=True, help="load in another process")
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


def add_optimizer(parser: argparse.ArgumentParser, kinds: Sequence[str], schedules: Sequence[str]) -> None:
    add = parser.add_argument_group("optimizer").add_argument
    add("--optimizer", choices=kinds, default="AdamW")
    add("--learning-rate", type=float, default=0.001)
    add("--lr-schedule", choices=schedules, default="constant")
    add("--lr-warmup", type=share, default=0.0, help="share of the steps in which the rate grows")
    add("--weight-decay", type=float, default=0.0, help="of parameters of two or more dimensions")
    add("--loss-scaling", type=float, default=1.0)
    add_switch(parser, "--auto-loss-scaling", default=False,
               help="adapt the loss scaling; the value is its start")  # fmt: skip
    add_switch(parser, "--enable-half-first-order-momentum", default=False,
               help="keep the first moment in half precision")  # fmt: skip


class Agreement:
    """What flags have to agree on. All that contradicts itself is said at once, with where each value came from.

    Args: flags: `layers_per_ipu` written out, and `stages` of the forward
    """

    def __init__(self, flags: Flags) -> None:
        self.flags, self.wrong = flags, list[str]()
        ipus, layers = flags.ipus_per_replica, flags.layers_per_ipu
        least = least_accumulation(flags.stages)
        self.must(
            len(layers) == ipus,
            f"layers_per_ipu names {len(layers)} ipus",
            "layers_per_ipu",
            "ipus_per_replica",
        )
        self.must(
            len(flags.matmul_proportion) in (1, ipus),
            "matmul_proportion must be one number, or one for each ipu",
            "matmul_proportion",
            "ipus_per_replica",
        )
        self.must(
            flags.gradient_accumulation >= least,
            f"this pipeline needs at least {least} micro-batches",
            "gradient_accumulation",
            "layers_per_ipu",
        )
        self.must(
            flags.vocab_size % flags.embedding_serialization_factor == 0,
            "the factor must divide the vocabulary",
            "embedding_serialization_factor",
            "vocab_size",
        )
        self.must(
            not flags.resume_training_from_checkpoint or bool(flags.checkpoint_input_dir),
            "there is nothing to resume from",
            "resume_training_from_checkpoint",
            "checkpoint_input_dir",
        )

    def must(self, agree: bool, why: str, *names: str) -> None:
        if not agree:
            self.wrong.append(f"{why}: {self.flags.named(*names)}")

    def check(self, parser: argparse.ArgumentParser) -> None:
        """A usage error, where something does not agree."""
        if self.wrong:
            parser.error("\n  ".join(["flags do not agree", *self.wrong]))
