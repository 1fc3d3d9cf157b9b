"""What public programs do beside the ordinary, each corner in a few lines."""

import subprocess

import pytest
import torch
from executor_models import Trained, batch, options, trainer
from torch import nn

import poptorch
import quick_python
from poptorch import _impl, optim
from poptorch._poplar_executor import PoplarExecutor
from small_models import module


def test_insides_that_programs_touch():
    executor, model = trainer()
    assert not executor._executable and isinstance(executor, PoplarExecutor)
    executor(*batch())
    assert executor._executable and executor._user_model is model
    assert executor._options.output_mode == executor.options.output_mode == poptorch.OutputMode.Final
    assert poptorch.DataLoader(options(iterations=2), [1, 2, 3, 4])._combined_batch_size == 2
    _impl.unwrapModelIfNecessary(model)
    assert type(model) is Trained and not hasattr(model, "destroy")
    _impl.rewrapModelIfNecessary(model)
    assert type(model) is Trained and model.destroy
    executor(*batch())
    with pytest.raises(poptorch.Error, match="no PopART graph"):
        executor._debugGetPopartIR()


def test_a_model_may_have_no_inputs():
    model = module(
        lambda self: poptorch.identity_loss(self.weight**2, "sum"), weight=nn.Parameter(torch.ones(3))
    )
    executor = poptorch.trainingModel(model, options(iterations=2), optim.SGD(model.parameters(), lr=0.25))
    assert executor().item() == pytest.approx(3 * 0.25)
    assert model.weight.tolist() == [0.25] * 3


def test_programs_find_the_hardware_that_they_ask_for():
    assert poptorch.ipuHardwareIsAvailable() and poptorch.ipuHardwareIsAvailable(16)
    assert poptorch.ipuHardwareVersion() == 2


# Inputs and surroundings that no model can run with: an error names them, and nothing is spoilt.


X, TARGET = batch()


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.empty(2, 3, device="meta"), "input x is on the meta device"),
        (torch.ones(2, 3).to_sparse(), "input x is sparse"),
        (torch.nested.nested_tensor([torch.ones(3), torch.ones(3)]), "input x is a nested tensor"),
    ],
    ids=["meta", "sparse", "nested"],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_an_input_that_is_no_dense_tensor_is_named(x, words, compiled):
    executor, _ = trainer()
    if compiled:
        executor(X, TARGET)
    with pytest.raises(poptorch.Error, match=words):
        executor(x, TARGET)
    assert executor.isCompiled() == compiled
    executor(X, TARGET)


@pytest.mark.parametrize(
    "mark",
    [
        lambda: poptorch.Block("a", ipu_id=-3),
        lambda: poptorch.Block.start("a", ipu_id=-3),
        lambda: poptorch.BeginBlock(torch.nn.Linear(1, 1), "a", ipu_id=-3),
    ],
)
def test_a_block_names_an_ipu_from_0(mark):
    with pytest.raises(poptorch.Error, match="a block takes an int from 0; found -3\n  fix: ipu_id=0"):
        mark()


FORKS = """
import os, torch, poptorch
from executor_models import batch, trainer
executor, model = trainer()
executor(*batch())
child = os.fork()
if child == 0:
    try:
        executor(*batch())
    except poptorch.Error as error:
        os._exit(7 if "is a fork of it" in str(error) else 1)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
executor(*batch())
print("the parent goes on")
"""


def test_a_fork_of_the_process_gets_an_error():
    # It waited for ever, for threads that a fork has not got.
    folder = __file__.rpartition("/")[0]
    command = [*quick_python.words(), "-c", f"import sys; sys.path.insert(0, {folder!r}); exec({FORKS!r})"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout == "the parent goes on\n", done.stderr


def test_a_model_that_is_attached_nowhere_may_be_used_by_a_fork():
    executor = poptorch.inferenceModel(Trained(), options())
    executor(X)
    executor.detachFromDevice()
    executor._plans._process = -1  # as a fork would see it
    assert executor(X).shape == (2, 2)
