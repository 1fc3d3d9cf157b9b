"""Optimizers of torch.optim and of users train as in plain PyTorch: their own step runs."""

import inspect

import parity_runs
import pytest
import torch
from torch import nn

import poptorch

ACCUMULATION, ROWS, UPDATES = 2, 4, 5

# The arguments of each optimizer of torch, besides its parameters.
ARGUMENTS = {
    "ASGD": {"lr": 0.05, "t0": 2},
    "Adadelta": {"lr": 0.5},
    "Adafactor": {"lr": 0.05},
    "Adagrad": {"lr": 0.05, "lr_decay": 0.1},
    "Adam": {"lr": 0.05},
    "AdamW": {"lr": 0.05},
    "Adamax": {"lr": 0.05, "weight_decay": 0.1},
    "LBFGS": {"lr": 0.1},
    "Muon": {"lr": 0.05},
    "NAdam": {"lr": 0.05, "momentum_decay": 0.1},
    "RAdam": {"lr": 0.05},
    "RMSprop": {"lr": 0.01, "momentum": 0.5},
    "Rprop": {"lr": 0.01},
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "SparseAdam": {"lr": 0.05},
}
REFUSED = {
    "LBFGS": r"calls the forward again.*torch\.optim\.Adam",
    "SparseAdam": r"sparse gradients.*torch\.optim\.Adam",
}


class Lion(torch.optim.Optimizer):
    """An optimizer of a user, written as many are."""

    def __init__(self, parameters, lr=1e-2, betas=(0.9, 0.99)):
        super().__init__(parameters, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                average, (one, two) = state["exp_avg"], group["betas"]
                parameter.add_(
                    average.mul(one).add(parameter.grad, alpha=1 - one).sign_(), alpha=-group["lr"]
                )
                average.lerp_(parameter.grad, 1 - two)
        return loss


class Assigning(torch.optim.Optimizer):
    """Gives its parameters new memory, and changes its own groups."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    def step(self):
        for group in self.param_groups:
            group["lr"] *= 0.9
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = parameter.data - group["lr"] * parameter.grad


class Model(nn.Module):
    """Only matrices, for Muon."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6, bias=False), nn.Linear(6, 3, bias=False)

    def forward(self, x, target):
        output = self.second(torch.tanh(self.first(x)))
        return output, nn.functional.mse_loss(output, target)

    @staticmethod
    def data(rows):
        return [torch.randn(rows, 4), torch.randn(rows, 3)]


def optimizer_of(name):
    own = {"Lion": Lion, "Assigning": Assigning}
    if name in own:
        return own[name]
    return lambda parameters: getattr(torch.optim, name)(parameters, **ARGUMENTS[name])


def plain(make, updates=UPDATES):
    model = parity_runs.made(Model)
    optimizer = make(model.parameters())
    for rows in parity_runs.batches(model, updates, ACCUMULATION * ROWS):
        parity_runs.plain_update(model, optimizer, parity_runs.cut(ROWS, *rows))
    return model, optimizer


def wrapped(make, iterations=1):
    model = parity_runs.made(Model)
    optimizer = make(model.parameters())
    options = parity_runs.options(accumulation=ACCUMULATION, iterations=iterations)
    return model, optimizer, poptorch.trainingModel(model, options, optimizer)


def trained(make, updates=UPDATES, iterations=1):
    model, optimizer, executor = wrapped(make, iterations)
    data = parity_runs.batches(model, updates, ACCUMULATION * ROWS)
    for first in range(0, updates, iterations):
        executor(*(torch.cat(values) for values in zip(*data[first : first + iterations], strict=True)))
    return model, optimizer


def same(ours, plain):
    """The weights, and the states of the optimizers, are equal to the last bit."""
    for one, other in zip(ours[0].parameters(), plain[0].parameters(), strict=True):
        assert torch.equal(one, other)
    one, other = (optimizer.state_dict() for _, optimizer in (ours, plain))
    assert one["state"].keys() == other["state"].keys()
    for index, state in other["state"].items():
        assert one["state"][index].keys() == state.keys()
        for name, value in state.items():
            found = one["state"][index][name]
            assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value, name
    assert one["param_groups"] == other["param_groups"]


def test_the_table_has_every_optimizer_of_torch():
    found = {
        name
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
    }
    assert found == ARGUMENTS.keys()


@pytest.mark.parametrize("name", [*sorted(ARGUMENTS.keys() - REFUSED.keys()), "Lion", "Assigning"])
def test_an_optimizer_has_the_bits_of_plain_pytorch(name):
    make = optimizer_of(name)
    same(trained(make), plain(make))


@pytest.mark.parametrize("name", ["Adagrad", "NAdam", "Assigning"])
def test_several_updates_a_call_step_once_each(name):
    make = optimizer_of(name)
    same(trained(make, updates=6, iterations=3), plain(make, updates=6))


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_another_forward_or_sparse_gradients_is_refused(name):
    with pytest.raises(AssertionError, match=rf"(?s)Unsupported optimizer type.*{REFUSED[name]}"):
        wrapped(optimizer_of(name))


def test_a_closure_that_must_be_given_is_refused():
    class Closing(Lion):
        def step(self, closure):
            return super().step(closure)

    with pytest.raises(AssertionError, match=r"(?s)Closing.*calls the forward again"):
        wrapped(Closing)


def test_a_hook_of_the_step_may_write_to_gradients():
    def hooked(parameters):
        optimizer = torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.5)

        def halve(*all):
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad.mul_(0.5)

        optimizer.register_step_pre_hook(halve)
        return optimizer

    same(trained(hooked), plain(hooked))


