"""BERT's pretraining: what users type and see, the same numbers in every layout, and checkpoints that resume."""

import importlib
import re
import shlex
import sys

import pytest
import torch
from programs import assert_equal_weights, on_one_thread, run, weights

TINY = ["--config", "unit_test_cpu", "--disable-progress-bar"]
HALF = ["--precision", "16.16", "--loss-scaling", "64"]
LANGUAGE = ["--dataset", "markov", "--vocab-size", "69"]
UNSPLIT = ["--layers-per-ipu", "2", "--ipus-per-replica", "1"]


def losses(tracker):
    return [step["total loss"] for step in tracker.steps]


# ---- what users see --------------------------------------------------------------------------------------


@pytest.mark.kind("an example: BERT")
def test_the_lines_are_those_that_parsers_take(bert, caplog, tmp_path):
    bert.main([*TINY, "--checkpoint-output-dir", str(tmp_path), "--training-steps", "1"])
    said = caplog.messages
    expected = [
        "Using config: unit_test_cpu",
        "------------------- Data Loading Started ------------------",
        r"Data loaded in [\d.]+ secs",
        "-" * 59,
        "-------------------- Device Allocation --------------------",
        "Embedding  --> IPU 0",
        "Encoder 0  --> IPU 1",
        "Encoder 1  --> IPU 2",
        "Pooler     --> IPU 0",
        "Classifier --> IPU 0",
        "-" * 59,
        "A step reads 16 samples: 1 weight updates of 16",
        "This instance: .* GiB of memory, and about .* a step .*",
        "---------- Compilation/Loading from Cache Started ---------",
        r"Compiled/Loaded model in [\d.]+ secs",
        "-" * 59,
        f"Saving checkpoint for step 0 to: {tmp_path}/step_0",
        "--------------------- Training Started --------------------",
        r"Step: 0 / 0 - LR: 3.00e-03 - total loss: \d\.\d{3} - mlm_loss: 6\.\d{3} - nsp_loss: 0\.\d{3} - "
        r"mlm_acc: 0\.000 % - nsp_acc: [01]\.000 % throughput: [\d.]+ samples/sec",
        f"Saving checkpoint for step 1 to: {tmp_path}/step_1",
        "-" * 59,
        "-------------------- Training Metrics ---------------------",
        "global_batch_size: 16",
        "device_iterations: 1",
        "training_steps: 1",
        r"Training time: [\d.]+ secs",
        "-" * 59,
    ]
    lines = [line for line in said if "num_workers" not in line]
    for line, pattern in zip(lines, expected, strict=False):
        assert re.fullmatch(pattern, line), (pattern, line)
    step = next(line for line in lines if line.startswith("Step"))
    assert re.search(r"mlm_acc: *(.*?) \%", step)[1] == "0.000"
    assert float(re.search(r"throughput: *(.*?) samples/sec", step)[1]) > 0
    assert re.findall(r"total loss: *(\d*\.\d*)", step) and re.findall(r"mlm_loss: *(\d*\.\d*)", step)


SMALLER = shlex.split(
    "--hidden-size 32 --num-attention-heads 2 --vocab-size 512 --sequence-length 32 --mask-tokens 5"
)
SMALLER += shlex.split("--micro-batch-size 1 --gradient-accumulation 9")
TUTORIAL = {
    "pretrain_base_128_pod4": ("", 9),
    "pretrain_large_128_POD64": (
        "-m poprun --num-instances 1 --num-replicas 16 --ipus-per-replica 4",
        9 * 16,
    ),
}


@pytest.mark.parametrize("config", TUTORIAL)
def test_the_commands_of_the_tutorial_run_with_smaller_sizes(bert, config):
    """As they are typed, with sizes by flags; and programs that read the lines find what they look for."""
    poprun, global_batch = TUTORIAL[config]
    program = [sys.executable, bert.__file__] if poprun else [bert.__file__]
    flags = ["--dataset", "generated", "--config", config, "--training-steps", "1", *SMALLER]
    said = run(*poprun.split(), *program, *flags).stderr
    assert f"Using config: {config}" in said and f"global_batch_size: {global_batch}\n" in said
    assert float(re.findall(r"throughput: *(.*?) samples/sec", said)[-1]) > 0
    for pattern in (r"mlm_acc: *(.*?) \%", r"nsp_acc: *(.*?) \%", r"nsp_loss: *(\d*\.\d*)"):
        assert 0 <= float(re.findall(pattern, said)[-1]) <= 3
    for pattern in (r"mlm_loss: *(\d*\.\d*)", r"total loss: *(\d*\.\d*)"):
        assert float(re.findall(pattern, said)[-1]) == pytest.approx(6.2, abs=1)  # ln 512


