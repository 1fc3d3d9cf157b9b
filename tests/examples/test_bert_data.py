"""BERT's data: a language of known entropy, samples made of text, several sequences in a row."""

import json
import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

TINY = ["--config", "unit_test_cpu", "--disable-progress-bar", "--training-steps", "2"]
SIZES = ["--sequence-length", "32", "--mask-tokens", "5", "--vocab-size", "120", "--duplication-factor", "2"]
TEXT = "the model reads a row and guesses its masked words while others wait for their turn on two ipus"


@pytest.fixture(scope="module")
def make_samples(bert):
    import make_samples

    return make_samples


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """40 documents of 4 to 9 sentences; the words of document n begin at the n-th."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    words, documents = TEXT.split(), []
    for n in range(40):
        turned = words[n % len(words) :] + words
        documents.append("\n".join(" ".join(turned[k : k + 5 + (n + k) % 4]) for k in range(4 + n % 6)))
    file.write_text("\n\n".join(documents))
    return file


@pytest.fixture(scope="module")
def samples(make_samples, text, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "samples"
    make_samples.main(["--input-files", str(text), "--output-dir", str(folder), *SIZES])
    return folder


# ---- the language ----------------------------------------------------------------------------------------


def test_the_entropies_of_the_language_are_those_of_its_chain(bert):
    from markov import Language

    language = Language(vocabulary=9, length=16, masked=3, seed=0)
    chances = [0.7, 0.1, 0.1, 0.1]
    assert language.chain.sort(1, descending=True).values.tolist() == [pytest.approx(chances)] * 4
    assert language.next_word_entropy == pytest.approx(-sum(p * math.log(p) for p in chances))
    rows = language.sample(2000, seed=1)
    words = rows["input_ids"].clone().scatter_(1, rows["masked_lm_positions"], rows["masked_lm_labels"])
    counts = Counter((words[:, 1:7] - 5).flatten().tolist())
    measured = -sum(n / 12000 * math.log(n / 12000) for n in counts.values())
    assert language.unigram_entropy == pytest.approx(measured, abs=0.02)


def test_the_bound_is_that_of_trying_all_sentences(bert):
    """Rows of 4 + 4 words with three masked: the chance of each sentence, by hand."""
    from markov import KEPT, MASKED, SPECIAL, Language

    language = Language(vocabulary=9, length=11, masked=3, seed=0)
    rows = language.sample(20, seed=3)
    link = 0.5 * language.chain + 0.5 * language.stationary
    total = 0.0
    for row in range(20):
        shown = rows["input_ids"][row, language.places] - SPECIAL
        masked = torch.searchsorted(language.places, rows["masked_lm_positions"][row]).tolist()
        likely = torch.zeros(4, 4, 4, dtype=torch.float64)
        for guess in np.ndindex(4, 4, 4):
            words, chance = shown.clone(), 1.0
            for place, word in zip(masked, guess, strict=True):
                seen, words[place] = int(shown[place]), word
                chance *= MASKED if seen < 0 else KEPT * (seen == word) + (1 - MASKED - KEPT) / 4
            chance *= language.stationary[words[0]]
            for place in range(1, 8):
                chance *= (link if place == 4 else language.chain)[words[place - 1], words[place]]
            likely[guess] = chance
        likely /= likely.sum()
        labels = (rows["masked_lm_labels"][row] - SPECIAL).tolist()
        for axis, label in enumerate(labels):
            others = tuple(a for a in range(3) if a != axis)
            total -= math.log(likely.sum(others)[label])
    assert language.bound(rows) == pytest.approx(total / 60)


def test_a_model_of_the_language_uses_what_it_sees(bert):
    """Who looks at no other word can't be below the unigram entropy, 2.33, and nobody below 0.55: it ends near that."""
    language = ["--vocab-size", "21", "--sequence-length", "16", "--mask-tokens", "3"]
    rates = ["--optimizer", "LAMB", "--learning-rate", "0.01", "--lr-warmup", "0.1", "--training-steps", "60"]
    tracker = bert.main(["--config", "laptop_markov", "--disable-progress-bar", *language, *rates])
    assert 0.55 < tracker.held_out < 1.1


# ---- samples of text -------------------------------------------------------------------------------------


def test_samples_have_two_segments_and_labels_for_what_is_masked(samples):
    notes = json.loads((samples / "samples.json").read_text())
    words = (samples / "vocab.txt").read_text().splitlines()
    begin, separator, mask = (words.index(name) for name in ("[CLS]", "[SEP]", "[MASK]"))
    rows = np.load(samples / "train.npz")
    assert (
        words[0] == "[PAD]"
        and len(words) == notes["vocab_size"]
        and len(rows["input_ids"]) == notes["samples"]
    )
    shown = Counter()
    for ids, full, segments, positions, labels in zip(*(rows[f] for f in list(rows)[:5]), strict=True):
        size = full.sum()
        assert size <= 32 and (full[:size] == 1).all() and (ids[size:] == 0).all()
        assert ids[0] == begin and ids[size - 1] == separator and (ids == separator).sum() == 2
        first = list(ids).index(separator) + 1
        assert segments.tolist() == [0] * first + [1] * (size - first) + [0] * (32 - size)
        count = (positions > 0).sum()
        assert (
            count == min(5, max(1, round(0.15 * size)))
            and (labels[:count] > 4).all()
            and not labels[count:].any()
        )
        assert (np.diff(positions[:count]) > 0).all()
        for position, label in zip(positions[:count], labels[:count], strict=True):
            shown["mask" if ids[position] == mask else "kept" if ids[position] == label else "other"] += 1
    assert shown["mask"] / shown.total() == pytest.approx(0.8, abs=0.06)
    assert 0.4 < rows["next_sentence_label"].mean() < 0.7


