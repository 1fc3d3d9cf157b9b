"""A new optimizer is a class with a `step()`: its state, rates and messages follow from what the class declares."""

import copy

import pytest
import torch

import poptorch
from popengine.errors import Error
from small_models import Signed


class Net(torch.nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(3, 2, dtype=dtype)

    def forward(self, x):
        return poptorch.identity_loss(self.layer(x) ** 2, "mean")


def batches(count=3, dtype=torch.float32):
    torch.manual_seed(2)
    return [torch.randn(4, 3).to(dtype) for _ in range(count)]


def trainer(model, optimizer):
    return poptorch.trainingModel(model, poptorch.Options().showCompilationProgressBar(False), optimizer)


def test_it_trains_as_in_plain_pytorch_and_goes_on_from_a_checkpoint():
    host, device = Net(), Net()
    plain, optimizer = Signed(host.parameters()), Signed(device.parameters())
    executor = trainer(device, optimizer)
    for number, batch in enumerate(batches()):
        plain.zero_grad()
        host(batch).backward()
        plain.step()
        if number == 2:
            state = copy.deepcopy(optimizer.state_dict())
            executor.destroy()
            optimizer = Signed(device.parameters())
            optimizer.load_state_dict(state)
            executor = trainer(device, optimizer)
        executor(batch)
    assert torch.equal(host.layer.weight, device.layer.weight)


def test_a_call_uses_the_rates_that_were_set_last_and_keeps_the_programs():
    model = Net()
    optimizer = Signed(model.parameters(), lr=0.5)
    executor = trainer(model, optimizer)
    before = model.layer.weight.clone()
    optimizer.param_groups[0]["lr"] = 0.25
    executor(batches()[0])
    assert (model.layer.weight - before).abs().max() == 0.5
    assert optimizer.param_groups[0]["lr"] == 0.25
    executor.setOptimizer(optimizer)
    before = model.layer.weight.clone()
    executor(batches()[0])
    assert (model.layer.weight - before).abs().max() == 0.25


def test_half_weights_are_float32_in_a_step_and_rounded_once():
    seen = []

    class Watching(Signed):
        def step(self, closure=None):
            (group,) = self.param_groups
            seen.extend((each.dtype, each.grad.dtype) for each in group["params"])
            super().step(closure)

    model = Net(torch.float16)
    optimizer = Watching(model.parameters(), lr=0.1)
    expected = (model.layer.weight.float() - 0.1 * torch.ones(())).half()
    executor = trainer(model, optimizer)
    before = model.layer.weight.clone()
    memory = model.layer.weight.data_ptr()
    executor(batches(dtype=torch.float16)[0])
    assert seen == [(torch.float32, torch.float32)] * 2
    assert (model.layer.weight.dtype, model.layer.weight.data_ptr()) == (torch.float16, memory)
    down, up = expected, (before.float() + 0.1 * torch.ones(())).half()
    assert ((model.layer.weight == down) | (model.layer.weight == up)).all()
    assert optimizer.state[model.layer.weight]["mean"].dtype == torch.float32


def test_another_type_after_compilation_is_an_error_that_names_both():
    model = Net()
    executor = trainer(model, Signed(model.parameters()))
    executor(batches()[0])
    with pytest.raises(Error, match="it was Signed, this one is ADAM"):
        executor.setOptimizer(torch.optim.Adam(model.parameters()))
    with pytest.raises(AssertionError, match=r"Types supported: poptorch\.optim\.SGD, .*torch\.optim\.SGD"):
        trainer(Net(), model.parameters())
