"""The example of residual networks: its flags, its data, its numbers, and its trainings in all layouts."""

import argparse
import importlib
import pickle
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from programs import run
from torch import nn

EXAMPLE = Path(__file__).parents[2] / "examples" / "resnet_training"
MODULES = (
    *("flags", "schedules", "batches", "images", "models", "checkpoints"),
    *("train", "validate", "restore", "train_torch"),
)
TINY = ["--config", "test", "--data", "fashion-mnist", "--disable-progress-bar"]


@pytest.fixture(scope="module")
def program(program):
    """The example's modules."""
    with program("resnet_training", "train"):
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})


@pytest.fixture
def tiny(small_fashion) -> list[str]:
    return [*TINY, "--data-dir", str(small_fashion)]


# ---- flags -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "accumulation", "replicas", "global_batch"),
    [("resnet50", 57, 16, 16_416), ("resnet50-pod4", 228, 4, 16_416), ("resnet50-POD64", 14, 64, 16_128)],
)
def test_a_named_config_is_complete(program, name, accumulation, replicas, global_batch):
    flags = program.flags.parse(["--config", name, "--imagenet-data-path", "."])
    assert (flags.gradient_accumulation, flags.replicas) == (accumulation, replicas)
    assert flags.micro_batch_size * accumulation * replicas == global_batch
    assert (flags.model, flags.precision, flags.optimizer, flags.momentum) == (
        "resnet50",
        "16.16",
        "sgd_combined",
        0.9,
    )
    assert (flags.lr, flags.lr_schedule, flags.epoch, flags.warmup_epoch) == (2.0, "cosine", 100, 5)
    assert (flags.lr_scheduler_freq, flags.weight_decay, flags.label_smoothing) == (16, 1e-4, 0.1)
    assert (flags.loss_scaling, flags.seed, flags.normalization_location) == (128, 42, "ipu")
    assert flags.eight_bit_io and flags.half_partial and flags.enable_stochastic_rounding


def test_the_command_line_overrides_the_config_and_may_be_cut_short(program):
    flags = program.flags.parse(
        ["--config", "resnet50", "--data", "generated", "--micro-batch", "2", "--eight-bit", "0"]
    )
    assert (flags.micro_batch_size, flags.eight_bit_io, flags.gradient_accumulation) == (2, False, 57)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "resnet50-pod16"], "near it: resnet50-pod64, resnet50-pod4"),
        (["--half-partial", "maybe"], "not a valid boolean value"),
        (["--mixup-alpha", "0.2"], "--mixup-alpha of the original program does not exist here"),
        (["--data", "imagenet"], "--data imagenet needs --imagenet-data-path DIR"),
        (
            ["--initial-loss-scaling", "3", "--loss-scaling", "128"],
            "--initial-loss-scaling 3 doubled some times",
        ),
        (["--recompute-mode", "manual"], "needs --recompute-checkpoints"),
        (["--bn-group-size", "2", "--norm-type", "group"], "--bn-group-size 2 needs --norm-type batch"),
        (["--available-memory-proportion", "0.1", "0.2"], "each of the 1 ipus that --pipeline-splits makes"),
        (
            ["--bn-group-size", "2", "--pipeline-splits", "layer2"],
            "needs one ipu a replica: leave out --pipeline-splits",
        ),
        (["--initial-loss-scaling", "1", "--auto-loss-scaling"], "--auto-loss-scaling exclude each other"),
        (["--weight-avg-strategy", "mean"], "it needs --checkpoint-output-dir"),
        (["--eight-bit-io", "--normalization-location", "none"], "--normalization-location ipu"),
        (["--replicas", "0"], "--replicas must be at least 1"),
    ],
)
def test_flags_that_do_not_fit_are_usage_errors(program, capsys, words, message):
    with pytest.raises(SystemExit) as stopped:
        program.flags.parse(words)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data-dir", "nowhere"], "--data-dir: a file of MNIST is missing in nowhere"),
        (["--data", "cifar10"], "--data cifar10 needs --data-dir"),
        (["--data", "cifar10", "--data-dir", "."], r"--data-dir \. has no data_batch_1.bin, .* of CIFAR-10"),
        (["--data", "imagenet", "--imagenet-data-path", "."], r"--imagenet-data-path \. has no folder train"),
        (["--checkpoint-input-dir", "nowhere"], "nowhere holds no checkpoint MODEL_DATA_EPOCH.pt"),
        (["--wandb"], "--wandb needs the package wandb"),
        (["--bn-group-size", "3", "--replicas", "4"], "--bn-group-size 3 does not divide the 4 replicas"),
    ],
)
def test_what_stops_a_training_is_said(program, monkeypatch, tmp_path, words, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SystemExit, match=message):
        program.train.main(["--model", "resnet8", "--precision", "32.32", "--micro-batch-size", "4", *words])


