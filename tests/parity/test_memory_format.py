"""`Options.memoryFormat`: what is asked for, what is chosen, and that it is kept."""

import parity_models
import parity_runs
import pytest
import torch

import poptorch
from poptorch.compiling import memory_format


def executor(memory_format, strategy=None, **more):
    options = parity_runs.options(strategy, **more)
    options.memoryFormat(memory_format)
    model = parity_runs.made(parity_models.Digits)
    if strategy is not None:
        parity_models.annotated(model)
    return poptorch.trainingModel(model, options, poptorch.optim.SGD(model.parameters(), lr=0.1))


def losses(trainer, calls=2):
    torch.manual_seed(1)
    rows = [parity_models.Digits.data(parity_runs.ACCUMULATION * parity_runs.ROWS) for _ in range(calls)]
    return torch.cat([trainer(*call)[1] for call in rows])


def choosing(monkeypatch, before, after):
    """Auto measures these seconds, the model's own layout first."""
    found = [[before], [after]]
    monkeypatch.setattr(memory_format, "measure", lambda *args: found.pop(0))


def test_auto_keeps_the_faster_layout_and_says_so(monkeypatch, caplog):
    caplog.set_level("INFO", "poptorch::python")
    choosing(monkeypatch, 0.003, 0.001)
    trainer = executor("auto")
    losses(trainer)
    assert trainer.memory_format == "channels_last"
    assert (
        "takes 3.000 ms as the model has it and 1.000 ms in channels_last: channels_last is used"
        in caplog.text
    )
    choosing(monkeypatch, 0.00100, 0.00099)
    slower = executor("auto")
    losses(slower)
    assert slower.memory_format == "preserve"


def test_auto_measures_both_on_this_machine():
    trainer = executor("auto")
    losses(trainer)
    assert trainer.memory_format in ("preserve", "channels_last")


def test_the_default_keeps_the_bits_of_plain_pytorch():
    trainer = executor("preserve")
    assert not poptorch.Options().exists("memory_format")
    assert trainer.options.memory_format == "preserve"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = parity_runs.plain(parity_models.Digits, lambda p: torch.optim.SGD(p, lr=0.1), updates=2)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(losses(trainer), expected.losses)


@pytest.mark.parametrize("layout", ["two stages", "sharded"])
def test_layouts_of_stages_agree_to_the_last_bit_in_channels_last(layout):
    strategy = parity_runs.LAYOUTS[layout]()
    assert torch.equal(losses(executor("channels_last", strategy)), losses(executor("channels_last")))


def test_what_auto_chose_is_saved(monkeypatch, tmp_path):
    choosing(monkeypatch, 0.003, 0.001)
    trainer = executor("auto")
    expected = losses(trainer)
    trainer.save(str(tmp_path / "model.poptorch"), export_model=False)
    loaded = executor("auto")
    loaded.loadExecutable(str(tmp_path / "model.poptorch"))
    assert (
        loaded.memory_format == "channels_last"
    )  # and nothing was measured: there are no more times to be told
    assert loaded._executable.plan.partition.pieces == trainer._executable.plan.partition.pieces
    assert expected.isfinite().all()


def test_before_compilation_there_is_no_layout_and_only_three_can_be_asked_for():
    with pytest.raises(poptorch.Error):
        _ = executor("auto").memory_format
    with pytest.raises(AssertionError, match="memoryFormat takes one of preserve, channels_last, auto"):
        poptorch.Options().memoryFormat("NHWC")  # type: ignore[arg-type]
