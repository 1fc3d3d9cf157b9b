"""Files of saved executors."""

import pytest
import torch
from executor_models import Dropping, Trained, batch, options, trainer

import poptorch

FORWARDS = []


class Watched(Trained):
    def forward(self, x, target=None):
        FORWARDS.append(1)
        return super().forward(x, target)


# ---- save and load ---------------------------------------------------------------------------------------


def test_training_goes_on_from_a_file_as_if_it_had_not_stopped(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), Dropping())
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.1)
    opts = options(replicas=2).broadcastBuffers(False).randomSeed(5)
    executor, rows = poptorch.trainingModel(model, opts, optimizer), torch.randn(4, 8, 3)
    executor(rows[0])
    executor.save(tmp_path / "some" / "folder" / "half.poptorch")
    state = executor.rng_state
    expected = [executor(x) for x in rows[1:]]
    again = poptorch.load(tmp_path / "some" / "folder" / "half.poptorch")
    assert again.rng_state == state
    again.save(tmp_path / "once more")  # before its first call
    for loaded in (again, poptorch.load(tmp_path / "once more")):
        assert all(map(torch.equal, (loaded(x) for x in rows[1:]), expected))
        assert all(map(torch.equal, loaded.state_dict().values(), executor.state_dict().values()))
        loaded.averageRunningStatistics()
    executor.averageRunningStatistics()
    assert torch.equal(again.model[1].running_var, model[1].running_var)


def test_a_loaded_model_compiles_at_its_first_call_for_the_arguments_of_this_call(tmp_path):
    # A file of a trainer with a label, or for other rows, did not compute without it.
    x, target = batch()
    for executor in (trainer(Watched())[0], poptorch.inferenceModel(Watched(), options())):
        executor.compileAndExport(tmp_path / "model", x, target)
        FORWARDS.clear()
        again = poptorch.load(tmp_path / "model")
        assert FORWARDS == []
        assert not again.isCompiled() and not again.isAttachedToDevice()
        evaluator = poptorch.inferenceModel(again)
        assert torch.equal(evaluator(x), executor.model(x))
    for rows in (x, x[:1]):
        again = poptorch.load(tmp_path / "model")
        again.attachToDevice()
        again.copyWeightsToDevice()
        again.copyWeightsToHost()
        again.detachFromDevice()
        assert torch.equal(again(rows), executor.model(rows))
        assert again.isCompiled() and again.isAttachedToDevice()


def test_a_loaded_model_computes_in_the_modes_that_were_compiled(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout()).eval()
    executor = poptorch.inferenceModel(model, options())
    expected = executor(torch.ones(2, 3))
    model.train()
    executor.save(tmp_path / "model")
    assert torch.equal(poptorch.load(tmp_path / "model")(torch.ones(2, 3)), expected)
    model = Dropping().eval()
    executor, _ = trainer(model)
    executor.compile(torch.ones(2, 4))
    model.train()  # the layer that was wrapped keeps its mode, which no longer is the model's
    executor.save(tmp_path / "model")
    expected = [executor(torch.ones(2, 4)) for _ in range(2)]
    again = poptorch.load(tmp_path / "model")
    assert [again(torch.ones(2, 4)) for _ in range(2)] == expected


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


def test_a_file_of_another_version_says_what_to_do(tmp_path):
    executor = poptorch.inferenceModel(Trained(), options())
    executor.compileAndExport(tmp_path / "model", batch()[0])
    hash_and_content = (tmp_path / "model").read_bytes().partition(b"\n")[2]
    (tmp_path / "model").write_bytes(b"pando 0.1.0 executor\n" + hash_and_content)
    with pytest.raises(
        AssertionError, match=r"Invalid file .*model: pando 0.1.0 wrote it.*\n  fix: save the"
    ):
        poptorch.load(tmp_path / "model")


def test_a_file_of_another_model_or_wrapper_does_not_fit(tmp_path):
    executor = poptorch.inferenceModel(Trained(), options())
    executor.compileAndExport(tmp_path / "model", batch()[0])
    for other, shape in ((Dropping(), r"\[4, 4\]"), (torch.nn.Linear(3, 2), "missing")):
        with pytest.raises(poptorch.Error, match=rf"layer.weight is \[2, 3\] there, {shape} here"):
            poptorch.inferenceModel(other, options()).loadExecutable(tmp_path / "model")
    with pytest.raises(poptorch.Error, match=r"saved from a poptorch.inferenceModel"):
        trainer()[0].loadExecutable(tmp_path / "model")
    trainer()[0].compileAndExport(tmp_path / "trained", *batch())
    model = Trained()
    adam = poptorch.trainingModel(model, options(), torch.optim.Adam(model.parameters()))
    with pytest.raises(poptorch.Error, match="optimizer SGD, and this model trains with Adam\n  fix: set"):
        adam.loadExecutable(tmp_path / "trained")


def test_a_model_that_cannot_be_pickled_says_how_to_save_without_it(tmp_path):
    model = Trained()
    model.hidden = lambda x: x
    executor = poptorch.inferenceModel(model, options())
    executor.compile(batch()[0])
    with pytest.raises(poptorch.Error, match="export_model=False"):
        executor.save(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


# ---- damage ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_a_flipped_bit_in_a_file_is_an_error(tmp_path, part):
    # It ran with other numbers, or ended in a SyntaxError, wherever the bit happened to be.
    executor = poptorch.inferenceModel(Trained(), options())
    executor.compileAndExport(tmp_path / "saved", torch.ones(2, 3))
    content = bytearray((tmp_path / "saved").read_bytes())
    content[int(part * len(content))] ^= 1
    (tmp_path / "saved").write_bytes(content)
    with pytest.raises(AssertionError, match=r"Invalid file .*saved"):
        poptorch.load(tmp_path / "saved")
