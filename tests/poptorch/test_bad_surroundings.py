"""Inputs and surroundings that no model can run with: an error names them, and nothing is spoilt."""

import subprocess

import pytest
import torch
from executor_models import Trained, batch, options, trainer

import poptorch
import quick_python

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


def test_inputs_of_different_row_counts_are_listed():
    executor = poptorch.inferenceModel(lambda left, right: left + right)
    with pytest.raises(poptorch.Error, match=r"left: torch.float32 \(4, 3\), right: torch.float32 \(2, 3\)"):
        executor(torch.ones(4, 3), torch.ones(2, 3))
    assert not executor.isCompiled()


def test_a_first_call_that_fails_to_run_binds_the_model_to_nothing():
    # Labels of the wrong type failed in the first run, and from then on the right ones were a mismatch.
    model = torch.nn.Module()
    model.layer = torch.nn.Linear(3, 2)
    model.forward = lambda x, labels: torch.nn.functional.cross_entropy(model.layer(x), labels)
    executor = poptorch.trainingModel(model, options())
    before = model.layer.weight.detach().clone()
    with pytest.raises(poptorch.Error, match=r"expected (target dtype|scalar type)"):
        executor(X, torch.zeros(2, dtype=torch.int32))
    assert not executor.isCompiled() and torch.equal(model.layer.weight, before)
    executor(X, torch.zeros(2, dtype=torch.int64))
    assert not torch.equal(model.layer.weight, before)


def test_a_written_parameter_of_another_shape_is_named():
    executor, model = trainer()
    executor(X, TARGET)
    kept = model.layer.weight.detach().clone()
    model.layer.weight.data = torch.zeros(5, 3)
    with pytest.raises(poptorch.Error, match=r"parameter layer.weight has the shape \[5, 3\] now.*\[2, 3\]"):
        executor.copyWeightsToDevice()
    model.layer.weight.data = kept
    executor.copyWeightsToDevice()
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
    with pytest.raises(poptorch.Error, match="ipu_id of a block takes an int from 0; found -3"):
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
