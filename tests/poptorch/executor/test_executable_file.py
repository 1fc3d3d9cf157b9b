"""Files: what a saved executor brings back, and what enableExecutableCaching leaves in its folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from executor_models import Dropping, Trained, batch, options, trainer

import poptorch

FORWARDS = []


class Watched(Trained):
    def forward(self, x, target=None):
        FORWARDS.append(1)
        return super().forward(x, target)


class Times(torch.nn.Module):
    def __init__(self, factors):
        super().__init__()
        self.factors = factors

    def forward(self, x):
        return x * self.factors


class Scaled(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.scale = scale

    def forward(self, x):
        return self.layer(x) * self.scale


@pytest.fixture(autouse=True)
def no_forwards():
    FORWARDS.clear()


# ---- save and load ---------------------------------------------------------------------------------------


def test_training_goes_on_from_a_file_as_if_it_had_not_stopped(tmp_path):
    torch.manual_seed(0)
    model = Dropping()
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.1)
    executor = poptorch.trainingModel(model, options().randomSeed(5), optimizer)
    executor(torch.ones(2, 4))
    executor.save(tmp_path / "some" / "folder" / "half.poptorch")
    expected = [float(executor(torch.ones(2, 4))) for _ in range(3)]
    again = poptorch.load(tmp_path / "some" / "folder" / "half.poptorch")
    assert again.isCompiled()
    assert [float(again(torch.ones(2, 4))) for _ in range(3)] == expected
    assert type(again._optimizer) is poptorch.optim.AdamW


def test_a_loaded_model_is_recorded_at_its_first_call_and_not_compiled(tmp_path, caplog):
    executor = poptorch.inferenceModel(Watched(), options())
    x, _ = batch()
    executor.compileAndExport(tmp_path / "model", x)
    assert len(FORWARDS) == 1
    again = poptorch.load(tmp_path / "model")
    assert len(FORWARDS) == 1
    with caplog.at_level("INFO", "poptorch::python"):
        for _ in range(2):
            assert torch.equal(again(x), executor(x))
    assert len(FORWARDS) == 2
    assert "recorded again, with an equal graph: a plan of a file" in caplog.messages
    with pytest.raises(poptorch.Error, match="Shape mismatch for x"):
        again(x[:1])


def test_weights_of_a_file_are_those_at_its_saving(tmp_path):
    executor, model = trainer()
    executor(*batch())
    kept = model.layer.weight.detach().clone()
    executor(*batch())
    kept_later = model.layer.weight.detach().clone()
    executor.save(tmp_path / "model")
    assert not torch.equal(kept, kept_later)
    assert torch.equal(poptorch.load(tmp_path / "model").model.layer.weight, kept_later)


def test_a_folder_gets_a_file_of_the_default_name(tmp_path, caplog):
    executor = poptorch.inferenceModel(Trained(), options())
    executor.compile(batch()[0])
    executor.save(tmp_path)
    assert (tmp_path / "model.poptorch").exists()
    assert "is a folder" in caplog.text
    poptorch.load(tmp_path / "model.poptorch")


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    executor = poptorch.inferenceModel(Trained(), options())
    executor.compile(batch()[0])
    with pytest.raises(AssertionError, match="is a file"):
        executor.save(tmp_path / "file" / "model")


def test_options_may_be_edited_before_they_are_used(tmp_path):
    executor = poptorch.inferenceModel(Trained(), options())
    executor.compileAndExport(tmp_path / "model", batch()[0])
    again = poptorch.load(tmp_path / "model", lambda o: o.connectionType(poptorch.ConnectionType.OnDemand))
    assert not again.isAttachedToDevice()
    again(batch()[0])


def test_an_offline_export_loads_online(tmp_path):
    executor = poptorch.inferenceModel(Trained(), options().useOfflineIpuTarget())
    executor.compileAndExport(tmp_path / "model", batch()[0])
    again = poptorch.load(tmp_path / "model")
    assert again.options.connection_type == poptorch.ConnectionType.Always
    again(batch()[0])


def test_a_file_without_the_model_needs_a_wrapper(tmp_path):
    x, _ = batch()
    model = Watched()
    executor = poptorch.inferenceModel(model, options())
    executor.compileAndExport(str(tmp_path / "model"), x, export_model=False)
    with pytest.raises(AssertionError, match="loadExecutable"):
        poptorch.load(tmp_path / "model")
    other = poptorch.inferenceModel(model, options())
    other.loadExecutable(tmp_path / "model")
    assert torch.equal(other(x), executor(x))
    assert len(other._plans.loaded) == 1


def test_invalid_files_are_named(tmp_path):
    (tmp_path / "text").write_text("hello")
    for name in ("text", "absent"):
        with pytest.raises(AssertionError, match=f"Invalid file .*{name}"):
            poptorch.load(tmp_path / name)
        with pytest.raises(poptorch.Error, match=f"Invalid file .*{name}"):
            poptorch.inferenceModel(Trained(), options()).loadExecutable(tmp_path / name)
    torch.save(Trained().state_dict(), tmp_path / "weights.pt")
    with pytest.raises(AssertionError, match=r"fix: .*model\.load_state_dict\(torch\.load\(path\)\)"):
        poptorch.load(tmp_path / "weights.pt")


def test_a_missing_file_is_one_error_which_names_the_files_that_exist(tmp_path):
    (tmp_path / "other.poptorch").write_text("hello")
    with pytest.raises(poptorch.Error, match=r"does not exist; .*: other.poptorch\n  fix: ") as caught:
        poptorch.inferenceModel(Trained(), options()).loadExecutable(tmp_path / "model.poptorch")
    assert caught.value.__suppress_context__ and caught.value.__cause__ is None


def test_another_version_does_not_read_a_file(tmp_path, monkeypatch):
    executor = poptorch.inferenceModel(Trained(), options())
    executor.compileAndExport(tmp_path / "model", batch()[0])
    monkeypatch.setattr("poptorch.executor.executable_file._VERSIONS", "pando 9.9")
    with pytest.raises(AssertionError, match=r"Invalid file .*written by pando .*this is pando 9\.9"):
        poptorch.load(tmp_path / "model")


def test_a_file_of_another_model_or_wrapper_does_not_fit(tmp_path):
    executor = poptorch.inferenceModel(Trained(), options())
    executor.compileAndExport(tmp_path / "model", batch()[0])
    with pytest.raises(poptorch.Error, match=r"of another model, which has layer.weight \[2, 3\]"):
        poptorch.inferenceModel(Dropping(), options()).loadExecutable(tmp_path / "model")
    with pytest.raises(poptorch.Error, match=r"saved from a poptorch.inferenceModel"):
        trainer()[0].loadExecutable(tmp_path / "model")


def test_a_model_that_cannot_be_pickled_says_how_to_save_without_it(tmp_path):
    model = Trained()
    model.hidden = lambda x: x
    executor = poptorch.inferenceModel(model, options())
    executor.compile(batch()[0])
    with pytest.raises(poptorch.Error, match="export_model=False"):
        executor.save(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


# ---- the folder of enableExecutableCaching -----------------------------------------------------------------


def cached(folder, **kwargs):
    return options(**kwargs).enableExecutableCaching(folder)


def test_a_second_wrapper_leaves_no_second_file_and_captures_its_own_model(tmp_path):
    for scale in (1.0, 2.0):  # both see the weights of their own model
        executor, model = trainer(Watched(), cached(tmp_path))
        with torch.no_grad():
            model.layer.weight.mul_(scale)
        expected = model.layer(batch()[0]).detach()
        torch.testing.assert_close(executor(*batch())[0], expected)
    assert len(FORWARDS) == 2
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda f: (Scaled(2.0), cached(f, iterations=2), torch.ones(2, 3)),
        lambda f: (Scaled(2.0), cached(f), torch.ones(4, 3)),
        lambda f: (Scaled(3.0), cached(f), torch.ones(2, 3)),
        lambda f: (Scaled(torch.tensor([1.0, 2.0])), cached(f), torch.ones(2, 3)),
    ],
)
def test_another_model_other_options_or_inputs_are_another_file(tmp_path, other):
    for model, opts, x in ((Scaled(2.0), cached(tmp_path), torch.ones(2, 3)), other(tmp_path)):
        found = poptorch.inferenceModel(model, opts)(x)
        torch.testing.assert_close(found, model(x).detach())
    assert len(list(tmp_path.iterdir())) == 2


def test_constants_that_differ_in_one_element_are_different_files(tmp_path):
    for last in (1.0, 2.0, 1.0):
        scale = torch.ones(2000)
        scale[1000] = last
        model = torch.nn.Sequential(torch.nn.Linear(3, 2000), Times(scale))
        poptorch.inferenceModel(model, cached(tmp_path))(torch.ones(1, 3))
    assert len(list(tmp_path.iterdir())) == 2


def test_a_file_of_the_folder_loads_into_a_wrapper_of_the_same_model(tmp_path):
    x, _ = batch()
    model = Watched()
    expected = poptorch.inferenceModel(model, cached(tmp_path))(x)
    (file,) = tmp_path.iterdir()
    other = poptorch.inferenceModel(model, options())
    other.loadExecutable(file)
    assert torch.equal(other(x), expected)
    assert len(other._plans.loaded) == 1


def test_a_compilation_reads_no_file_of_the_folder(tmp_path):
    # A file is a pickle, which runs code when it is read; another user may be able to write to the folder.
    x = torch.ones(2, 3)
    poptorch.inferenceModel(Scaled(2.0), cached(tmp_path))(x)
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"changed by somebody else")
    found = poptorch.inferenceModel(model := Scaled(2.0), cached(tmp_path))(x)
    torch.testing.assert_close(found, model(x).detach())
    assert file.read_bytes() == b"changed by somebody else"


@pytest.mark.slow
def test_a_second_process_leaves_no_second_file(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, torch, poptorch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout(), torch.nn.BatchNorm1d(2))\n"
        "model.register_module('loss', torch.nn.MSELoss())\n"
        "class Trained(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.model, self.loss = model[:3], model.loss\n"
        "    def forward(self, x, target):\n"
        "        print('forward')\n"
        "        found = self.model(x)\n"
        "        return found, self.loss(found, target)\n"
        "options = poptorch.Options().enableExecutableCaching(sys.argv[1])\n"
        "module = Trained()\n"
        "optimizer = poptorch.optim.AdamW(module.parameters(), lr=0.1)\n"
        "poptorch.trainingModel(module, options, optimizer)(torch.ones(2, 3), torch.ones(2, 2))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(poptorch.__file__).parents[1])}
    outputs = [
        subprocess.run(
            [sys.executable, program, tmp_path / "cache"],
            capture_output=True, text=True, check=True, env={**environment, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert outputs == ["forward\n", "forward\n"]
    assert len(list((tmp_path / "cache").iterdir())) == 1


# ---- damage ----------------------------------------------------------------------------------------------


def flip(file, position):
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, 0.999])
def test_a_flipped_bit_in_a_file_is_an_error(tmp_path, part):
    # It ran with other numbers, or ended in a SyntaxError, wherever the bit happened to be.
    executor = poptorch.inferenceModel(Scaled(2.0), options())
    executor.compileAndExport(tmp_path / "saved", torch.ones(2, 3))
    flip(tmp_path / "saved", int(part * (tmp_path / "saved").stat().st_size))
    with pytest.raises(AssertionError, match=r"Invalid file .*saved"):
        poptorch.load(tmp_path / "saved")


@pytest.mark.parametrize("unusable", ["file", "below a file", "not writable"])
def test_a_folder_that_cannot_be_written_to_is_a_warning_of_each_compilation(
    tmp_path, caplog, unusable, monkeypatch
):
    folder = tmp_path / unusable
    if unusable == "not writable":  # the tests may be run by root, who may write anywhere
        monkeypatch.setattr(Path, "write_bytes", lambda *_: (_ for _ in ()).throw(OSError(28, "disk full")))
    else:
        folder.write_text("")
        folder = folder / "cache" if unusable == "below a file" else folder
    executor, _ = trainer(opts=cached(folder))
    executor(*batch())
    executor(*batch())
    assert caplog.text.count(f"the compiled model is not written to {folder}") == 1
