"""A training goes on from a checkpoint as if it had never ended, or from the one before if that is damaged."""

import json
import logging
import os
import re
import resource
import threading
import time
import zlib

import pytest
import torch
from checkpoint_program import Net, Training, adamw, difference, torchs_sgd

import popdist
import poptorch
from popdist import checkpoint_files as files
from poprun.shared_folder import SharedFolder

CALLS = 6


def options():
    return poptorch.Options().replicationFactor(2)


def unbroken(folder, **how):
    training = Training(options(), folder / "unbroken", **how)
    training.restore()
    return training.train(CALLS).result()


@pytest.mark.parametrize(
    "how", [{"optimizer": adamw}, {"optimizer": torchs_sgd}, {"mode": poptorch.DataLoaderMode.Async}]
)
@pytest.mark.parametrize("compiled", [False, True], ids=["not compiled", "compiled"])
def test_a_training_goes_on_to_the_bits_of_one_that_never_ended(tmp_path, how, compiled):
    expected = unbroken(tmp_path, **how)
    first = Training(options(), tmp_path / "a", **how)
    assert first.restore() == 0
    first.train(5).loader.terminate()  # the last checkpoint is of call 4, in the middle of an epoch
    second = Training(options(), tmp_path / "a", seed=99, **how)
    if compiled:
        second.trainer(*next(iter(second.loader)))
    assert second.restore() == 4
    found = second.train(CALLS).result()
    assert difference(found, {**expected, "losses": expected["losses"][4:]}) == ""


