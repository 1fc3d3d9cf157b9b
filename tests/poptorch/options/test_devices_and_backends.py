"""Options.device and Options.compiler, and the environment variables that stand behind them."""

import os
import shutil
import subprocess

import pytest
import torch

import poptorch
import quick_python
from poptorch.options.freeze_options import engine_settings, resolve_options


def settings(options, training=False):
    return engine_settings(resolve_options(options, training=training), training=training, optimizer=None)


@pytest.fixture
def accelerator(request, monkeypatch):
    """What torch finds."""
    found = None if request.param is None else torch.device(request.param)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)
    return request.param


NAMES = {  # the option, its variable, its default and another value
    "backend": (poptorch.Options.compiler, "POPTORCH_BACKEND", "eager", "inductor"),
    "device": (poptorch.Options.device, "POPTORCH_DEVICE", "cpu", "cuda"),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("accelerator", ["cuda"], indirect=True)
def test_the_environment_chooses_and_the_option_wins_over_it(name, accelerator, monkeypatch):
    option, variable, default, other = NAMES[name]
    monkeypatch.delenv(variable, raising=False)
    assert getattr(settings(poptorch.Options()), name) == default
    monkeypatch.setenv(variable, other)
    assert getattr(settings(poptorch.Options()), name) == other
    assert getattr(settings(option(poptorch.Options(), default)), name) == default


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_value_is_refused_with_those_that_there_are(name, monkeypatch):
    option, variable, default, other = NAMES[name]
    with pytest.raises(AssertionError, match=f"takes one of '{default}', '{other}'.*; found 'gcc'"):
        option(poptorch.Options(), "gcc")
    monkeypatch.setenv(variable, "gcc")
    with pytest.raises(poptorch.Error, match=f"found 'gcc'\n  fix: {variable}={default} or {other}"):
        settings(poptorch.Options())


@pytest.mark.parametrize("accelerator", ["cuda"], indirect=True)
def test_processes_that_train_together_are_refused_on_a_gpu(accelerator):
    options = poptorch.Options().device("cuda")
    options.Distributed.configureProcessId(0, 2)
    assert settings(options).device == "cuda"
    with pytest.raises(poptorch.Error, match=r'"cuda", and 2 processes train together'):
        settings(options, training=True)


@pytest.mark.parametrize("accelerator", [None], indirect=True)
def test_a_gpu_that_is_not_there_is_an_error_before_anything_is_compiled(accelerator):
    model = poptorch.inferenceModel(lambda x: pytest.fail("captured"), poptorch.Options().device("cuda"))
    with pytest.raises(
        poptorch.Error, match=r'the device is "cuda", but torch (.|\n)*options.device\("cpu"\)'
    ):
        model(torch.zeros(2))


@pytest.mark.parametrize("accelerator", [None], indirect=True)
def test_what_is_only_compiled_needs_no_gpu(accelerator):
    options = poptorch.Options().device("cuda").useOfflineIpuTarget()
    executor = poptorch.inferenceModel(lambda x: x + 1, options)
    executor.compile(torch.zeros(2))
    assert executor.isCompiled() and not executor.isAttachedToDevice()


def test_what_was_compiled_for_a_gpu_runs_where_there_is_none(tmp_path):
    file = tmp_path / "model.poptorch"
    model = torch.nn.Linear(2, 2)
    options = poptorch.Options().device("cuda").useOfflineIpuTarget()
    poptorch.inferenceModel(model, options).compileAndExport(file, torch.zeros(1, 2), export_model=False)
    executor = poptorch.inferenceModel(model)
    executor.loadExecutable(file)
    assert torch.equal(executor(torch.ones(1, 2)), model(torch.ones(1, 2)))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_the_first_piece_that_a_process_compiles_may_hold_any_operation():
    # Inductor's functions use modules that it imports later, such as that of max_pool2d's. Its cache on disk
    # does not know ATEN_CPU_CAPABILITY: kernels for wider vectors computed half of the elements.
    program = """if True:
        import warnings, torch, poptorch
        warnings.simplefilter("error", RuntimeWarning)
        layers = torch.nn.Conv2d(1, 2, 3), torch.nn.GELU(), torch.nn.Conv2d(2, 1, 3), torch.nn.MaxPool2d(2)
        model = torch.nn.Sequential(*layers).eval()
        executor = poptorch.inferenceModel(model, poptorch.Options().compiler("inductor"))
        batch = torch.randn(1, 1, 18, 18)
        torch.testing.assert_close(executor(batch), model(batch))
    """
    for environment in (os.environ, os.environ | {"ATEN_CPU_CAPABILITY": "avx2"}):
        subprocess.run([*quick_python.words(), "-c", program], check=True, env=environment)