# ---- the same numbers ------------------------------------------------------------------------------------

LAYOUTS = {
    "unsplit": UNSPLIT,
    "other ipus": ["--layers-per-ipu", "1", "1", "--ipus-per-replica", "2"],
    "recomputed": ["--recompute-checkpoint-every-layer"],
    "sharded state": ["--replicated-tensor-sharding"],
}


@pytest.fixture(scope="module", params=["32.32", "16.16"])
def reference(bert, request, tmp_path_factory):
    """Four steps in the config's own layout, with dropout: flags, losses, weights."""
    flags = shlex.split(
        f"--precision {request.param} --loss-scaling 64 --hidden-dropout-prob 0.1 --dataset random"
    )
    folder = tmp_path_factory.mktemp("reference")
    tracker = bert.main([*TINY, *flags, "--checkpoint-output-dir", str(folder), "--checkpoint-steps", "2"])
    return flags, losses(tracker), folder


@pytest.mark.parametrize(
    ("reference", "layout"),
    [*(("32.32", layout) for layout in LAYOUTS), ("16.16", "unsplit")],
    indirect=["reference"],
)
def test_every_layout_makes_the_same_bits(bert, reference, layout, tmp_path):
    flags, expected, folder = reference
    tracker = bert.main([*TINY, *flags, *LAYOUTS[layout], "--checkpoint-output-dir", str(tmp_path)])
    assert losses(tracker) == expected
    assert_equal_weights(weights(tmp_path / "step_4"), weights(folder / "step_4"))


@pytest.mark.parametrize("optimizer", ["LAMB", "AdamW", "LAMBNoBiasCorrection"])
def test_an_optimizer_agrees_with_its_twin_in_plain_pytorch(bert, optimizer):
    flags = [*TINY, *LANGUAGE, "--optimizer", optimizer, "--training-steps", "5"]
    twin = on_one_thread(importlib.import_module("train_torch").main, flags)
    assert losses(bert.main(flags)) == pytest.approx(twin.losses, abs=1e-5)


def test_stochastic_rounding_follows_float32_where_nearest_rounding_stands_still(bert, tmp_path):
    """Updates of at most 6.6e-6, where numbers of half precision are 1.5e-5 apart or more: of weights above 0.016."""
    flags = ["--learning-rate", "1e-6", "--lr-schedule", "constant", "--weight-decay", "0"]
    flags += ["--device-iterations", "10", "--training-steps", "2"]
    kinds = {"float32": [], "stochastic": HALF, "nearest": [*HALF, "--stochastic-rounding", "0"]}
    moved, large = {}, None
    for name, precision in kinds.items():
        bert.main([*TINY, *flags, *precision, "--checkpoint-output-dir", str(tmp_path / name)])
        before, after = (
            torch.cat(
                [value.float().flatten() for value in weights(tmp_path / name / f"step_{step}").values()]
            )
            for step in (0, 2)
        )
        large = before.abs() > 0.016 if large is None else large
        moved[name] = (after - before)[large]
    reference = moved["float32"]
    followed = {name: float(change @ reference / (reference @ reference)) for name, change in moved.items()}
    assert followed["stochastic"] == pytest.approx(1, abs=0.1)
    assert followed["nearest"] == pytest.approx(0, abs=0.02)


# ---- checkpoints -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "layout"),
    [("32.32", "same"), ("32.32", "unsplit"), ("16.16", "sharded state")],
    indirect=["reference"],
)
def test_a_resumed_training_is_the_unbroken_one_to_the_last_bit(bert, reference, layout, tmp_path):
    flags, expected, folder = reference
    resume = ["--checkpoint-input-dir", str(folder / "step_2"), "--resume-training-from-checkpoint"]
    tracker = bert.main(
        [*TINY, *flags, *LAYOUTS.get(layout, []), *resume, "--checkpoint-output-dir", str(tmp_path)]
    )
    assert [step["step"] for step in tracker.steps] == [2, 3]
    assert losses(tracker) == expected[2:]
    assert_equal_weights(weights(tmp_path / "step_4"), weights(folder / "step_4"))


@pytest.mark.parametrize("reference", ["32.32"], indirect=True)
def test_without_the_resume_flag_only_weights_are_taken_whatever_the_decoders_parts(bert, reference):
    flags, expected, folder = reference
    start = ["--checkpoint-input-dir", str(folder / "step_0"), "--embedding-serialization-factor", "4"]
    tracker = bert.main([*TINY, *flags, *start])
    assert [step["step"] for step in tracker.steps] == [0, 1, 2, 3]
    assert losses(tracker) == pytest.approx(expected, abs=2e-6)


