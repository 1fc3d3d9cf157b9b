"""The flags of run_pretraining.py, and what has to agree among them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import yaml
from common.flags import Flags, add_switch, parse, positive, share
from common.placement import layer_ipus, spread, stages_along
from common.shared_flags import Agreement, add_checkpoints, add_execution, add_optimizer, add_rest

CONFIGS = Path(__file__).with_name("configs_pretraining.yml")


def parse_arguments(argv: Sequence[str] | None = None) -> Flags:
    """Flags of the command line, over those of the config. Ends the program where they don't agree."""
    parser = argparse.ArgumentParser("PopTorch BERT", description="Pretrain BERT on a pipeline of ipus.")
    parser.add_argument("--config", default="demo_tiny_128", help=f"an entry of {CONFIGS.name}")
    for add in (add_execution, _add_data, _add_model, add_checkpoints, add_rest):
        add(parser)
    add_optimizer(parser, ("AdamW", "LAMB", "LAMBNoBiasCorrection"), ("constant", "linear"))
    parser.add_argument("--random-seed", type=int, default=5)
    flags = parse(parser, argv, CONFIGS, default="demo_tiny_128")
    if flags.packed_data:
        _account_for_packing(parser, flags)
    _check(parser, flags)
    return flags


def _packing_factor(text: str) -> float | dict[int, float]:
    found = yaml.safe_load(text)
    return {int(k): float(v) for k, v in found.items()} if isinstance(found, dict) else float(found)


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
    add_switch(parser, "--packed-data", default=False, help="several short sequences in a row")
    add("--max-sequences-per-pack", type=int, choices=(2, 3), default=3)
    add("--packing-factor", type=_packing_factor, default={128: 1.17, 384: 1.7, 512: 2.0},
        help="sequences in a row, on average: a number, or one for each sequence length")  # fmt: skip
    add("--sequence-length", type=positive, default=128)
    add("--mask-tokens", type=positive, default=20, help="masked words of a row, at most")


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add("--vocab-size", type=positive, default=30522)
    add("--hidden-size", type=positive, default=768)
    add("--intermediate-size", type=positive, default=None, help="always 4 x hidden size")
    add("--num-hidden-layers", type=positive, default=3)
    add("--num-attention-heads", type=positive, default=12)
    add("--layer-norm-eps", type=float, default=0.001)
    add("--attention-probs-dropout-prob", type=share, default=0.0)
    add("--hidden-dropout-prob", type=share, default=0.1)
    add("--initializer-range", type=float, default=0.02, help="standard deviation of the first weights")


def _check(parser: argparse.ArgumentParser, flags: Flags) -> None:
    """Refuse flags that contradict each other, and name them all."""
    flags.layers_per_ipu = spread(parser, flags)
    flags.stages = forward_stages(flags.layers_per_ipu)
    agreement = Agreement(flags)
    must = agreement.must
    must(flags.intermediate_size in (None, 4 * flags.hidden_size), "intermediate_size is always 4 x hidden_size",
         "intermediate_size", "hidden_size")  # fmt: skip
    must(flags.hidden_size % flags.num_attention_heads == 0, "the heads must divide the hidden size",
         "hidden_size", "num_attention_heads")  # fmt: skip
    must(flags.sequence_length <= 512, "there are 512 positions", "sequence_length")
    must(flags.mask_tokens < flags.sequence_length, "a row has fewer pieces",
         "mask_tokens", "sequence_length")  # fmt: skip
    must(not flags.held_out_files or flags.dataset == "pretraining", "held-out files need samples to train on",
         "held_out_files", "dataset")  # fmt: skip
    agreement.check(parser)


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


def forward_stages(layers_per_ipu: Sequence[int]) -> int:
    """Embedding and heads are on ipu 0."""
    return stages_along([0, *layer_ipus(layers_per_ipu), 0])
