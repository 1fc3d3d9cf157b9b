"""Options.compiler, and the environment variable that stands behind it."""

import shutil
import subprocess

import pytest

import poptorch
import quick_python
from poptorch.options.freeze_options import engine_settings, resolve_options


def backend_of(options):
    return engine_settings(resolve_options(options, training=False), training=False, optimizer=None).backend


def test_pieces_run_eagerly_by_default(monkeypatch):
    monkeypatch.delenv("POPTORCH_BACKEND", raising=False)
    assert backend_of(poptorch.Options()) == "eager"


def test_the_environment_chooses_a_backend_and_the_option_wins_over_it(monkeypatch):
    monkeypatch.setenv("POPTORCH_BACKEND", "inductor")
    assert backend_of(poptorch.Options()) == "inductor"
    assert backend_of(poptorch.Options().compiler("eager")) == "eager"


def test_an_unknown_backend_is_refused_with_those_that_there_are(monkeypatch):
    with pytest.raises(AssertionError, match="compiler takes one of 'eager', 'inductor'; found 'gcc'"):
        poptorch.Options().compiler("gcc")
    monkeypatch.setenv("POPTORCH_BACKEND", "gcc")
    with pytest.raises(
        poptorch.Error, match="POPTORCH_BACKEND takes one of 'eager', 'inductor'; found 'gcc'"
    ):
        backend_of(poptorch.Options())


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_the_first_piece_that_a_process_compiles_may_hold_any_operation():
    # Inductor's functions use modules of inductor that it imports later, such as that of max_pool2d's.
    program = """if True:
        import warnings, torch, poptorch
        warnings.simplefilter("error", RuntimeWarning)
        model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.MaxPool2d(2)).eval()
        executor = poptorch.inferenceModel(model, poptorch.Options().compiler("inductor"))
        batch = torch.randn(1, 1, 6, 6)
        torch.testing.assert_close(executor(batch), model(batch))
    """
    subprocess.run([*quick_python.words(), "-c", program], check=True)
