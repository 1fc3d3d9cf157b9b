"""Complex parameters train as in plain PyTorch: real and imaginary parts of their gradients are kept."""

import pytest
import torch
from parity_runs import cut, made, options, plain_update
from torch import nn

import poptorch


class Filter(nn.Module):
    """A layer in the frequency domain, as in networks of Fourier transforms."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.cfloat))
        self.mixed = nn.Parameter(torch.randn(4, 4, dtype=torch.cfloat).t())

    def forward(self, x):
        found = torch.fft.rfft(self.a(x)) * self.weight @ self.mixed
        return poptorch.identity_loss(torch.fft.irfft(found, 6).square(), "mean")


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    **{
        name: lambda p, name=name: getattr(torch.optim, name)(p, lr=0.01)
        for name in ("ASGD", "Adadelta", "Adagrad", "Adamax", "NAdam", "RAdam", "Rprop")
    },
}


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_complex_parameters_train_as_in_plain_pytorch(name, accumulation):
    ours, plain = made(Filter), made(Filter)
    own = options(accumulation=accumulation, iterations=3)
    executor = poptorch.trainingModel(ours, own, OPTIMIZERS[name](ours.parameters()))
    x = torch.randn(6 * accumulation, 6)
    losses, expected = executor(x).reshape(-1), []
    executor.copyWeightsToHost()
    step = OPTIMIZERS[name](plain.parameters())
    for update in cut(2 * accumulation, x):
        expected += plain_update(plain, step, cut(2, *update))
    # The products of complex numbers in torch's updates round otherwise.
    torch.testing.assert_close(losses, torch.stack(expected))
    for value, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(value, other, atol=2e-5, rtol=1e-4)


def test_clipping_takes_both_parts_into_the_norm():
    ours, plain = made(Filter), made(Filter)
    optimizer = poptorch.optim.SGD(ours.parameters(), lr=0.1, use_combined_accum=False, max_grad_norm=0.01)
    x = torch.randn(2, 6)
    executor = poptorch.trainingModel(ours, options(accumulation=1), optimizer)
    executor(x)
    executor.copyWeightsToHost()
    plain(x).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for value, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(value, other)