def test_rates_are_read_by_the_step_itself():
    make = optimizer_of("Adagrad")
    model, optimizer, executor = wrapped(make)
    twin = parity_runs.made(Model)
    expected = make(twin.parameters())
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (optimizer, expected)]
    for rows in parity_runs.batches(model, 4, ACCUMULATION * ROWS):
        executor(*rows)
        parity_runs.plain_update(twin, expected, parity_runs.cut(ROWS, *rows))
        for schedule in schedules:
            schedule.step()
        executor.setOptimizer(optimizer)
    same((model, optimizer), (twin, expected))


def test_gradients_of_the_program_stay_as_they_are():
    model, _, executor = wrapped(optimizer_of("Adagrad"))
    model.first.weight.grad = kept = torch.ones(6, 4)
    executor(*parity_runs.batches(model, 1, ACCUMULATION * ROWS)[0])
    assert model.first.weight.grad is kept
    assert torch.equal(kept, torch.ones(6, 4))
    assert model.second.weight.grad is None


class Counting(Lion):
    """Counts its steps by an integer, makes its state anew in each step, and writes to gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.add_(parameter, alpha=0.01)
        super().step(closure)
        for state in self.state.values():
            state["count"], state["exp_avg"] = state.get("count", 0) + 1, state["exp_avg"].clone()


def test_a_users_optimizer_has_a_state_that_can_be_written_saved_and_handed_on(tmp_path):
    model, optimizer, executor = wrapped(Counting)
    twin, plain_optimizer = parity_runs.made(Model), None
    data = parity_runs.batches(model, 4, ACCUMULATION * ROWS)

    def step(rows):
        executor(*rows)
        parity_runs.plain_update(twin, plain_optimizer, parity_runs.cut(ROWS, *rows))
        same((model, executor._optimizer), (twin, plain_optimizer))

    plain_optimizer = Counting(twin.parameters())
    step(data[0])
    for each, weight in ((optimizer, model.first.weight), (plain_optimizer, twin.first.weight)):
        each.state[weight]["exp_avg"].mul_(0.5)
        weight.data.mul_(0.5)
    step(data[1])
    executor.setOptimizer(Counting(model.parameters()))  # goes on with the state of the one before
    step(data[2])
    executor.save(tmp_path / "saved.poptorch")
    executor.destroy()
    executor._optimizer.state.clear()
    executor.loadExecutable(tmp_path / "saved.poptorch")
    step(data[3])


class Failing(Lion):
    """Fails once, before or after it writes in some way."""

    write = None

    def step(self, closure=None):
        write, self.write = self.write, None
        if write is not None:
            write(self, self.param_groups[0]["params"][0])
            raise ValueError("no step today")
        super().step(closure)


def write_into_state(optimizer, parameter):
    optimizer.state[parameter]["exp_avg"].mul_(0.5)


WRITES = {
    "in place": lambda optimizer, parameter: parameter.detach().mul_(0.5),
    "data": lambda optimizer, parameter: parameter.data.mul_(0.5),
    "numpy": lambda optimizer, parameter: parameter.detach().numpy().__imul__(0.5),
    "state": write_into_state,
    "new state": lambda optimizer, parameter: optimizer.state[parameter].update(count=1),
}


@pytest.mark.parametrize("way", WRITES)
def test_a_step_that_fails_after_it_has_written_is_an_update_that_failed_halfway(way):
    _, optimizer, executor = wrapped(Failing)
    rows = parity_runs.batches(Model, 1, ACCUMULATION * ROWS)[0]
    executor(*rows)
    optimizer.write = WRITES[way]
    with pytest.raises(poptorch.Error, match=r"(?s)the weights are lost.*no step today.*fix:"):
        executor(*rows)


@pytest.mark.parametrize("earlier", [0, 2])
def test_a_step_that_fails_before_it_has_written_loses_nothing(earlier):
    model, optimizer, executor = wrapped(Failing)
    data = parity_runs.batches(model, UPDATES, ACCUMULATION * ROWS)
    for rows in data[:earlier]:
        executor(*rows)
    optimizer.write = lambda *all: None
    with pytest.raises(
        poptorch.Error, match=r"(?s)step\(\) failed: ValueError: no step today.*can be called"
    ):
        executor(*data[earlier])
    assert executor.finished_updates == 0
    for rows in data[earlier:]:
        executor(*rows)
    same((model, optimizer), plain(Failing))


class Halves:
    """A step of its own, beside a class with a rule."""

    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(0.5)


class Halving(Halves, torch.optim.SGD):
    pass


class Longer(torch.optim.Adam):
    def _init_group(self, group, *lists):
        group["lr"] *= 2
        return super()._init_group(group, *lists)


class OursHalving(Halves, poptorch.optim.AdamW):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.05)


class Lookahead(torch.optim.Optimizer):
    """A wrapper as many are written: without its base class's __init__."""

    def __init__(self, parameters):
        self.optimizer = torch.optim.Adam(parameters, lr=0.05)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    def state_dict(self):
        return self.optimizer.state_dict()

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure=None):
        self.optimizer.step()
        for slow, fast in zip(self.slow, self.param_groups[0]["params"], strict=True):
            fast.copy_(slow.lerp_(fast, 0.5))


