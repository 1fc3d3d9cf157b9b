"""GPT-2: what users type and see, the same numbers in every layout, and less than the bigram entropy."""

import importlib
import math
import random
import re
import shlex
import sys

import pytest
import torch
from programs import assert_equal_weights, on_one_thread, run, weights

SENTENCES = [
    "the cat sees a dog",
    "the dog sees the cat",
    "a cat is the one",
    "one dog is a cat",
    "the one sees one",
]
TINY = shlex.split(
    "--model tiny --max-len 16 --stride 16 --precision 32.32 --loss-scaling 1 --gradient-accumulation 7"
)
TINY += shlex.split(
    "--batch-size 2 --device-iterations 2 --training-steps 4 --layers-per-ipu 0 2 --ipus-per-replica 2"
)
TINY += shlex.split("--learning-rate 0.003 --val-num 16 --num-workers 0 --async-dataloader false")
TINY += shlex.split("--tokenizer characters --sample-words 5")


@pytest.fixture(scope="module")
def gpt2(program):
    pytest.importorskip("transformers")
    with program("gpt2_pretraining", "train_gpt2") as module:
        yield module


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Sentences in random order: what a word is depends on the two before it."""
    folder, draw = tmp_path_factory.mktemp("text"), random.Random(0)
    documents = ("\n".join(draw.choices(SENTENCES, k=8)) for _ in range(80))
    (folder / "text.txt").write_text("\n\n".join(documents))
    return [*TINY, "--input-files", str(folder / "text.txt"), "--text-dir", str(folder / "numbers")]


@pytest.mark.kind("an example: GPT-2")
def test_a_step_has_the_originals_line(gpt2, flags, caplog):
    found = gpt2.main([*flags, "--training-steps", "1"])
    assert found.losses[0] == pytest.approx(math.log(128), abs=0.3)
    line = next(line for line in caplog.messages if line.startswith("step"))
    pattern = (
        r"step 0 of epoch 0, loss: \d\.\d+, acc: 0\.\d{4}, lr: 3\.00e-03, throughput: [\d.]+ samples/sec, .*"
    )
    assert re.fullmatch(pattern, line)
    assert "Positions  --> IPU 1" in caplog.messages
    assert any(line.startswith("Made up: ") for line in caplog.messages)


def test_it_uses_more_than_the_word_before(gpt2, flags):
    found = gpt2.main([*flags, "--training-steps", "60", "--epochs", "50", "--dropout", "0"])
    assert found.notes["bigram"] < found.notes["unigram"] - 0.5
    assert found.held_out < found.notes["bigram"] - 0.2


LAYOUTS = {
    "unsplit": ["--layers-per-ipu", "2", "--ipus-per-replica", "1"],
    "recomputed": ["--recompute-checkpoint-layers", "0"],
    "sharded state": ["--replicated-tensor-sharding"],
}


@pytest.fixture(scope="module")
def reference(gpt2, flags, tmp_path_factory):
    """Four calls with dropout, and a checkpoint in the middle."""
    folder = tmp_path_factory.mktemp("reference")
    return gpt2.main([*flags, "--checkpoint-output-dir", str(folder), "--save-per-steps", "2"]).losses, folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_makes_the_same_bits(gpt2, flags, reference, layout):
    assert gpt2.main([*flags, *LAYOUTS[layout]]).losses == reference[0]


def test_a_loss_in_parts_differs_by_rounding(gpt2, flags, reference):
    parts = shlex.split(
        "--enable-sequence-serialized --serialized-seq-len 4 --embedding-serialization-factor 4"
    )
    assert gpt2.main([*flags, *parts]).losses == pytest.approx(reference[0], abs=5e-6)


def test_a_resumed_training_is_the_unbroken_one_to_the_last_bit(gpt2, flags, reference, tmp_path):
    expected, folder = reference
    resume = ["--checkpoint-input-dir", str(folder / "step_2"), "--resume-training-from-checkpoint"]
    found = gpt2.main([*flags, *LAYOUTS["unsplit"], *resume, "--checkpoint-output-dir", str(tmp_path)])
    assert found.losses == expected[2:]
    assert_equal_weights(weights(tmp_path / "epoch_0"), weights(folder / "step_4"))


def test_it_agrees_with_its_twin_in_plain_pytorch(gpt2, flags):
    plain = [*flags, "--dropout", "0", "--weight-decay", "0.01"]
    twin = on_one_thread(importlib.import_module("train_torch").main, plain)
    ours = gpt2.main(plain)
    assert ours.losses == pytest.approx(twin.losses, abs=1e-5)
    assert ours.held_out == pytest.approx(twin.held_out, abs=1e-4)


def test_the_bigram_entropy_is_that_of_the_counts(gpt2):
    import text

    training, held_out = torch.tensor([0, 1, 0, 2, 0, 1, 0, 2, 0]), torch.tensor([0, 1, 0, 2])
    single = [6 / 12, 3 / 12, 3 / 12]  # one is added to each count
    assert text.unigram(training, held_out, 3) == pytest.approx(
        -sum(math.log(single[w]) for w in (1, 0, 2)) / 3
    )
    chances = [(2 + 0.25) / 5, (2 + 0.5) / 3, (2 + 0.25) / 5]  # with k = 1
    assert text.bigram(training, held_out, 3) == pytest.approx(-sum(map(math.log, chances)) / 3)


CONTRADICTIONS = {
    "": "this pipeline needs at least 9 micro-batches: --gradient-accumulation 1 (default)",
    "--layers-per-ipu 2 2": "layers_per_ipu names 2 ipus: --layers-per-ipu 2 2 (command line), --ipus-per-replica 4",
    "--layers-per-ipu 0 1 1 1": "layers_per_ipu not compatible with number of hidden layers",
    "--enable-sequence-serialized --max-len 100": "the parts must be equal: --serialized-seq-len 128 (default), "
    "--max-len 100 (command line)",
    "--recompute-checkpoint-layers 4": "there is no such layer: --recompute-checkpoint-layers 4 (command line), "
    "--num-hidden-layers 4 (--model nano)",
    "--embedding-serialization-factor 3": "the factor must divide the vocabulary",
    "--resume-training-from-checkpoint": "there is nothing to resume from",
    "--model nanno": "invalid choice: 'nanno'",
}


@pytest.mark.parametrize("words", CONTRADICTIONS)
def test_flags_that_contradict_each_other_are_named(gpt2, capsys, words):
    with pytest.raises(SystemExit):
        gpt2.main(["--model", "nano", *words.split()])
    assert CONTRADICTIONS[words] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--input-files nowhere/*.txt --text-dir {}", r"--input-files nowhere/\*.txt: no file matches"),
        ("--device-iterations 10000", r"samples don't fill one call of 140000: --micro-batch-size 2"),
        ("--checkpoint-input-dir nowhere", "--checkpoint-input-dir nowhere: there is no such folder"),
    ],
)
def test_what_stops_a_training_is_said(gpt2, flags, tmp_path, words, message):
    with pytest.raises(SystemExit, match=message):
        gpt2.main([*flags, *words.format(tmp_path / "new").split()])


def test_two_instances_train_as_one(gpt2, flags, tmp_path):
    """Both find the text prepared, or wait for each other."""
    again = [flag.replace("numbers", "others") for flag in flags]
    one = gpt2.main([*flags, "--replication-factor", "2"]).losses
    poprun = shlex.split("poprun --num-instances 2 --num-replicas 2 --ipus-per-replica 2")
    program = [sys.executable, gpt2.__file__, *again, "--checkpoint-output-dir", str(tmp_path)]
    said = run("-m", *poprun, *program).stderr
    assert re.findall(r"^step .* loss: ([\d.]+)", said, re.MULTILINE) == [f"{loss:.4f}" for loss in one]
    assert len(re.findall("Made up", said)) == 1