def test_a_mistyped_key_of_a_config_is_an_error(program, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(program.flags, "CONFIGS", tmp_path / "mine.yml")
    (tmp_path / "mine.yml").write_text("mine: {micro_batch: 4, lr: 1.0}")
    with pytest.raises(SystemExit):
        program.flags.parse(["--config", "mine"])
    assert (
        "config 'mine' has an unknown key 'micro_batch'; near it: micro_batch_size" in capsys.readouterr().err
    )


@pytest.mark.parametrize("words", [["--wandb"], ["--wandb", "True"], ["--wandb", "y"], ["--wandb=1"]])
def test_a_switch_takes_a_word_or_none(program, words):
    assert program.flags.parse(words).wandb is True


def test_old_names_of_flags_are_accepted_with_a_warning(program):
    flags = program.flags.parse(["--batch-size", "8", "--checkpoint-path", "here", "--enable-recompute"])
    assert (flags.micro_batch_size, flags.checkpoint_output_dir, flags.recompute_mode) == (
        8,
        Path("here"),
        "auto",
    )
    assert flags.warnings[0] == "--batch-size is now called --micro-batch-size"


# ---- schedules -------------------------------------------------------------------------------------------


def rates(program, calls: int, **given) -> list[float]:
    flags = program.flags.parse([])
    vars(flags).update(given)
    return [
        pytest.approx(program.schedules.learning_rate(flags, call / calls, 1 / calls))
        for call in range(given["epoch"] * calls)
    ]


def test_learning_rates_follow_the_formulas(program):
    root = 2**0.5
    assert rates(program, 2, epoch=2, lr=8.0, lr_schedule="cosine") == [8, 4 + 2 * root, 4, 4 - 2 * root]
    assert rates(program, 2, epoch=3, lr=8.0, lr_decay=0.5, lr_epoch_decay=[1, 2]) == [8, 8, 4, 4, 2, 2]
    assert rates(program, 2, epoch=2, lr=8.0, lr_schedule="exponential", lr_decay=0.25) == [8, 4, 2, 1]
    assert rates(program, 2, epoch=2, lr=16.0, lr_schedule="polynomial") == [16, 9, 4, 1]


def test_a_schedule_ticks_as_often_as_asked_for(program):
    given = dict(epoch=2, lr=8.0, lr_schedule="exponential", lr_decay=0.25)
    assert rates(program, 2, lr_scheduler_freq=1, **given) == [8, 8, 2, 2]


def test_the_rate_warms_up_and_the_first_call_trains(program):
    assert rates(program, 4, epoch=2, lr=8.0, warmup_epoch=1.0) == [2, 2, 4, 6, 8, 8, 8, 8]


def test_loss_scaling_doubles_in_equal_shares_of_the_epochs(program):
    flags = argparse.Namespace(initial_loss_scaling=16.0, loss_scaling=128.0, epoch=100)
    scales = [program.schedules.loss_scaling(flags, epoch) for epoch in range(100)]
    assert scales == [16] * 25 + [32] * 25 + [64] * 25 + [128] * 25


# ---- data ------------------------------------------------------------------------------------------------


def dealing(program, rows, layout, epoch):
    """Layouts: micro-batch, accumulation, iterations, all replicas, those of an instance, the instance."""
    return program.batches.Dealing(rows, program.batches.Layout(*layout), seed=5, epoch=epoch)


@pytest.mark.parametrize(("replicas", "instances"), [(4, 1), (2, 2), (1, 4), (2, 1), (1, 1)])
def test_a_weight_update_sees_the_same_micro_batches_in_every_layout(program, replicas, instances):
    """Four micro-batches of 2 rows: replicas of all instances × accumulation is 4."""
    accumulation = 4 // (replicas * instances)
    dealt = [
        list(dealing(program, 37, (2, accumulation, 1, replicas * instances, replicas, instance), epoch=1))
        for instance in range(instances)
    ]
    parts = torch.tensor(dealt).view(instances, -1, accumulation, replicas, 2)
    updates = parts.permute(1, 2, 0, 3, 4).reshape(-1, 4, 2)
    (alone,) = [list(dealing(program, 37, (2, 4, 1, 1, 1), epoch=1))]
    assert updates.flatten().tolist() == alone
    assert len(set(alone)) == 32 and all(37 <= key < 74 for key in alone)


def test_each_epoch_has_its_own_order(program):
    epochs = dealing(program, 16, (2, 2, 1, 1, 1), epoch=0)
    first, second = list(epochs), list(epochs)
    assert [key - 16 for key in second] != first
    assert sorted(second) == list(range(16, 32))


def test_too_few_images_are_an_error_that_names_the_flags(program):
    with pytest.raises(SystemExit, match="15 images don't fill one call of 16: lower --micro-batch-size"):
        dealing(program, 15, (2, 4, 1, 2, 2), epoch=0)


def test_what_augmentation_draws_depends_on_seed_epoch_and_index_alone(program, small_fashion):
    data = program.images.fashion(small_fashion, "train")
    together, labels = data.__getitems__([3, 64 + 3, 7])
    assert torch.equal(together[0], data[3][0]) and torch.equal(together[2], data[7][0])
    assert not torch.equal(together[0], together[1])  # another epoch
    assert labels.tolist() == [3, 3, 7]
    data.seed = 1
    assert not torch.equal(together[0], data[3][0])


def test_moves_and_mirrors_are_equally_likely(program):
    keys = list(range(20_000))
    draws = program.images.draws(0, keys)
    moves = np.bincount((draws[:, 0] % np.uint64(5)).astype(int)) / len(keys)
    assert np.abs(moves - 0.2).max() < 0.01
    assert abs((draws[:, 2] >> np.uint64(63)).mean() - 0.5) < 0.01


def test_an_image_is_moved_and_mirrored_as_drawn(program):
    image = np.arange(1, 10, dtype=np.uint8).reshape(1, 1, 3, 3)
    down_right = np.array([[0, 1, 0]], np.uint64)  # the crop begins a row above; columns as they are
    assert program.images.augmented(image, down_right, 1, flips=True).tolist() == [
        [[[0, 0, 0], [1, 2, 3], [4, 5, 6]]]
    ]
    mirrored = np.array([[1, 1, 1 << 63]], np.uint64)
    assert program.images.augmented(image, mirrored, 1, flips=True).tolist() == [
        [[[3, 2, 1], [6, 5, 4], [9, 8, 7]]]
    ]


def test_cifar10_is_the_same_from_python_and_from_binary_batches(program, tmp_path):
    pixels = np.random.RandomState(0).randint(0, 256, (4, 3072), np.uint8)
    labels = [3, 1, 4, 1]
    for name, folder in (("test_batch", "python"), ("test_batch.bin", "binary")):
        (tmp_path / folder).mkdir()
        rows = pickle.dumps({b"data": pixels, b"labels": labels})
        if folder == "binary":
            rows = np.concatenate([np.array(labels, np.uint8)[:, None], pixels], axis=1).tobytes()
        (tmp_path / folder / name).write_bytes(rows)
    python, binary = (
        program.images.cifar10(tmp_path / folder, "validation") for folder in ("python", "binary")
    )
    for (image, label), (other, other_label) in zip(
        map(python.__getitem__, range(4)), map(binary.__getitem__, range(4)), strict=True
    ):
        assert torch.equal(image, other) and label == other_label
    assert python.shape == (3, 32, 32) and python.labels.tolist() == labels
    with pytest.raises(SystemExit, match=r"has no data_batch_1\.bin, .* of CIFAR-10"):
        program.images.cifar10(tmp_path / "binary", "train")


def test_images_of_folders_and_of_tar_files_are_the_same(program, tmp_path):
    image = pytest.importorskip("PIL.Image")
    folders = importlib.import_module("folders")
    pixels = np.random.RandomState(0).randint(0, 256, (300, 260, 3), np.uint8)
    for part in ("train", "validation"):
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            image.fromarray(pixels).save(tmp_path / part / name / "1.JPEG")
    found = folders.open_part(tmp_path, "train", augments=True)
    assert (len(found), found.classes, found.labels.tolist()) == (2, 2, [0, 1])
    images, _ = found.__getitems__([0, 1, 2])
    assert images.shape == (3, 3, 224, 224) and not torch.equal(images[0], images[2])
    (tmp_path / "validation" / "1.cls").write_text("1")
    (tmp_path / "validation" / "1.jpg").write_bytes((tmp_path / "train" / "cat" / "1.JPEG").read_bytes())
    subprocess.run(["tar", "-cf", "a.tar", "1.jpg", "1.cls"], cwd=tmp_path / "validation", check=True)
    shards = folders.open_part(tmp_path, "validation", augments=False)
    assert (len(shards), shards.labels.tolist()) == (1, [1])
    assert shards.__getitems__([0])[0].shape == (1, 3, 224, 224)


# ---- models ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "classes", "weights"),
    [
        ("resnet18", 1000, 11_689_512),
        ("resnet34", 1000, 21_797_672),
        ("resnet50", 1000, 25_557_032),
        ("resnet20", 10, 272_474),  # the paper's 0.27 M, with 1 × 1 convolutions for two shortcuts
        ("resnet8", 10, 78_042),
    ],
)
def test_networks_have_as_many_weights_as_those_of_the_papers(program, name, classes, weights):
    with torch.device("meta"):
        net = program.models.ResNet(name, classes, 3, nn.BatchNorm2d, small=name in program.models.SMALL)
    assert sum(weight.numel() for weight in net.parameters()) == pytest.approx(weights, rel=0.011)
    assert "layer2.0.conv1.weight" in dict(net.named_parameters())