def test_the_newest_few_stay_what_killed_runs_left_goes_and_later_calls_do_not_count(tmp_path):
    training = Training(options(), tmp_path, every=1)
    training.restore()
    # The last two as another run, in the same folder at the same time, would write them.
    for name in ("call-1.abc.unfinished", "call-16", "call-18"):
        (tmp_path / name).mkdir()
    training.train(4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["call-16", "call-18", "call-3", "call-4"]
    assert sorted(path.name for path in (tmp_path / "call-4").iterdir()) == ["instance-0.pt", "manifest"]


def test_resumable_yields_the_batches_that_are_left_and_saves_after_the_last(tmp_path, monkeypatch):
    monkeypatch.setenv("POPDIST_CHECKPOINT_DIR", str(tmp_path))

    def batches(training, stop=None):
        checkpoint = popdist.Checkpoint.every(calls=5)
        resumable = popdist.resumable(
            training.loader, checkpoint, training.trainer, epochs=3, schedule=training.schedule
        )
        for number, batch in enumerate(resumable, start=checkpoint.calls + 1):
            training.trainer(*batch)
            yield checkpoint.calls
            if number == stop:
                checkpoint.wait()
                return

    assert list(batches(Training(options(), tmp_path / "unused"), stop=6)) == [0, 1, 2, 3, 4, 5]
    assert list(batches(Training(options(), tmp_path / "unused", seed=99))) == [5, 6, 7, 8, 9, 10, 11]
    assert [path.name for path in files.complete_checkpoints(tmp_path)] == ["call-12", "call-10"]
    assert list(batches(Training(options(), tmp_path / "unused", seed=98))) == []


def trained_to_four(folder):
    training = Training(options(), folder)
    training.restore()
    training.train(4)


def with_checksum(text):
    return f"{zlib.crc32(text):08x}".encode() + text


@pytest.mark.parametrize("damage", ["cut short", "another bit", "gone", "no manifest", "another version"])
def test_of_a_damaged_checkpoint_the_one_before_is_taken_and_that_is_said(tmp_path, damage, caplog):
    trained_to_four(tmp_path)
    file, manifest = (tmp_path / "call-4" / name for name in ("instance-0.pt", "manifest"))
    content = bytearray(file.read_bytes())
    if damage == "another bit":
        content[len(content) // 2] ^= 1
    file.write_bytes(content[: -1 if damage == "cut short" else None])
    if damage in ("gone", "no manifest"):
        (file if damage == "gone" else manifest).unlink()
    if damage == "another version":
        text = manifest.read_bytes()[8:].replace(b'"format": ', b'"format": 99')
        manifest.write_bytes(with_checksum(text))
    training = Training(options(), tmp_path, seed=99)
    with caplog.at_level(logging.WARNING):
        assert training.restore() == 2
    assert "call-4: " in caplog.text and ", and an older one is tried" in caplog.text
    assert f"the run resumes after call 2, from {tmp_path / 'call-2'}" in caplog.text
    named = "another version of Pando wrote it, in format 992; this version reads format "
    assert (named in caplog.text) == (damage == "another version")
    training.train(4)
    assert files.find_damage(tmp_path / "call-4") == []
    (aside,) = tmp_path.glob("call-4.unreadable-*")
    assert f"it is renamed to {aside.name}" in caplog.text


def test_a_run_whose_newest_checkpoints_are_damaged_keeps_those_that_it_writes(tmp_path, caplog):
    """Those of later calls were counted as newer, so each new checkpoint was removed at once."""
    trained_to_four(tmp_path)
    for call in (2, 4):
        (tmp_path / f"call-{call}").rename(tmp_path / f"call-{call + 10}")
        (tmp_path / f"call-{call + 10}" / "instance-0.pt").write_bytes(b"cut")
    training = Training(options(), tmp_path)
    with caplog.at_level(logging.WARNING):
        assert training.restore() == 0
    training.train(4)
    assert [path.name for path in files.complete_checkpoints(tmp_path)] == ["call-4", "call-2"]
    assert len(list(tmp_path.glob("call-1?.unreadable-*"))) == 2
    assert Training(options(), tmp_path).restore() == 4


def test_each_bit_of_a_manifest_is_checked(tmp_path):
    trained_to_four(tmp_path)
    manifest = tmp_path / "call-4" / "manifest"
    content = manifest.read_bytes()
    passed = []
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        manifest.write_bytes(changed)
        if not files.find_damage(tmp_path / "call-4"):
            passed.append(bit)
    assert passed == []
    for text in (b"", b"[" * 100_000, b"{}", content[:-1], content + b" "):
        manifest.write_bytes(text)
        assert files.find_damage(tmp_path / "call-4") != []


def test_a_manifest_with_a_right_checksum_and_wrong_contents_is_damage(tmp_path):
    named, one = {"files": ["instance-0.pt"]}, {"format": 2, "run": {"replicas": 1}}
    for contents in (
        *(
            [],
            7,
            None,
            {},
            {"format": 2},
            {"format": 2, "run": 7, "files": []},
            {"format": 2, "run": {}, **named},
        ),
        *({"format": 2, "run": {"replicas": n}, **named} for n in ("1", 0, None)),
        *({**one, "files": f} for f in ([], 3, [7], ["../call-2/instance-0.pt"])),
    ):
        (tmp_path / "manifest").write_bytes(with_checksum(f"\n{json.dumps(contents)}\n".encode()))
        (damage,) = files.find_damage(tmp_path)
        assert damage.startswith("manifest: it ") or "another version" in damage, contents


def test_what_a_new_name_shows_is_on_the_disk_before(tmp_path, monkeypatch):
    """Each rename and link, and the files and folders that were flushed before and after it."""
    done = []

    def path_of(descriptor):
        return os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))

    def record(name, owner, described):
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *words: (done.append(described(*words)), call(*words))[1])

    record("fsync", os, lambda descriptor: f"flush {path_of(descriptor)}")
    record("rename", os, lambda source, target: f"rename to {os.path.basename(target)}")
    record("link", os, lambda source, target: f"link {os.path.basename(target)}")
    (folder := tmp_path / "checkpoints").mkdir()
    files.write_checkpoint(folder / "call-2.5f.unfinished", 0, 1, {"x": torch.ones(2)}, {"replicas": 1}, 1)
    assert done == [
        *("flush instance-0.part", "rename to instance-0.pt"),
        *("flush manifest", "flush call-2.5f.unfinished", "rename to call-2", "flush checkpoints"),
    ]
    del done[:]
    shared = SharedFolder(str(tmp_path), "/tmp/poprun-x")
    shared.read_state()
    shared.replace_state("{}")
    assert [re.sub(r"^flush \..*", "flush the new state", text) for text in done] == [
        *("flush the new state", "link state-0")
    ]


def other_rate(model):
    return poptorch.optim.AdamW(model.parameters(), lr=0.03, weight_decay=0.1, loss_scaling=64.0)


def other_accumulation(training):
    opts, model = training.trainer.options.clone(), Net()
    opts.Training.gradientAccumulation(6)
    training.trainer = poptorch.trainingModel(model, opts, adamw(model))


def other_model(training):
    model = torch.nn.Linear(6, 9)
    training.trainer = poptorch.trainingModel(model, training.trainer.options.clone(), adamw(model))


def more_groups(training):
    optimizer = training.trainer._optimizer
    optimizer.param_groups = [
        {**group, "params": [parameter]} for group in optimizer.param_groups for parameter in group["params"]
    ]


