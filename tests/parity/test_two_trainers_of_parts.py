"""Two executors train parts of one model with two optimizers, as a generative adversarial network is trained."""

from collections.abc import Callable

import pytest
import torch
from parity_runs import options, plain_update
from torch import Tensor, nn
from torch.nn import functional

import poptorch

ROWS, STEPS = 4, 6


def made() -> tuple[nn.Module, nn.Module]:
    """The generator and the discriminator of DCGAN, for images of 8 x 8."""
    torch.manual_seed(0)
    generator = nn.Sequential(
        nn.ConvTranspose2d(6, 8, 4, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip
    discriminator = nn.Sequential(
        nn.Conv2d(1, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(8, 1, 4, bias=False), nn.Sigmoid(), nn.Flatten(0),
    )  # fmt: skip
    return generator, discriminator


class OfDiscriminator(nn.Module):
    """The loss of the discriminator for real and for generated images."""

    def __init__(self, generator: nn.Module, discriminator: nn.Module) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator

    def forward(self, real: Tensor, noise: Tensor) -> Tensor:
        for_real = self.discriminator(real)
        for_fake = self.discriminator(self.generator(noise).detach())
        loss = functional.binary_cross_entropy(for_real, torch.ones_like(for_real))
        loss = loss + functional.binary_cross_entropy(for_fake, torch.zeros_like(for_fake))
        return poptorch.identity_loss(loss, "none")


class OfGenerator(nn.Module):
    """The loss of the generator: the discriminator takes its images for real ones."""

    def __init__(self, generator: nn.Module, discriminator: nn.Module) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator

    def forward(self, noise: Tensor) -> Tensor:
        found = self.discriminator(self.generator(noise))
        return poptorch.identity_loss(functional.binary_cross_entropy(found, torch.ones_like(found)), "none")


def adam(module: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(module.parameters(), lr=0.01, betas=(0.5, 0.999))


def data() -> list[tuple[Tensor, Tensor, Tensor]]:
    torch.manual_seed(1)
    return [
        (torch.randn(ROWS, 1, 8, 8), torch.randn(ROWS, 6, 1, 1), torch.randn(ROWS, 6, 1, 1))
        for _ in range(STEPS)
    ]


def state(*modules: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for module in modules for value in module.state_dict().values()]


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
    """Return the function that makes one update in plain PyTorch."""
    return lambda *inputs: plain_update(model, optimizer, [inputs])[0]


def by_an_executor(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
    return poptorch.trainingModel(model, options(accumulation=1), optimizer)


def trained(trainer: Callable[..., Callable[..., Tensor]], frozen: bool) -> list[Tensor]:
    """Return the losses, and all weights and buffers."""
    generator, discriminator = made()
    of_discriminator = trainer(OfDiscriminator(generator, discriminator), adam(discriminator))
    of_generator = trainer(OfGenerator(generator, discriminator), adam(generator))
    losses = []
    for real, first, second in data():
        discriminator.requires_grad_()
        losses.append(of_discriminator(real, first).reshape(()))
        discriminator.requires_grad_(not frozen)
        losses.append(of_generator(second).reshape(()))
    return [*losses, *state(generator, discriminator)]


@pytest.mark.parametrize("frozen", [False, True])
def test_a_generator_and_a_discriminator_train_by_turns_as_in_plain_pytorch(frozen):
    """Neither executor is detached between the calls. `frozen`: the program freezes the discriminator by turns."""
    found, expected = trained(by_an_executor, frozen), trained(plain, frozen)
    assert [torch.equal(*pair) for pair in zip(found, expected, strict=True)] == [True] * len(expected)
