"""What a user sees of a mistake: the lines of their own program, the last of them at fault."""

import subprocess
import sys
import traceback

import pytest
import torch

import poptorch


class Branches(torch.nn.Module):
    def forward(self, x):
        if x.sum() > 0:  # this can't be captured
            return x
        return -x


def lines_of(call):
    with pytest.raises((poptorch.Error, AssertionError)) as caught:
        call()
    return traceback.extract_tb(caught.value.__traceback__)


def test_a_fault_in_the_model_ends_at_its_line():
    lines = lines_of(lambda: poptorch.inferenceModel(Branches())(torch.ones(2)))
    assert lines[-1].line == "if x.sum() > 0:  # this can't be captured"
    assert len(lines) <= 5


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: poptorch.inferenceModel(torch.nn.Linear(2, 2), "options"),
        lambda: poptorch.inferenceModel(torch.nn.Linear(2, 2))(torch.ones(2), torch.ones(2)),
        lambda: poptorch.inferenceModel(torch.nn.Linear(2, 2)).save("file"),
        lambda: poptorch.inferenceModel(torch.nn.Linear(2, 2)).setOptimizer(None),
        lambda: poptorch.trainingModel(torch.nn.Linear(2, 2)).compile(torch.ones(0, 2)),
        lambda: poptorch.load("no such file"),
    ],
)
def test_a_fault_in_a_call_ends_at_the_call(mistake):
    lines = lines_of(mistake)
    assert lines[-1].filename == __file__ and len(lines) <= 5


def test_an_error_of_torch_keeps_its_whole_traceback():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(RuntimeError) as caught:
        poptorch.inferenceModel(model)(torch.ones(2, 3))
    assert any("linear.py" in line.filename for line in traceback.extract_tb(caught.value.__traceback__))


def test_debugging_leaves_nothing_out():
    code = (
        "import poptorch, torch, traceback\n"
        "try:\n    poptorch.inferenceModel(torch.nn.Linear(2, 2))(torch.ones(0, 2))\n"
        "except poptorch.Error as error:\n    print(len(traceback.extract_tb(error.__traceback__)) > 4)\n"
    )
    for level, long in (("WARN", "False\n"), ("DEBUG", "True\n")):
        command = f"import os; os.environ['POPTORCH_LOG_LEVEL'] = {level!r}; exec({code!r})"
        done = subprocess.run([sys.executable, "-c", command], check=True, capture_output=True, text=True)
        assert done.stdout == long