def test_the_two_parts_of_the_loss_are_cross_entropy_with_label_smoothing(program):
    torch.manual_seed(0)
    net = program.models.ResNet("resnet8", 10, 1, nn.BatchNorm2d, width=4)
    images, labels = torch.randn(6, 1, 28, 28), torch.arange(6)
    loss, accuracy, classification, smoothing = program.models.Classifier(net, 0.1, nn.Identity())(
        images, labels
    )
    scores = program.models.Classifier(net, 0.1, nn.Identity())(images)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(scores, labels, label_smoothing=0.1))
    torch.testing.assert_close(loss, classification + smoothing)
    torch.testing.assert_close(smoothing, -0.1 * scores.log_softmax(1).mean())
    assert accuracy == (scores.argmax(1) == labels).float().mean()


# ---- trainings -------------------------------------------------------------------------------------------


def losses(rows) -> list[float]:
    return [row["loss_batch"] for row in rows]


EVERY_CALL = ["--logs-per-epoch", "1000", "--validation-mode", "none"]


@pytest.mark.kind("an example: ResNet")
def test_a_training_says_what_parsers_look_for_and_resumes_to_the_bit(program, tiny, tmp_path, caplog):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    rows = program.train.main(
        [*tiny, *EVERY_CALL, "--checkpoint-output-dir", str(whole), "--lr-schedule", "cosine"]
    )
    said = "\n".join(caplog.messages)
    for line in (
        "Total replicas: 2",
        "Global batch size: 16",
        "Number of IPUs required: 2",
        "Epoch 1/2",
        "Epoch 1",
    ):
        assert line in said.splitlines()
    assert re.search(r"throughput: *(.*?) samples\/sec", said)
    assert re.search(r"accuracy: *(.*?) \%", said)
    assert re.search(r"loss: *(\d*\.\d*)", said)
    assert re.search(r"waiting for data: [\d.]+ % of the time", said)
    assert f"Checkpoint saved to: {whole}/resnet8_fashion-mnist_1.pt" in said.splitlines()
    assert (
        (whole / "training.csv")
        .read_text()
        .startswith("epoch,iteration,loss_avg,loss_batch,train_accuracy_avg")
    )
    assert (whole / "app.json").exists()
    halves.mkdir()
    (halves / "resnet8_fashion-mnist_1.pt").write_bytes((whole / "resnet8_fashion-mnist_1.pt").read_bytes())
    where = ["--checkpoint-input-path", str(halves), "--checkpoint-output-dir", str(halves)]
    assert losses(program.restore.main(where)) == losses(rows)[4:]
    unbroken, resumed = (
        torch.load(folder / "resnet8_fashion-mnist_2.pt", weights_only=False) for folder in (whole, halves)
    )
    for name, value in unbroken["model_state_dict"].items():
        assert torch.equal(value, resumed["model_state_dict"][name]), name
    assert {"epoch", "optimizer_state_dict", "loss", "train_accuracy", "args"} < set(unbroken)
    (first, last) = program.validate.main(["--checkpoint-input-path", str(whole)])
    assert 0 <= first <= 1 and last * 27 == pytest.approx(round(last * 27))
    with pytest.raises(SystemExit, match=r"already has resnet8_fashion-mnist_2\.pt: name another folder"):
        program.train.main([*tiny, "--checkpoint-output-dir", str(whole)])


