"""The flags of run_pretraining.py, and what has to agree among them."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import yaml
from common.flags import Flags, add_switch, parse

CONFIGS = Path(__file__).with_name("configs_pretraining.yml")
SPREAD = -1  # in --layers-per-ipu: an even share of the layers that are left


def parse_arguments(argv: Sequence[str] | None = None) -> Flags:
    """Flags of the command line, over those of the config. Ends the program where they don't agree."""
    parser = argparse.ArgumentParser("PopTorch BERT", description="Pretrain BERT on a pipeline of ipus.")
    parser.add_argument("--config", default="demo_tiny_128", help=f"an entry of {CONFIGS.name}")
    for add in (_add_execution, _add_data, _add_model, _add_training, _add_checkpoints, _add_rest):
        add(parser)
    flags = parse(parser, argv, CONFIGS, default="demo_tiny_128")
    if flags.packed_data:
        _account_for_packing(parser, flags)
    _check(parser, flags)
    return flags


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def _share(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text} must be between 0 and 1")
    return number


def _packing_factor(text: str) -> float | dict[int, float]:
    found = yaml.safe_load(text)
    return {int(k): float(v) for k, v in found.items()} if isinstance(found, dict) else float(found)


def _add_execution(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("execution").add_argument
    add("--training-steps", type=_positive, default=10, help="calls of the executor")
    add("--micro-batch-size", type=_positive, default=1, help="rows that a replica sees at once")
    add(
        "--gradient-accumulation",
        type=_positive,
        default=16,
        help="micro-batches of a weight update, on each replica",
    )
    add("--device-iterations", type=_positive, default=1, help="weight updates in a call")
    add(
        "--replication-factor",
        type=_positive,
        default=1,
        help="copies of the model (poprun's word goes before)",
    )
    add("--ipus-per-replica", type=_positive, default=4, help="as many as --layers-per-ipu names")
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
        type=_positive,
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


def _add_data(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("data").add_argument
    add("--dataset", choices=("pretraining", "generated", "random", "markov"), default="pretraining",
        help="sample files; one row, repeated; fresh random rows; a language of known entropy")  # fmt: skip
    add(
        "--input-files", nargs="+", default=[], metavar="GLOB", help="sample files that make_samples.py wrote"
    )
    add(
        "--held-out-files",
        nargs="+",
        default=[],
        metavar="GLOB",
        help="samples to measure with after the training",
    )
    add("--dataloader-workers", type=int, default=0, help="processes that load, at most one a core")
    add_switch(parser, "--async-dataloader", default=True, help="load in another process")
    add_switch(parser, "--synthetic-data", default=False, help="no input: values that the engine makes up")
    add_switch(parser, "--packed-data", default=False, help="several short sequences in a row")
    add("--max-sequences-per-pack", type=int, choices=(2, 3), default=3)
    add("--packing-factor", type=_packing_factor, default={128: 1.17, 384: 1.7, 512: 2.0},
        help="sequences in a row, on average: a number, or one for each sequence length")  # fmt: skip
    add("--sequence-length", type=_positive, default=128)
    add("--mask-tokens", type=_positive, default=20, help="masked words of a row, at most")


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add("--vocab-size", type=_positive, default=30522)
    add("--hidden-size", type=_positive, default=768)
    add("--intermediate-size", type=_positive, default=None, help="always 4 x hidden size")
    add("--num-hidden-layers", type=_positive, default=3)
    add("--num-attention-heads", type=_positive, default=12)
    add("--layer-norm-eps", type=float, default=0.001)
    add("--attention-probs-dropout-prob", type=_share, default=0.0)
    add("--hidden-dropout-prob", type=_share, default=0.1)
    add("--initializer-range", type=float, default=0.02, help="standard deviation of the first weights")


def _add_training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("training").add_argument
    add("--optimizer", choices=("AdamW", "LAMB", "LAMBNoBiasCorrection"), default="AdamW")
    add("--learning-rate", type=float, default=0.001)
    add("--lr-schedule", choices=("constant", "linear"), default="constant")
    add("--lr-warmup", type=_share, default=0.0, help="share of the training steps in which the rate grows")
    add("--weight-decay", type=float, default=0.0, help="of parameters of two or more dimensions")
    add("--loss-scaling", type=float, default=1.0)
    add_switch(
        parser, "--auto-loss-scaling", default=False, help="adapt the loss scaling; the value is its start"
    )
    add_switch(
        parser,
        "--enable-half-first-order-momentum",
        default=False,
        help="keep the first moment in half precision",
    )
    add("--random-seed", type=int, default=5)


def _add_checkpoints(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("checkpoints").add_argument
    add("--checkpoint-output-dir", default="", help="for the folders step_N")
    add("--checkpoint-steps", type=_positive, default=None, help="calls from one checkpoint to the next")
    add("--checkpoint-input-dir", default="", help="a checkpoint, or a folder of them: the newest is taken")
    add_switch(parser, "--resume-training-from-checkpoint", default=False,
               help="go on where it was saved; else only the weights are taken")  # fmt: skip


def _add_rest(parser: argparse.ArgumentParser) -> None:
    add_switch(parser, "--custom-ops", default=True, help="accepted; nothing is needed here")
    add_switch(parser, "--disable-progress-bar", default=False, help="print a line a step")
    add_switch(parser, "--wandb", default=False, help="log to Weights & Biases")
    parser.add_argument(
        "--wandb-param-steps", type=_positive, default=None, help="log the weights, every so many steps"
    )


def _check(parser: argparse.ArgumentParser, flags: Flags) -> None:
    """Refuse flags that contradict each other, and name them all."""
    flags.layers_per_ipu = _spread(parser, flags)
    wrong = []

    def must(agree: bool, why: str, *names: str) -> None:
        if not agree:
            wrong.append(f"{why}: {flags.named(*names)}")

    ipus, layers = flags.ipus_per_replica, flags.layers_per_ipu
    must(
        len(layers) == ipus, f"layers_per_ipu names {len(layers)} ipus", "layers_per_ipu", "ipus_per_replica"
    )
    must(len(flags.matmul_proportion) in (1, ipus), "matmul_proportion must be one number, or one for each ipu",
         "matmul_proportion", "ipus_per_replica")  # fmt: skip
    must(flags.intermediate_size in (None, 4 * flags.hidden_size), "intermediate_size is always 4 x hidden_size",
         "intermediate_size", "hidden_size")  # fmt: skip
    must(flags.hidden_size % flags.num_attention_heads == 0, "the heads must divide the hidden size",
         "hidden_size", "num_attention_heads")  # fmt: skip
    must(flags.vocab_size % flags.embedding_serialization_factor == 0, "the factor must divide the vocabulary",
         "embedding_serialization_factor", "vocab_size")  # fmt: skip
    must(flags.sequence_length <= 512, "there are 512 positions", "sequence_length")
    must(
        flags.mask_tokens < flags.sequence_length, "a row has fewer pieces", "mask_tokens", "sequence_length"
    )
    must(flags.gradient_accumulation >= least_accumulation(layers),
         f"this pipeline needs at least {least_accumulation(layers)} micro-batches",
         "gradient_accumulation", "layers_per_ipu")  # fmt: skip
    must(not flags.resume_training_from_checkpoint or bool(flags.checkpoint_input_dir),
         "there is nothing to resume from", "resume_training_from_checkpoint", "checkpoint_input_dir")  # fmt: skip
    must(not flags.held_out_files or flags.dataset == "pretraining", "held-out files need samples to train on",
         "held_out_files", "dataset")  # fmt: skip
    if wrong:
        parser.error("\n  ".join(["flags do not agree", *wrong]))


def _account_for_packing(parser: argparse.ArgumentParser, flags: Flags) -> None:
    """Fewer micro-batches, so that a weight update sees as many sequences as without packing."""
    factor, length = flags.packing_factor, flags.sequence_length
    if isinstance(factor, dict):
        if length not in factor:
            parser.error(
                f"no packing factor is known for {flags.named('sequence_length')}\n"
                "  fix: give --packing-factor, the mean number of sequences in a row"
            )
        factor = factor[length]
    flags.unpacked = flags.gradient_accumulation
    flags.gradient_accumulation = math.ceil(flags.unpacked / factor)


def _spread(parser: argparse.ArgumentParser, flags: Flags) -> list[int]:
    """The layers on each ipu, with one number and -1 written out."""
    given, layers = flags.layers_per_ipu, flags.num_hidden_layers
    if len(given) == 1 and given[0] > 0:
        given = given * (layers // given[0])
    elif given == [SPREAD]:
        given = given * flags.ipus_per_replica
    left, spread = (
        layers - sum(n for n in given if n != SPREAD),
        [i for i, n in enumerate(given) if n == SPREAD],
    )
    found = list(given)
    for place, ipu in enumerate(spread):  # the last ones have one more each
        found[ipu] = left // len(spread) + (len(spread) - place <= left % len(spread))
    if sum(found) != layers or min(found) < 0:
        parser.error(
            "layers_per_ipu not compatible with number of hidden layers: "
            f"{flags.named('layers_per_ipu', 'num_hidden_layers')}\n"
            "  fix: numbers that add up to the layers; -1 stands for an even share of those that are left"
        )
    return found


def forward_stages(layers_per_ipu: Sequence[int]) -> int:
    """Stages of the forward pass: embedding and heads are on ipu 0, and neighbours on one ipu are one stage."""
    path = [0, *(ipu for ipu, layers in enumerate(layers_per_ipu) for _ in range(layers)), 0]
    return 1 + sum(a != b for a, b in itertools.pairwise(path))


def least_accumulation(layers_per_ipu: Sequence[int]) -> int:
    """Micro-batches that fill a pipeline in training: 2n - 1 for n forward stages."""
    return 2 * forward_stages(layers_per_ipu) - 1
