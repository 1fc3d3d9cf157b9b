"""Values that a forward notes for the host."""

import pytest
import torch
from executor_models import options
from torch import nn

import poptorch
from small_models import module


class Noting(nn.Module):
    """Notes what its loss and its rows are, beside returning the loss."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x):
        output = self.layer(x)
        loss = poptorch.identity_loss(output**2, "mean")
        poptorch.notes.note("loss", loss)
        poptorch.notes.note(("rows", 1), {"x": x, "number": 3})
        return loss


def trained(opts, model=None):
    torch.manual_seed(1)
    model = model or Noting()
    return poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_note_has_the_value_of_each_micro_batch_whatever_the_output_mode():
    executor = trained(options(iterations=2, accumulation=3))
    x = torch.arange(24.0).reshape(12, 2)
    loss = executor(x)
    (first, losses), (second, rows) = executor.notes
    assert (first, second) == ("loss", ("rows", 1))
    assert losses.shape == (6,) and losses[-1] == loss
    assert rows["number"] == 3
    assert torch.equal(rows["x"], x.reshape(6, 2, 2))


def test_notes_keep_their_order_over_replicas():
    executor = trained(options(accumulation=2, replicas=2))
    x = torch.arange(8.0).reshape(4, 2)
    executor(x)
    assert torch.equal(executor.notes[1][1]["x"], x.reshape(4, 1, 2))


def test_a_noted_value_has_its_own_type_again():
    def forward(self, x):
        poptorch.notes.note("hits", (x > 0).sum())
        return x

    executor = poptorch.inferenceModel(module(forward), options())
    executor(torch.tensor([1.0, -1.0, 2.0]))
    ((_, hits),) = executor.notes
    assert hits.dtype == torch.int64 and hits.tolist() == [2]


def test_outside_an_executor_nothing_is_noted():
    assert Noting()(torch.ones(1, 2)).shape == ()


@pytest.mark.parametrize("asked", [False, True])
def test_anchors_and_notes_live_side_by_side(asked):
    opts = options(iterations=2)
    if asked:
        opts.anchorTensor("weights", "layer.weight", poptorch.OutputMode.All)
    executor = trained(opts)
    executor(torch.ones(2, 2))
    assert executor.notes[0][1].shape == (2,)
    assert not asked or executor.getAnchoredTensor("weights").shape == (2, 2)