def test_the_same_text_and_words_make_the_same_samples(make_samples, samples, text, tmp_path):
    """Also where several programs prepare one folder at once: one of them does, the others wait."""
    flags = ["--input-files", str(text), *SIZES, "--vocab-file", str(samples / "vocab.txt")]
    once = make_samples.main([*flags, "--output-dir", str(tmp_path / "once")])
    argv = [*flags, "--output-dir", str(tmp_path / "again")]
    with ThreadPoolExecutor(3) as programs:
        notes = [each.result() for each in [programs.submit(make_samples.main, argv) for _ in range(3)]]
    assert notes == [once] * 3 and once == json.loads((tmp_path / "once" / "samples.json").read_text())
    for name in ("train.npz", "held-out.npz"):
        one, other = np.load(tmp_path / "once" / name), np.load(tmp_path / "again" / name)
        assert [field for field in one if not np.array_equal(one[field], other[field])] == []


def test_a_folder_made_from_something_else_is_refused(make_samples, samples, text):
    with pytest.raises(SystemExit, match="made from something else: seed: 1984 there, 7 here"):
        make_samples.main(["--input-files", str(text), "--output-dir", str(samples), *SIZES, "--seed", "7"])


def test_a_training_reads_samples_and_measures_with_those_held_out(bert, samples, caplog):
    files = ["--input-files", str(samples / "train.npz"), "--held-out-files", str(samples / "held-out.npz")]
    tracker = bert.main([*TINY, "--dataset", "pretraining", *files])
    assert tracker.steps[0]["mlm_loss"] == pytest.approx(math.log(512), abs=0.2)
    assert tracker.held_out and any("for who looks at no other word" in line for line in caplog.messages)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--input-files", "nowhere/*.npz"], r"--input-files nowhere/\*\.npz: no file matches"),
        ([], "--input-files names no files"),
        (["--input-files", "{train}", "--sequence-length", "64"], "sequences of 32 with 5 masked words, but"),
        (
            ["--input-files", "{train}", "--vocab-size", "50"],
            r"has words up to \d+, but --vocab-size 50",
        ),
        (["--input-files", "{train}", "--device-iterations", "1000"], "samples don't fill one call of 16000"),
    ],
)
def test_samples_that_do_not_fit_are_refused(bert, samples, flags, why):
    flags = [flag.format(train=samples / "train.npz") for flag in flags]
    with pytest.raises(SystemExit, match=why):
        bert.main([*TINY, "--dataset", "pretraining", *flags])


# ---- packed rows -----------------------------------------------------------------------------------------


def test_rows_are_shared_by_what_fits_best(bert):
    from packing import shared_rows

    assert shared_rows([30, 12, 5, 20, 2], room=32, most=3) == [[0, 4], [3, 1], [2]]
    assert shared_rows([10, 10, 10], room=32, most=2) == [[0, 1], [2]]


def test_a_packed_row_gives_each_sequence_the_loss_it_has_alone(bert, samples):
    """Attention, positions, pooler and labels: in a row of three all are as if each were alone."""
    import model as models
    from datasets import FIELDS
    from packing import packed

    alone = {name: torch.from_numpy(np.load(samples / "train.npz")[name]).long() for name in FIELDS}
    short = alone["attention_mask"].sum(1).sort().indices[:3]
    alone = {name: value[short] for name, value in alone.items()}
    together = packed(alone, most=3)
    assert len(together["input_ids"]) < 3
    flags = SimpleNamespace(
        **{**bert.arguments.parse_arguments(TINY).__dict__, "packed_data": True, "max_sequences_per_pack": 3}
    )
    model = models.make_model(flags).eval()
    plain = models.Bert(models.bert_config(flags)).eval()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        one = [plain(*(value[i : i + 1] for value in alone.values())) for i in range(3)]
        _, mlm, nsp, _, right, sequences = model(*(value.long() for value in together.values()))
    counts = (alone["masked_lm_labels"] != 0).sum(1)
    expected = sum(float(loss[1]) * int(n) for loss, n in zip(one, counts, strict=True)) / int(counts.sum())
    assert float(mlm) == pytest.approx(expected, abs=1e-5)
    assert float(nsp) == pytest.approx(sum(float(loss[2]) for loss in one) / 3, abs=1e-5)
    assert float(right) == pytest.approx(sum(float(loss[4]) for loss in one) / 3)
    assert float(sequences) == 3 / len(together["input_ids"])


def test_packed_training_counts_sequences_and_takes_fewer_micro_batches(bert, samples, caplog):
    flags = ["--dataset", "pretraining", "--input-files", str(samples / "train.npz"), "--packed-data"]
    tracker = bert.main([*TINY, *flags, "--gradient-accumulation", "10", "--packing-factor", "1.3"])
    assert "Packed data: 8 micro-batches of a weight update, 10 before" in caplog.messages
    step = tracker.steps[0]
    assert step["sequences"] > 1
    assert step["throughput"] == pytest.approx(16 * step["sequences"] / step["seconds"])
