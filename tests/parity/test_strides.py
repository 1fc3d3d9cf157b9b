"""Memory with gaps and other strides: kernels see what they see in plain PyTorch, so the last bits are the same."""

import copy

import pytest
import torch
from parity_runs import options
from torch import nn

import poptorch


def assert_a_step_has_the_bits_of_plain_pytorch(model, *inputs):
    """One micro-batch and one update; the loss is the mean of the squared output."""

    class Squared(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = copy.deepcopy(model)

        def forward(self, *given):
            return poptorch.identity_loss(self.model(*given).square(), "mean")

    ours, plain = Squared(), Squared()
    executor = poptorch.trainingModel(
        ours, options(accumulation=1), torch.optim.SGD(ours.parameters(), lr=0.5)
    )
    loss = executor(*inputs)
    expected = plain(*(value.clone() for value in inputs))
    expected.backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    assert torch.equal(loss, expected.detach())
    for (name, one), two in zip(ours.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(one, two), name


@pytest.mark.parametrize("size", range(10))
def test_a_gru_cell_has_the_bits_of_plain_pytorch_for_all_sizes(size):
    """It computes in place in parts of one buffer, whose rows are three times as long."""
    torch.manual_seed(size)
    inputs, hidden, rows = (int(torch.randint(1, most, ())) for most in (20, 20, 6))
    state = torch.randn(rows, hidden)
    assert_a_step_has_the_bits_of_plain_pytorch(nn.GRUCell(inputs, hidden), torch.randn(rows, inputs), state)


class Recurrent(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.layer = nn.GRU(*sizes, bidirectional=True)

    def forward(self, x):
        return self.layer(x)[0]


@pytest.mark.parametrize("size", range(6))
def test_a_gru_has_the_bits_of_plain_pytorch_for_all_sizes(size):
    torch.manual_seed(size)
    inputs, hidden, rows = (int(torch.randint(1, most, ())) for most in (20, 20, 6))
    assert_a_step_has_the_bits_of_plain_pytorch(Recurrent(inputs, hidden, 2), torch.randn(rows, 3, inputs))


class Powers(nn.Module):
    def forward(self, x):
        return (x.abs() + 0.5).pow_(2.5).square_()


@pytest.mark.parametrize("loss", [nn.PairwiseDistance(p=3), nn.TripletMarginLoss(p=3), None])
def test_powers_in_place_have_the_bits_of_plain_pytorch(loss):
    class Distances(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x, y):
            if loss is None:
                return Powers()(self.a(x))
            return loss(self.a(x), y, *[x] * isinstance(loss, nn.TripletMarginLoss))

    torch.manual_seed(0)
    assert_a_step_has_the_bits_of_plain_pytorch(Distances(), torch.randn(4, 8), torch.randn(4, 8))
