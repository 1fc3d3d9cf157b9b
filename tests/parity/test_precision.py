"""Number formats and what protects them: loss scaling, clipping, stochastic rounding, exceptions."""

import pytest
import torch
from parity_runs import options
from torch import nn

import poptorch


class Weight(nn.Module):
    """A loss whose gradient is `slope` everywhere."""

    def __init__(self, slope, size=4096, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))
        self.slope = slope

    def forward(self, x):
        return poptorch.identity_loss(self.weight * self.slope * x, "sum")


def test_the_norm_of_half_gradients_may_be_larger_than_their_type_holds():
    model = Weight(60000.0, size=100, dtype=torch.float16)  # the norm is 600000
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.5, accum_type=torch.float16, max_grad_norm=10.0)
    poptorch.trainingModel(model, options(accumulation=1), optimizer)(torch.ones(1, dtype=torch.float16))
    torch.testing.assert_close(model.weight.detach(), torch.full((100,), 0.5, dtype=torch.float16))


@pytest.mark.parametrize("slope, factors", [(1.0, [2.0, 4.0, 8.0]), (1e4, [0.5, 1.0, 0.5])])
def test_the_loss_scale_follows_the_share_of_large_gradients(slope, factors):
    opts = options(accumulation=1)
    opts.Training.setAutomaticLossScaling(True)
    model = Weight(slope)
    executor = poptorch.trainingModel(model, opts, poptorch.optim.SGD(model.parameters(), lr=1e-9))
    seen = []
    for _ in range(3):
        executor(torch.ones(1))
        seen.append(float(executor._plans.state.loss_factor))
    assert seen == factors


def test_an_update_whose_gradients_overflow_is_skipped():
    opts = options(accumulation=1)
    opts.Training.setAutomaticLossScaling(True)
    model = Weight(1e4)
    executor = poptorch.trainingModel(
        model, opts, poptorch.optim.SGD(model.parameters(), lr=1.0, loss_scaling=2.0)
    )
    executor(torch.tensor([torch.inf]))
    assert torch.equal(model.weight, torch.ones(4096))
    assert executor._plans.state.loss_factor == 0.5


def half_precision_mean_change(stochastic, steps=20):
    """By how much float16 ones move if each step should take away an eighth of their last bit."""
    model = Weight(1.0, dtype=torch.float16)
    opts = options(accumulation=1, iterations=steps).randomSeed(11)
    opts.Precision.enableStochasticRounding(stochastic)
    step = 2.0**-11 / 8  # just below 1, float16 numbers are 2**-11 apart
    executor = poptorch.trainingModel(model, opts, poptorch.optim.SGD(model.parameters(), lr=step))
    executor(torch.ones(steps, dtype=torch.float16))
    return (1 - model.weight.double()).mean().item() / (steps * step)


def test_stochastic_rounding_keeps_small_updates_on_average_which_rounding_to_nearest_loses():
    assert half_precision_mean_change(stochastic=False) == 0
    # 4096 weights x 20 steps: the standard error of the mean is about 1 %.
    assert half_precision_mean_change(stochastic=True) == pytest.approx(1, abs=0.05)


class Exceptional(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize(
    "function, value",
    [
        (lambda x: x - x, torch.inf),
        (lambda x: 1 / x, 0.0),
        (lambda x: x * torch.inf, 0.0),
        (torch.sqrt, -1.0),
        (lambda x: x > 1, torch.nan),
        (torch.exp, 1000.0),
    ],
    ids=["inf - inf", "1 / 0", "0 * inf", "sqrt(-1)", "nan > 1", "exp(1000)"],
)
def test_floating_point_exceptions_stop_the_run_and_name_the_line(function, value):
    opts = poptorch.Options().showCompilationProgressBar(False)
    opts.Precision.enableFloatingPointExceptions(True)
    executor = poptorch.inferenceModel(Exceptional(function), opts)
    with pytest.raises(poptorch.Error, match=r"(?s)FloatingPointException.*test_precision.py:"):
        executor(torch.full((2,), value))
    executor(torch.full((2,), 0.5))
    quiet = poptorch.inferenceModel(Exceptional(function), poptorch.Options())
    quiet(torch.full((2,), value))


@pytest.mark.parametrize(
    "allocate",
    [lambda x: x.new_empty(4), lambda x: x.new_empty_strided((4,), (1,)), torch.empty_like],
    ids=["new_empty", "new_empty_strided", "empty_like"],
)
def test_uninitialized_memory_is_no_floating_point_exception(allocate):
    """A backward failed when such memory held a NaN by chance. Torch fills it with NaN in deterministic mode."""
    opts = poptorch.Options().showCompilationProgressBar(False)
    opts.Precision.enableFloatingPointExceptions(True)
    executor = poptorch.inferenceModel(Exceptional(lambda x: write_ones(allocate(x))), opts)
    torch.use_deterministic_algorithms(True)
    try:
        assert executor(torch.ones(4)).tolist() == [1.0] * 4
    finally:
        torch.use_deterministic_algorithms(False)


def write_ones(memory):
    memory[:2], memory[2:] = 1.0, 1.0
    return memory
