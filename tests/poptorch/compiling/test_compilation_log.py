"""What the log says of a compilation, and the rules of real hardware that can be asked for."""

import copy
import logging
import pickle
import re

import pytest
import torch

import poptorch
from poptorch.compiling.compilation_log import HARDWARE_RULES
from poptorch.logs import log_ignored_variables


def chain(*ipus):
    """Adds 1 on each of the ipus in turn."""

    def forward(x):
        for number, ipu in enumerate(ipus):
            with poptorch.Block(f"b{number}", ipu_id=ipu):
                x = x + 1
        return x

    return forward


def compiled(*ipus, replicas=1):
    options = poptorch.Options().deviceIterations(len(ipus))
    model = poptorch.inferenceModel(chain(*ipus), options.replicationFactor(replicas))
    model.compile(torch.zeros(len(ipus) * replicas, 1))
    return model


def test_the_log_has_the_passes_their_times_and_the_schedule(caplog, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    caplog.set_level(logging.DEBUG, logger="poptorch::python")
    compiled(0, 1)
    passes = re.findall(r"pass (\w+) took [\d.]+ ms", caplog.text)
    assert passes == ["capture", "partition", "tasks", "load"]
    assert "schedule of a step on 2 cores of this machine, 1f1b:\ncore 0 | F0.0 F1.0\n" in caplog.text
    assert "\ncore 1 | F0.1 F1.1" in caplog.text


def test_the_log_says_which_block_is_where(caplog):
    caplog.set_level(logging.INFO, logger="poptorch::python")
    compiled(0, 1)
    assert "stage 0 (b0) is on ipu 0" in caplog.text
    assert "stage 1 (b1) is on ipu 1" in caplog.text
    assert "2 logical ipus × 1 replica, run by " in caplog.text


def test_an_error_of_the_compiler_says_which_pass_it_is_from():
    model = poptorch.inferenceModel(chain(0, 1), poptorch.Options())
    with pytest.raises(poptorch.Error) as found:
        model.compile(torch.zeros(1, 1))
    assert found.value.type == "poptorch_cpp_error"
    assert found.value.location == "Error raised in:\n  [0] partition\n  [1] PoplarExecutor.compile"
    assert "Error raised in" not in found.value.message
    text = f"'poptorch_cpp_error': {found.value.message}\n{found.value.location}"
    assert str(found.value) == found.value.message  # what Python prints is for people
    assert found.value.args == (text,)


@pytest.mark.parametrize("copied", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_a_copy_of_an_error_says_the_same(copied):
    error = poptorch.RecoverableError("lost", "LINK_RESET", "here")
    model = poptorch.inferenceModel(chain(0, 1), poptorch.Options())
    with pytest.raises(poptorch.Error) as found:
        model.compile(torch.zeros(1, 1))
    for one in (error, found.value):
        twin = copied(one)
        assert type(twin) is type(one) and str(twin) == str(one)
        assert twin.args == one.args and vars(twin) == vars(one)


def test_an_error_of_the_host_has_no_location():
    with pytest.raises(poptorch.Error) as found:
        poptorch.inferenceModel(chain(0)).detachFromDevice()
    assert (found.value.type, found.value.location) == ("poptorch_py_error", "")
    assert found.value.args == (f"'poptorch_py_error': {found.value.message}",)


def test_any_number_of_ipus_can_be_had():
    assert compiled(0, 1, 70).isCompiled()


def test_the_limit_of_a_real_system_is_checked_on_request(monkeypatch):
    monkeypatch.setenv(HARDWARE_RULES, "1")
    with pytest.raises(poptorch.Error, match=r"Too many IPUs requested \(128\)"):
        compiled(0, 1, replicas=64)


def test_variables_without_an_effect_are_named_in_the_log(caplog):
    caplog.set_level(logging.INFO, logger="poptorch::python")
    log_ignored_variables({"POPTORCH_WAIT_FOR_IPU": "1", "PATH": "/bin"})
    assert "POPTORCH_WAIT_FOR_IPU=1 has no effect: there is always an ipu" in caplog.text
    assert "PATH" not in caplog.text
