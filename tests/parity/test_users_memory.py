"""Weights and optimizer states stay in the memory that the user gives them, of any kind, and the user's reads and
writes there count as in plain PyTorch."""

import copy
import mmap
from multiprocessing import shared_memory

import numpy
import pytest
import torch
from parity_runs import made, options
from torch import nn

import poptorch

ODD = 4  # bytes before the first element


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 4)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        self.seen.add_(1)
        return poptorch.identity_loss(self.b(torch.tanh(self.a(x))).square() + self.seen.sum(), "mean")


def by_numpy(value, keep):
    room = numpy.zeros(value.numel() + 1, dtype=numpy.float32)
    return torch.from_numpy(room[1:]).view(value.shape)


def by_shared_memory(value, keep):
    room = shared_memory.SharedMemory(create=True, size=value.nbytes + ODD)
    keep.append(room)
    return torch.frombuffer(room.buf, dtype=torch.float32, count=value.numel(), offset=ODD).view(value.shape)


MEMORY = {
    "numpy": by_numpy,
    "shared memory": by_shared_memory,
    "share_memory_": lambda value, keep: torch.empty_like(value).share_memory_(),
    "a flat buffer": lambda value, keep: torch.zeros(value.numel() + 5)[1 : value.numel() + 1].view(
        value.shape
    ),
    "a transposed buffer": lambda value, keep: torch.zeros(*value.shape[::-1]).permute(
        *range(value.dim())[::-1]
    ),
    "columns": lambda value, keep: torch.zeros(*value.shape, 2)[..., 1],
}
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}
X = torch.arange(24.0).view(6, 4) / 24


def move(memory, tensors, keep):
    """Give each tensor memory of this kind; return aliases that the user holds."""
    aliases = []
    for value in tensors:
        alias = memory(value, keep)
        value.data = alias.copy_(value.detach())
        aliases.append(alias)
    return aliases


def weights_of(model):
    return [*model.parameters(), *model.buffers()]


def plain_step(model, optimizer):
    optimizer.zero_grad()
    model(X).backward()
    optimizer.step()


@pytest.fixture
def keep():
    kept = []
    yield kept
    for room in kept:
        room.unlink()


@pytest.mark.parametrize("moved_after", [0, 1])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("memory", MEMORY)
def test_weights_stay_in_the_users_memory(memory, name, moved_after, keep):
    ours, plain = made(Model), made(Model)
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in (ours, plain)]
    executor = poptorch.trainingModel(ours, options(accumulation=1), optimizers[0])
    for _ in range(moved_after):
        executor(X)
        plain_step(plain, optimizers[1])
    aliases = move(MEMORY[memory], weights_of(ours), keep)
    for factor in (1.0, 0.5):
        for alias in aliases:
            alias.mul_(factor)
        with torch.no_grad():
            for value in weights_of(plain):
                value.mul_(factor)
        executor(X)
        plain_step(plain, optimizers[1])
        for value, alias, expected in zip(weights_of(ours), aliases, weights_of(plain), strict=True):
            assert (value.data_ptr(), value.stride()) == (alias.data_ptr(), alias.stride())
            assert torch.equal(value, alias)
            torch.testing.assert_close(alias, expected.detach())  # kernels choose by the address
    del aliases, alias, value
    for value in weights_of(ours):
        value.data = value.detach().clone()


@pytest.mark.parametrize("memory", MEMORY)
def test_inference_reads_the_users_memory(memory, keep):
    model = nn.Linear(4, 6)
    executor = poptorch.inferenceModel(model, options(accumulation=1))
    executor(X)
    aliases = move(MEMORY[memory], model.parameters(), keep)
    for _ in range(2):
        for alias in aliases:
            alias.mul_(0.5)
        torch.testing.assert_close(executor(X), model(X).detach())
    del aliases, alias
    for value in model.parameters():
        value.data = value.detach().clone()


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_inference_writes_to_no_weight():
    model = nn.Linear(4, 6)
    executor = poptorch.inferenceModel(model, options(accumulation=1))
    executor(X)
    room = mmap.mmap(-1, 96, prot=mmap.PROT_READ)
    model.weight.data = torch.frombuffer(room, dtype=torch.float32).view(4, 6).t()
    assert torch.equal(executor(X), model(X).detach())


@pytest.mark.parametrize("name", ["SGD", "AdamW", "fused"])
@pytest.mark.parametrize("memory", MEMORY)
def test_optimizer_states_stay_in_the_users_memory(memory, name, keep):
    ours, plain = made(Model), made(Model)
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in (ours, plain)]
    executor = poptorch.trainingModel(ours, options(accumulation=1), optimizers[0])
    executor(X)
    plain_step(plain, optimizers[1])
    aliases = {}
    for parameter, state in optimizers[0].state.items():
        for key in [key for key in state if key != "step"]:
            aliases[parameter, key] = MEMORY[memory](state[key], keep).copy_(state[key])
            state[key] = aliases[parameter, key]
    for _ in range(2):
        executor(X)
        plain_step(plain, optimizers[1])
        for (parameter, key), alias in aliases.items():
            assert optimizers[0].state[parameter][key] is alias
        for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other)
            for key, value in optimizers[1].state[other].items():
                torch.testing.assert_close(optimizers[0].state[one][key], value)
    del aliases, alias
    optimizers[0].state.clear()


def test_memory_that_is_used_again_after_share_memory_is_seen():
    """The address of a shared weight may become that of the tensor that replaces its data."""
    for _ in range(30):
        ours, plain = made(Model), made(Model)
        executor = poptorch.trainingModel(ours, options(accumulation=1), OPTIMIZERS["SGD"](ours.parameters()))
        executor(X)
        optimizer = OPTIMIZERS["SGD"](plain.parameters())
        plain_step(plain, optimizer)
        ours.share_memory()
        for model in (ours, plain):
            model.half().float()
        executor(X)
        plain_step(plain, optimizer)
        for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("trained", [True, False])
def test_weights_that_come_to_share_memory_are_refused_if_one_changes(trained):
    model = made(Model)
    if trained:
        executor = poptorch.trainingModel(
            model, options(accumulation=1), OPTIMIZERS["SGD"](model.parameters())
        )
        executor(X)
        before = copy.deepcopy(model.state_dict())
        model.a.bias.data = model.b.weight.data.view(-1)[2:8]
        with pytest.raises(poptorch.Error, match=r"(?s)share their memory.*fix: use the same object"):
            executor(X)
        assert torch.equal(model.b.weight, before["b.weight"])
        return
    frozen = nn.Sequential(model.a, model.b)
    executor = poptorch.inferenceModel(frozen, options(accumulation=1))
    executor(X)
    model.a.bias.data = model.b.weight.data.view(-1)[2:8]
    torch.testing.assert_close(executor(X), frozen(X).detach())
