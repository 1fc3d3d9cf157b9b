"""Options.device, and the environment variable that stands behind it."""

import pytest
import torch

import poptorch
from poptorch.options.freeze_options import engine_settings, resolve_options


def chosen_device(options, training=False):
    return engine_settings(
        resolve_options(options, training=training), training=training, optimizer=None
    ).device


def test_ipus_are_threads_of_the_cpu_by_default(monkeypatch):
    monkeypatch.delenv("POPTORCH_DEVICE", raising=False)
    assert chosen_device(poptorch.Options()) == "cpu"


@pytest.fixture
def accelerator(request, monkeypatch):
    """What torch finds."""
    found = None if request.param is None else torch.device(request.param)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)
    return request.param


@pytest.mark.parametrize("accelerator", ["cuda"], indirect=True)
def test_the_environment_chooses_a_device_and_the_option_wins_over_it(accelerator, monkeypatch):
    monkeypatch.setenv("POPTORCH_DEVICE", "cuda")
    assert chosen_device(poptorch.Options()) == "cuda"
    assert chosen_device(poptorch.Options().device("cpu")) == "cpu"


def test_an_unknown_device_is_refused_with_those_that_there_are(monkeypatch):
    with pytest.raises(AssertionError, match="device takes one of 'cpu', 'cuda', 'xpu'; found 'ipu'"):
        poptorch.Options().device("ipu")
    monkeypatch.setenv("POPTORCH_DEVICE", "tpu")
    with pytest.raises(
        poptorch.Error, match="POPTORCH_DEVICE takes one of 'cpu', 'cuda', 'xpu'; found 'tpu'"
    ):
        chosen_device(poptorch.Options())


@pytest.mark.parametrize("accelerator", ["cuda"], indirect=True)
def test_processes_that_train_together_are_refused_on_a_gpu(accelerator):
    options = poptorch.Options().device("cuda")
    options.Distributed.configureProcessId(0, 2)
    assert chosen_device(options) == "cuda"
    with pytest.raises(poptorch.Error, match=r'"cuda", and 2 processes train together'):
        chosen_device(options, training=True)


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
