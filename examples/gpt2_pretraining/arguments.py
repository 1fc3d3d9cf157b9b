"""The flags of train_gpt2.py, and what has to agree among them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from common.flags import Flags, add_switch, parse, positive, share
from common.placement import layer_ipus, spread, stages_along
from common.shared_flags import Agreement, add_checkpoints, add_execution, add_optimizer, add_rest

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
    add_optimizer(parser, ("Adam", "AdamW", "LAMB"), ("constant", "linear", "cosine"))
    add_checkpoints(parser)
    parser.set_defaults(training_steps=10000, gradient_accumulation=1, device_iterations=4)
    parser.set_defaults(
        layers_per_ipu=[0, -1, -1, -1], learning_rate=1e-5, lr_warmup=0.1, loss_scaling=50000.0
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


def _add_training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("training").add_argument
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
    flags.stages = stages_along([0, position_ipu(flags), *layer_ipus(flags.layers_per_ipu), 0])
    agreement = Agreement(flags)
    must = agreement.must
    must(not flags.enable_sequence_serialized or flags.max_len % flags.serialized_seq_len == 0,
         "the parts must be equal", "serialized_seq_len", "max_len")  # fmt: skip
    must(set(flags.recompute_checkpoint_layers) <= set(range(flags.num_hidden_layers)), "there is no such layer",
         "recompute_checkpoint_layers", "num_hidden_layers")  # fmt: skip
    agreement.check(parser)


def position_ipu(flags: Flags) -> int:
    """The ipu of the position table: the second, if there is one."""
    return min(1, flags.ipus_per_replica - 1)