def without_schedule(training):
    training.restore = lambda: training.checkpoint.restore(training.trainer, training.loader)


OTHER_RUN = r"call-4 is of another run: .*{}.*\n  fix: another directory"


@pytest.mark.parametrize(
    "how, change, named",
    [
        (
            {"opts": poptorch.Options().replicationFactor(4)},
            None,
            OTHER_RUN.format("replicas 2 there, 4 here"),
        ),
        ({"optimizer": other_rate}, None, OTHER_RUN.format("lr of group 0 0.02 there, 0.03 here")),
        ({"optimizer": torchs_sgd}, None, OTHER_RUN.format("optimizer AdamW there, SGD here")),
        ({}, other_accumulation, OTHER_RUN.format("gradient_accumulation 3 there, 6 here")),
        ({}, other_model, r"of another model: a.bias is .*; bias is missing there, \[9\] here"),
        ({}, more_groups, r"the optimizer has \d parameter groups, and the checkpoint's had 1"),
        ({}, without_schedule, r"and restore\(\) differ in schedule"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_and_what_differs_is_named(tmp_path, how, change, named):
    trained_to_four(tmp_path)
    training = Training(folder=tmp_path, **{"opts": options(), **how})
    if change is not None:
        change(training)
    with pytest.raises(poptorch.Error, match=named):
        training.restore()


def test_another_command_line_is_named_with_what_is_resumed(tmp_path, caplog, monkeypatch):
    """It is no error: a program that is given more epochs continues from its checkpoints."""
    monkeypatch.setattr("sys.argv", ["train.py", "--epochs=2"])
    trained_to_four(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert Training(options(), tmp_path).restore() == 4
        assert "another command" not in caplog.text
        monkeypatch.setattr("sys.argv", ["train.py", "--epochs=3"])
        assert Training(options(), tmp_path).restore() == 4
    assert f"from {tmp_path / 'call-4'}, which another command wrote: train.py --epochs=2" in caplog.text


@pytest.fixture
def full_disk():
    """A function that limits the size of each file, as a full disk does; None: no limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(
        resource.RLIMIT_FSIZE, (before[0] if size is None else size, before[1])
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_a_warning_the_training_goes_on_and_older_checkpoints_stay(
    tmp_path, caplog, full_disk
):
    trained_to_four(tmp_path)
    training = Training(options(), tmp_path)
    training.restore()
    full_disk(30_000)
    with caplog.at_level(logging.WARNING):
        training.train(6)
    full_disk(None)
    cause = f"[Errno 27] File too large: '{tmp_path}'"
    assert f"the checkpoint of call 6 could not be written: {cause}" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["call-2", "call-4"]
    training.train(8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["call-4", "call-8"]
    assert files.find_damage(tmp_path / "call-8") == []


@pytest.mark.parametrize("late", [0, 1])
def test_what_an_instance_could_not_write_goes_though_another_one_comes_late(tmp_path, late, full_disk):
    folder, failures = tmp_path / "c" / "call-27.run.unfinished", {}
    full_disk(100_000)

    def write(instance):
        state = {"a": torch.ones(200_000 if instance != late else 1)}
        failures[instance] = files.write_checkpoint(folder, instance, 2, state, {}, keep=2)

    early, late_one = (threading.Thread(target=write, args=(instance,)) for instance in (1 - late, late))
    early.start()
    until = time.monotonic() + 240
    while early.is_alive() and not list(folder.glob("*.failed")) and time.monotonic() < until:
        time.sleep(0.01)
    late_one.start()
    early.join(240), late_one.join(240)
    assert list((tmp_path / "c").iterdir()) == []
    cause = f"[Errno 27] File too large: '{tmp_path / 'c'}'"
    assert failures == {1 - late: cause, late: "" if late else f"instance 1: {cause}"}


def test_wrong_folders_and_numbers_and_a_save_before_restore_are_refused(tmp_path):
    (tmp_path / "weights.pt").touch()
    for below in ("", "folder/checkpoints"):
        words = r"weights.pt is a file\n  fix: the directory is a folder"
        with pytest.raises(NotADirectoryError, match=words):
            popdist.Checkpoint(tmp_path / "weights.pt" / below)
    for name, least in ("every", 0), ("keep", 1):
        with pytest.raises(ValueError, match=f"popdist.Checkpoint: {name} takes an int from {least}; found"):
            popdist.Checkpoint(tmp_path, **{name: least - 1})
    with pytest.raises(poptorch.Error, match=r"checkpoint.restore\(trainer, loader\) before the first call"):
        popdist.Checkpoint(tmp_path).save()