def test_deparallelize_leaves_the_librarys_plain_model(bert):
    from transformers import BertForPreTraining

    flags = bert.arguments.parse_arguments(
        [*TINY, "--embedding-serialization-factor", "4", "--recompute-checkpoint-every-layer"]
    )
    model = bert.models.make_model(flags).parallelize(flags).deparallelize()
    plain = BertForPreTraining(bert.models.bert_config(flags))
    assert [(n, type(m)) for n, m in model.named_modules()][1:] == [
        (n, type(m)) for n, m in plain.named_modules()
    ][1:]
    assert not any(module._forward_hooks for module in model.modules())
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight


@pytest.mark.parametrize("reference", ["32.32"], indirect=True)
def test_the_library_reads_a_checkpoint(bert, reference):
    from transformers import BertForPreTraining

    _, _, folder = reference
    model = BertForPreTraining.from_pretrained(folder / "step_4")
    stored = weights(folder / "step_4")["bert.pooler.dense.weight"]
    assert torch.equal(model.bert.pooler.dense.weight, stored)


# ---- what stops a training -------------------------------------------------------------------------------


def test_a_training_that_overflows_stops_with_its_step_and_loss_scale(bert, tmp_path):
    flags = ["--learning-rate", "1e30", "--lr-schedule", "constant", "--checkpoint-output-dir", str(tmp_path)]
    with pytest.raises(
        SystemExit, match=r"the loss of step 1 is nan at a loss scaling of 1: the training stops"
    ):
        bert.main([*TINY, *flags])
    assert [path.name for path in tmp_path.iterdir()] == ["step_0"]


def test_of_several_checkpoints_the_one_with_the_highest_number_is_taken(bert, tmp_path):
    for step in (0, 9, 10):
        (tmp_path / f"step_{step}").mkdir()
    assert bert.training.checkpoints.newest(str(tmp_path)).name == "step_10"
    with pytest.raises(SystemExit, match="holds no checkpoint"):
        bert.training.checkpoints.newest(str(tmp_path / "step_9"))


@pytest.mark.parametrize(
    ("folder", "message"),
    [("nowhere", "nowhere: there is no such folder"), ("bare", "bare has weights but no training_state.pt")],
)
def test_a_checkpoint_that_is_not_there_is_said(bert, tmp_path, folder, message):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match=message):
        bert.main(
            [*TINY, "--resume-training-from-checkpoint", "--checkpoint-input-dir", str(tmp_path / folder)]
        )


@pytest.mark.parametrize("reference", ["32.32"], indirect=True)
def test_a_checkpoint_of_another_model_is_refused_and_a_folder_with_checkpoints_not_written_to(
    bert, reference
):
    with pytest.raises(SystemExit, match=r"holds checkpoints already, such as .*step_0"):
        bert.main([*TINY, "--checkpoint-output-dir", str(reference[2])])
    with pytest.raises(SystemExit, match=r"is of another model: --hidden-size 64, but there it is 32"):
        bert.main([*TINY, "--checkpoint-input-dir", str(reference[2]), "--hidden-size", "64"])


# ---- instances -------------------------------------------------------------------------------------------


def test_two_instances_train_as_one_and_one_goes_on_where_they_ended(bert, tmp_path):
    """From optimizer state that is shared out over two processes to one that is whole, in one process."""
    flags = [*TINY, "--dataset", "random", "--async-dataloader", "false"]
    expected = losses(
        bert.main([*flags, "--replication-factor", "2", "--checkpoint-output-dir", str(tmp_path / "one")])
    )
    program = [sys.executable, bert.__file__, *flags, "--enable-rts", "--checkpoint-steps", "2"]
    program += ["--checkpoint-output-dir", str(tmp_path / "two"), "--ipus-per-replica", "3"]
    said = run("-m", "poprun", "--num-instances", "2", "--num-replicas", "2", *program).stderr
    assert re.findall(r"total loss: ([\d.]+)", said) == [f"{loss:.3f}" for loss in expected]
    assert_equal_weights(weights(tmp_path / "one" / "step_4"), weights(tmp_path / "two" / "step_4"))
    resume = ["--checkpoint-input-dir", str(tmp_path / "two" / "step_2"), "--resume-training-from-checkpoint"]
    again = bert.main(
        [*flags, "--replication-factor", "2", *resume, "--checkpoint-output-dir", str(tmp_path / "three")]
    )
    assert losses(again) == expected[2:]
    assert_equal_weights(weights(tmp_path / "one" / "step_4"), weights(tmp_path / "three" / "step_4"))