def with_replaced_step(parameters):
    optimizer = torch.optim.AdamW(parameters, lr=0.05)
    step = optimizer.step
    optimizer.step = lambda closure=None: [step(closure), step(closure)][0]
    return optimizer


def with_a_scheduler_and_own_step(parameters):
    optimizer = Halving(parameters, lr=0.05)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


OWN = [
    lambda parameters: Halving(parameters, lr=0.05),
    lambda parameters: Longer(parameters, lr=0.001),
    OursHalving,
    Lookahead,
    with_replaced_step,
    with_a_scheduler_and_own_step,
]


@pytest.mark.parametrize("make", OWN)
def test_a_step_that_is_not_torchs_runs(make):
    same(trained(make), plain(make))


class OnlyInit(torch.optim.AdamW):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.05)

    def rates(self):
        return [group["lr"] for group in self.param_groups]


def test_a_class_without_a_step_of_its_own_has_the_rule_of_its_base(caplog):
    same(trained(OnlyInit), plain(OnlyInit))
    assert caplog.messages == []


def test_a_step_that_is_replaced_after_compilation_runs():
    model, optimizer, executor = wrapped(optimizer_of("AdamW"))
    rows = parity_runs.batches(model, 1, ACCUMULATION * ROWS)[0]
    executor(*rows)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps the step
    executor(*rows)
    before, calls = model.first.weight.clone(), []
    optimizer.step = lambda closure=None: calls.append(1)
    executor(*rows)
    assert calls == [1]
    assert torch.equal(model.first.weight, before)


def test_a_wrapper_that_lacks_what_executors_read_is_refused_with_the_fix():
    class Bare(torch.optim.Optimizer):
        def __init__(self, parameters):
            self.inner = torch.optim.SGD(parameters, lr=0.1)

        def step(self, closure=None):
            self.inner.step()

    with pytest.raises(poptorch.Error, match=r"(?s)Bare has no param_groups and no state.*fix: super"):
        wrapped(Bare)