def test_the_twin_in_plain_pytorch_has_the_same_losses(program, tiny):
    flags = [*tiny, *EVERY_CALL, "--epoch", "1", "--label-smoothing", "0.1", "--warmup-epoch", "0.5"]
    assert losses(program.train.main(flags)) == pytest.approx(program.train_torch.main(flags), abs=1e-5)


def test_a_pipeline_of_three_ipus_with_recomputation_gives_the_same_losses(program, tiny):
    flags = [*tiny, *EVERY_CALL, "--epoch", "1", "--replicas", "1", "--gradient-accumulation", "5"]
    split = ["--pipeline-splits", "layer1/0", "layer2/0/conv2", "--recompute-mode", "manual"]
    cut = program.train.main([*flags, *split, "--recompute-checkpoints", r"layer\d\.\d$"])
    assert losses(cut) == losses(program.train.main(flags))


def test_a_split_at_an_unknown_layer_names_those_near_it(program, tiny):
    with pytest.raises(SystemExit, match="there is no layer layer2/1; near it are"):
        program.train.main([*tiny, "--pipeline-splits", "layer2/1"])


@pytest.mark.parametrize(
    "flags",
    [
        ["--precision", "16.16", "--enable-stochastic-rounding", "--loss-scaling", "128", "--eight-bit-io"],
        ["--precision", "16.32", "--optimizer", "lars", "--norm-type", "group", "--auto-loss-scaling"],
        shlex.split("--optimizer rmsprop_tf --lr 0.001 --initial-loss-scaling 1 --loss-scaling 4"),
        shlex.split("--optimizer sgd --momentum 0.9 --memory-format channels_last"),
        shlex.split("--optimizer adamw --lr 0.001 --data synthetic --iterations 4 --bn-group-size 2"),
        ["--optimizer", "lamb", "--norm-type", "none", "--normalization-location", "ipu"],
        ["--optimizer", "sgd_combined", "--momentum", "0.9", "--offload-optimizer", "--enable-optimizer-rts"],
    ],
)
def test_other_precisions_optimizers_and_norms_train(program, tiny, flags):
    rows = program.train.main([*tiny, *EVERY_CALL, "--epoch", "1", *flags])
    assert len(rows) == 4 and all(0 < loss < 4 for loss in losses(rows))


