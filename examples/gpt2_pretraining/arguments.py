"""The flags of train_gpt2.py, and what has to agree among them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from common.execution import add_checkpoints, add_execution, add_rest
from common.flags import Flags, add_switch, parse, positive, share
from common.placement import layer_ipus, least_accumulation, spread, stages_along

# layers, hidden size, heads, vocabulary
MODELS = {
    "gpt2-test": (4, 768, 4, 20256),
    "gpt2": (12, 768, 12, 50272),
    "gpt2-medium": (24, 1024, 16, 50272),
    "gpt2-large": (36, 1280, 20, 50272),
    "gpt2-xl": (48, 1600, 25, 50272),
    "tiny": (2, 64, 4, 128),
    "nano": (4, 128, 4, 2048),
    "mini": (4, 256, 4, 4096),
}


def parse_arguments(argv: Sequence[str] | None = None) -> Flags:
    """The flags. Ends the program where they don't agree."""
    parser = argparse.ArgumentParser("PopTorch GPT-2", description="Train GPT-2 to say the next word.")
    for add in (_add_model, _add_data, _add_training, add_rest):
        add(parser)
    add_execution(parser, "--batch-size")
    add_checkpoints(parser)
    parser.set_defaults(
        training_steps=10000, gradient_accumulation=1, device_iterations=4, layers_per_ipu=[0, -1, -1, -1]
    )
    flags = parse(parser, argv)
    _complete(flags)
    _check(parser, flags)
    return flags


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add("--model", choices=tuple(MODELS), default="gpt2")
    add("--max-len", type=positive, default=128, help="words of a row, and positions of the model")
    add("--vocab-size", type=positive, default=None, help="in place of the model's own")
    add("--dropout", type=share, default=0.1)
    add_switch(
        parser,
        "--enable-sequence-serialized",
        default=False,
        help="compute the loss in parts of a row",
    )
    add("--serialized-seq-len", type=positive, default=128, help="words of such a part")
    add_switch(
        parser, "--remap-logit", default=False, help="accepted: there are no tiles to lay logits out on"
    )


def _add_data(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("data").add_argument
    add("--dataset", choices=("generated", "text"), default="text", help="random words; or text")
    add(
        "--input-files",
        nargs="+",
        default=[],
        metavar="GLOB",
        help="text files; without: Python's documentation",
    )
    add("--text-dir", default="gpt2-text", help="folder for the text as numbers; made once")
    add("--tokenizer", choices=("bpe", "characters"), default="bpe", help="learnt from the text")
    add("--stride", type=positive, default=128, help="from the first word of a row to that of the next")
    add("--val-num", type=positive, default=64, help="rows that are held out")
    add("--num-workers", "--dataloader-workers", dest="dataloader_workers", type=int, default=4)
    add_switch(parser, "--async-dataloader", default=True, help="load in another process")
    add_switch(parser, "--synthetic-data", default=False, help="no input: values that the engine makes up")


def _add_training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("training").add_argument
    add("--optimizer", choices=("Adam", "AdamW", "LAMB"), default="AdamW")
    add("--learning-rate", type=float, default=1e-5)
    add("--weight-decay", type=float, default=0.0, help="of parameters of two or more dimensions")
    add("--loss-scaling", type=float, default=50000.0)
    add_switch(
        parser, "--auto-loss-scaling", default=False, help="adapt the loss scaling; the value is its start"
    )
    add_switch(
        parser,
        "--enable-half-first-order-momentum",
        default=False,
        help="first moment in half precision",
    )
    add("--lr-schedule", choices=("constant", "linear", "cosine"), default="constant")
    add("--lr-warmup", type=share, default=0.1, help="share of the decay's steps in which the rate grows")
    add("--lr-warmup-steps", type=int, default=None, help="instead: how many steps")
    add(
        "--lr-decay-steps",
        type=positive,
        default=None,
        help="steps until the rate is 0; all of them by default",
    )
    add("--epochs", type=positive, default=1)
    add("--log-steps", type=positive, default=1)
    add("--save-per-epochs", type=positive, default=1)
    add("--save-per-steps", type=positive, default=None)
    add(
        "--recompute-checkpoint-layers",
        type=int,
        nargs="+",
        default=[],
        metavar="N",
        help="keep what they pass on",
    )
    add("--seed", dest="random_seed", type=int, default=1234)
    add("--sample-words", type=int, default=40, help="length of the text that is made up at the end")


def _complete(flags: Flags) -> None:
    """Fill in what follows from the model's name."""
    flags.num_hidden_layers, flags.hidden_size, flags.num_attention_heads, words = MODELS[flags.model]
    flags.vocab_size = flags.vocab_size or words
    if flags.recompute_checkpoint_every_layer:
        flags.recompute_checkpoint_layers = list(range(flags.num_hidden_layers))
    flags.sources["num_hidden_layers"] = f"--model {flags.model}"


def _check(parser: argparse.ArgumentParser, flags: Flags) -> None:
    """Refuse flags that contradict each other, and name them all."""
    flags.layers_per_ipu = spread(parser, flags)
    ipus, layers = flags.ipus_per_replica, flags.layers_per_ipu
    flags.stages = stages_along([0, position_ipu(flags), *layer_ipus(layers), 0])
    least = least_accumulation(flags.stages)
    wrong = []

    def must(agree: bool, why: str, *names: str) -> None:
        if not agree:
            wrong.append(f"{why}: {flags.named(*names)}")

    must(
        len(layers) == ipus, f"layers_per_ipu names {len(layers)} ipus", "layers_per_ipu", "ipus_per_replica"
    )
    must(len(flags.matmul_proportion) in (1, ipus), "matmul_proportion must be one number, or one for each ipu",
         "matmul_proportion", "ipus_per_replica")  # fmt: skip
    must(flags.gradient_accumulation >= least, f"this pipeline needs at least {least} micro-batches",
         "gradient_accumulation", "layers_per_ipu")  # fmt: skip
    must(flags.vocab_size % flags.embedding_serialization_factor == 0, "the factor must divide the vocabulary",
         "embedding_serialization_factor", "vocab_size")  # fmt: skip
    must(not flags.enable_sequence_serialized or flags.max_len % flags.serialized_seq_len == 0,
         "the parts must be equal", "serialized_seq_len", "max_len")  # fmt: skip
    must(set(flags.recompute_checkpoint_layers) <= set(range(flags.num_hidden_layers)), "there is no such layer",
         "recompute_checkpoint_layers", "num_hidden_layers")  # fmt: skip
    must(not flags.resume_training_from_checkpoint or bool(flags.checkpoint_input_dir),
         "there is nothing to resume from", "resume_training_from_checkpoint", "checkpoint_input_dir")  # fmt: skip
    if wrong:
        parser.error("\n  ".join(["flags do not agree", *wrong]))


def position_ipu(flags: Flags) -> int:
    """The ipu of the position table: the second, if there is one."""
    return min(1, flags.ipus_per_replica - 1)
