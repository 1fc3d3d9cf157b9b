"""A schedule of the user's own is drawn, run, recorded and planned, and leaves the same bits."""

import pytest
import torch
from torch import nn

import poptorch
from popengine import profile
from popengine.order import ORDERS, Order

ROWS, MICRO_BATCHES = 2, 6


OWN = Order(
    "two by two",  # the forwards of two micro-batches, then their backwards
    key=lambda step, action, micro_batch: (micro_batch // 2, action.phase == "B", micro_batch),
    in_flight=lambda step: 2,
)


@pytest.fixture(autouse=True)
def only_here():
    yield
    ORDERS.pop(OWN.name, None)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x, y):
        with poptorch.Block("first", ipu_id=0):
            x = self.first(x).tanh()
        with poptorch.Block("last", ipu_id=1):
            return nn.functional.mse_loss(self.last(x), y)


def options(schedule):
    made = poptorch.Options().showCompilationProgressBar(False)
    made.Training.gradientAccumulation(MICRO_BATCHES)
    return made.setExecutionStrategy(poptorch.PipelinedExecution(schedule=schedule))


def batch():
    torch.manual_seed(1)
    return torch.randn(ROWS * MICRO_BATCHES, 4), torch.randn(ROWS * MICRO_BATCHES, 2)


def trained(schedule, folder=None):
    torch.manual_seed(0)
    model, opts = Net(), options(schedule)
    if folder is not None:
        opts.enableProfiling(str(folder))
    executor = poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = [executor(*batch()) for _ in range(3)]
    executor.destroy()
    return [*losses, *model.state_dict().values()]


GRID = """\
ipu 0 | F0 F1 .. .. B0 B1 F2 F3 .. .. B2 B3 F4 F5 .. .. B4 B5
ipu 1 | .. F0 F1 B0 B1 .. .. F2 F3 B2 B3 .. .. F4 F5 B4 B5 ..
"""


def test_it_is_drawn():
    assert poptorch.describe(Net(), options(OWN), batch()).schedule.endswith(GRID.rstrip())


def test_a_profile_records_it(tmp_path):
    for one, other in zip(trained(OWN, tmp_path), trained("1f1b"), strict=True):
        assert torch.equal(one, other)
    found = profile.load(next(tmp_path.glob("*/profile.pop")))
    assert found.facts["mode"] == "two by two"
    lane = [f"{tick.phase}{tick.micro_batch}" for tick in found.schedule if tick.ipu == 0]
    assert " ".join(lane) == "F0 F1 B0 B1 F2 F3 B2 B3 F4 F5 B4 B5"