def test_weights_of_checkpoints_are_averaged_in_float64(program, tmp_path):
    paths = [tmp_path / f"net_data_{epoch}.pt" for epoch in (9, 10, 11)]
    for path, value in zip(paths, (1.0, 2.0, 6.0), strict=True):
        program.checkpoints.save(
            path, {"model_state_dict": {"w": torch.full((2,), value), "n": torch.tensor(7)}}
        )
    assert program.checkpoints.all_in(tmp_path) == paths  # by number: 9 before 10
    mean = program.checkpoints.averaged(paths, "mean", 0.0)
    assert mean["w"].tolist() == [3.0, 3.0] and mean["n"] == 7
    assert program.checkpoints.averaged(paths, "exponential", 0.5)["w"].tolist() == [3.75, 3.75]


def test_a_loss_that_is_no_number_ends_the_training(program, tiny):
    with pytest.raises(SystemExit, match=r"the loss is nan at call 2 of epoch 1, with loss scale 1\b"):
        program.train.main([*tiny, "--lr", "1e30"])


def test_two_instances_train_as_one_process_does(program, tiny, tmp_path):
    """4 replicas as 1 × 4 and 2 × 2: weights are equal to the bit, and the running statistics too; and so is the
    optimizer's state, of which the two have a part each and the first one alone asks for it."""
    flags = [*tiny, "--replicas", "4", "--gradient-accumulation", "1", "--epoch", "1", "--bn-group-size", "2"]
    program.train.main([*flags, "--checkpoint-output-dir", str(tmp_path / "one")])
    poprun = ["-m", "poprun", "--num-replicas=4", "--num-instances=2"]
    command = [*poprun, sys.executable, str(EXAMPLE / "train.py"), *flags]
    said = run(*command, "--checkpoint-output-dir", tmp_path / "two", "--enable-optimizer-rts").stderr
    assert "poprun gives 2 replicas to each instance, in place of --replicas 4" in said
    one, two = (
        torch.load(tmp_path / name / "resnet8_fashion-mnist_1.pt", weights_only=False)
        for name in ("one", "two")
    )
    for name in dict(one["model_state_dict"]):
        assert torch.equal(one["model_state_dict"][name], two["model_state_dict"][name]), name
    states = one["optimizer_state_dict"]["ipu_state"], two["optimizer_state_dict"]["ipu_state"]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert len(list((tmp_path / "two").glob("*.pt"))) == 1
    assert len(re.findall(r"Accuracy on test set: [\d.]+%", said)) == 1


def test_the_picture_of_curves_says_how_far_they_are_apart(program, small_fashion, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    pictures = importlib.import_module("pictures")
    path = tmp_path / "curves.png"
    words = [
        "--micro-batch-size",
        "1",
        "--width",
        "4",
        "--data-dir",
        str(small_fashion),
        "--bn-group-size",
        "1",
    ]
    pictures.main(["curves", "--updates", "3", "--output", str(path), "--norm-type", "group", *words])
    found = re.search(r"largest distance of 5 curves over 3 updates: (\S+);", capsys.readouterr().out)
    assert found and float(found[1]) < 1e-5
    assert path.read_bytes().startswith(b"\x89PNG")
