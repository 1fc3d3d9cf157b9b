"""Make samples of text: pairs of segments with masked words, as run_pretraining.py reads them.

python3 make_samples.py --output-dir samples      # of Python's own documentation
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import corpus, logs
from common.folders import prepared
from common.logs import say
from samples import Words, arrays, samples_of
from tokenizers import Tokenizer
from tokenizers.implementations import BertWordPieceTokenizer

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Returns: what was noted beside the samples."""
    flags = parse_arguments(argv)
    logs.start(shows=True)
    wanted = {name: value for name, value in vars(flags).items() if name != "output_dir"}
    wanted["text"] = corpus.source(flags.input_files)
    notes = prepared(flags.output_dir, "samples.json", wanted, lambda folder: make(folder, flags))
    trained, held_out = notes["samples"], notes["held_out_samples"]
    say(f"{flags.output_dir}: {trained:,} samples and {held_out:,} held out, of {wanted['text']}")
    unigram, unseen = notes["unigram_entropy"], notes["held_out_unigram"]
    say(f"Unigram entropy {unigram:.2f} nats, on held-out masked words {unseen:.2f}")
    return notes


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--input-files", nargs="+", default=[], metavar="GLOB",
        help="a sentence a line, an empty line between documents; without: Python's documentation")  # fmt: skip
    add("--output-dir", required=True)
    add("--vocab-file", default=None, help="WordPieces, one a line; without: they are learnt from the text")
    add("--vocab-size", type=int, default=4096, help="of a vocabulary that is learnt")
    add("--sequence-length", type=int, default=128)
    add("--mask-tokens", type=int, default=20, help="masked words of a sample, at most")
    add("--duplication-factor", type=int, default=6, help="how often each document is read")
    add("--short-share", type=float, default=0.1, help="share of the documents whose samples are shorter")
    add("--masked-share", type=float, default=0.15, help="share of the words that are masked")
    add(
        "--held-out-share",
        type=float,
        default=0.03,
        help="share of the documents that are kept to measure with",
    )
    add("--seed", type=int, default=1984)
    return parser.parse_args(argv)


def make(folder: Path, flags: argparse.Namespace) -> dict[str, Any]:
    """Write train.npz, held-out.npz and vocab.txt."""
    chance = random.Random(flags.seed)
    texts = corpus.documents(flags.input_files)
    tokenizer = wordpieces(flags, texts)
    vocabulary = tokenizer.get_vocab()
    (folder / "vocab.txt").write_text(
        "".join(f"{word}\n" for word in sorted(vocabulary, key=vocabulary.__getitem__))
    )
    if vocabulary["[PAD]"] != 0:
        raise SystemExit(
            f"--vocab-file {flags.vocab_file}: [PAD] must be the first word, since label 0 means none"
        )
    words = Words(*(vocabulary[name] for name in SPECIALS), size=len(vocabulary))
    documents = [
        [pieces.ids for pieces in tokenizer.encode_batch(text, add_special_tokens=False) if pieces.ids]
        for text in texts
    ]
    documents = [document for document in documents if document]
    chance.shuffle(documents)
    apart = max(2, round(flags.held_out_share * len(documents)))
    if len(documents) < apart + 2:
        raise SystemExit(f"{len(documents)} documents are too few: two are held out, and training needs two")
    held_out, training = documents[:apart], documents[apart:]
    samples = [s for _ in range(flags.duplication_factor) for s in samples_of(training, words, flags, chance)]
    chance.shuffle(samples)
    others = list(samples_of(held_out, words, flags, chance))
    np.savez(folder / "train.npz", **arrays(samples, words, flags))
    np.savez(folder / "held-out.npz", **arrays(others, words, flags))
    counts = Counter(piece for document in training for sentence in document for piece in sentence)
    total = sum(counts.values())
    labels = [label for sample in others for label in sample.labels]
    return {
        "vocab_size": len(vocabulary),
        "documents": len(documents),
        "pieces": total,
        "samples": len(samples),
        "held_out_samples": len(others),
        "unigram_entropy": -sum(n / total * math.log(n / total) for n in counts.values()),
        # One is added to each count, so that a word that training has not seen has a chance.
        "held_out_unigram": -sum(math.log((counts[w] + 1) / (total + len(vocabulary))) for w in labels)
        / len(labels),
    }


def wordpieces(flags: argparse.Namespace, texts: list[corpus.Document]) -> Tokenizer:
    """The tokenizer of a vocabulary file, or one that is learnt: special words first, in lower case."""
    if flags.vocab_file:
        if not Path(flags.vocab_file).exists():
            raise SystemExit(f"--vocab-file {flags.vocab_file}: there is no such file")
        return BertWordPieceTokenizer(flags.vocab_file, lowercase=True)._tokenizer
    learner = BertWordPieceTokenizer(lowercase=True)
    lines = (sentence for text in texts for sentence in text)
    learner.train_from_iterator(
        lines, vocab_size=flags.vocab_size, special_tokens=list(SPECIALS), show_progress=False
    )
    # The library numbers what it has learnt in another order each time.
    learnt = sorted(set(learner.get_vocab()) - set(SPECIALS))
    numbers = {word: number for number, word in enumerate((*SPECIALS, *learnt))}
    return BertWordPieceTokenizer(numbers, lowercase=True)._tokenizer


if __name__ == "__main__":
    main()
