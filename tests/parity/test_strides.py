"""Memory with gaps and other strides: kernels see what they see in plain PyTorch, so the last bits are the same."""

from functools import partial

import pytest
import torch
from parity_runs import assert_trains_as_plain_pytorch, cut, made, options
from torch import nn

import poptorch

SGD = partial(torch.optim.SGD, lr=0.5)


class Squared(nn.Module):
    """The loss of a model is the mean of its squared output."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *inputs):
        return poptorch.identity_loss(self.model(*inputs).square(), "mean")


def assert_a_step_has_the_bits_of_plain_pytorch(make, *inputs):
    """One micro-batch and one update."""
    assert_trains_as_plain_pytorch(lambda: Squared(make()), SGD, *inputs, accumulation=1)


@pytest.mark.parametrize("size", range(10))
def test_a_gru_cell_has_the_bits_of_plain_pytorch_for_all_sizes(size):
    """It computes in place in parts of one buffer, whose rows are three times as long."""
    torch.manual_seed(size)
    inputs, hidden, rows = (int(torch.randint(1, most, ())) for most in (20, 20, 6))
    state = torch.randn(rows, hidden)
    make = partial(nn.GRUCell, inputs, hidden)
    assert_a_step_has_the_bits_of_plain_pytorch(make, torch.randn(rows, inputs), state)


@pytest.mark.parametrize("loss", [nn.PairwiseDistance(p=3), nn.TripletMarginLoss(p=3), None])
def test_powers_in_place_have_the_bits_of_plain_pytorch(loss):
    class Distances(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x, y):
            if loss is None:
                return (self.a(x).abs() + 0.5).pow_(2.5).square_()
            return loss(self.a(x), y, *[x] * isinstance(loss, nn.TripletMarginLoss))

    torch.manual_seed(0)
    assert_a_step_has_the_bits_of_plain_pytorch(Distances, torch.randn(4, 8), torch.randn(4, 8))


# ---- inputs ------------------------------------------------------------------------------------------------


def with_dimensions_swapped(value):
    return value.transpose(0, -1).contiguous().transpose(0, -1)


def part_of_rows(value):
    return torch.cat([value, value], -1)[..., : value.shape[-1]]


def every_other_row(value):
    return value.repeat_interleave(2, 0)[::2]


def expanded(value):
    return value[:1].expand(value.shape)


def channels_last(value):
    return value.movedim(1, -1).contiguous().movedim(-1, 1)


INPUTS = [with_dimensions_swapped, part_of_rows, every_other_row, expanded, channels_last]


class StateFromOutside(nn.Module):
    """The word language model of pytorch/examples: time first, with a state of which each layer has a row."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(8, 8, 2)

    def forward(self, x, state):
        state = state.transpose(0, 1).contiguous()
        return self.rnn(x.transpose(0, 1).contiguous(), (state, state))[0].transpose(0, 1)

    @staticmethod
    def data(rows):
        return torch.randn(rows, 5, 8), torch.randn(rows, 2, 8)


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, y):
        folded = x.transpose(0, 1).contiguous().view(5, -1)
        flat = self.layer(y).sigmoid() + y.transpose(1, 2).reshape(y.shape).exp()
        return folded.sum() * flat.mul_(2) + x.contiguous().view(len(x), -1).mean()

    @staticmethod
    def data(rows):
        return torch.randn(rows, 5, 8), torch.randn(rows, 8, 8)


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten()
        )

    def forward(self, image, other):
        return self.layers(image) + self.layers(other.contiguous())

    @staticmethod
    def data(rows):
        return torch.randn(rows, 3, 8, 8), torch.randn(rows, 3, 8, 8)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)

    def forward(self, x, memory):
        return self.layer(x) + self.layer(memory)

    @staticmethod
    def data(rows):
        return torch.randn(rows, 5, 8), torch.randn(rows, 5, 8)


@pytest.mark.parametrize("make", [StateFromOutside, Views, Images, Attention])
@pytest.mark.parametrize("change", INPUTS)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_an_input_of_any_strides_is_read_as_a_contiguous_copy(make, change, accumulation):
    torch.manual_seed(0)
    combined = [change(value) for value in make.data(2 * accumulation)]
    assert_trains_as_plain_pytorch(lambda: Squared(make()), SGD, *combined, accumulation=accumulation)
    own = options(accumulation=1, iterations=accumulation)
    again = poptorch.inferenceModel(made(make).eval(), own)(*combined)
    plain = made(make).eval()
    parts = [plain(*rows).detach() for rows in cut(2, *combined)]
    assert torch.equal(again, torch.cat(parts))
