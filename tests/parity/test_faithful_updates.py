"""What updates get wrong in silence, if nobody looks: rare rates, narrow sums, wide numbers."""

import logging
from functools import partial

import pytest
import torch
from parity_runs import options
from torch import nn

import poptorch

quiet = partial(options, accumulation=1)


class Slope(nn.Module):
    """Its gradient is the input."""

    def __init__(self, dtype=torch.float32, ipus=(0, 0)):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=dtype))
        self.ipus = ipus

    def forward(self, x):
        with poptorch.Block("a", ipu_id=self.ipus[0]):
            y = self.weight * x
        with poptorch.Block("b", ipu_id=self.ipus[1]):
            return poptorch.identity_loss(y, "sum")


def twins(dtype=torch.float32):
    torch.manual_seed(0)
    one, two = (nn.Linear(3, 2, dtype=dtype) for _ in range(2))
    two.load_state_dict(one.state_dict())
    return one, two


class Loss(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return poptorch.identity_loss(self.layer(x).square().sum(), "none")


def step_both(make, dtype=torch.float32, steps=3):
    """The weights of a model after some updates by an executor, and by the optimizer's own `step`."""
    (one, two), x = twins(dtype), torch.randn(2, 3, dtype=dtype)
    executor = poptorch.trainingModel(Loss(one), quiet(), make(one.parameters()))
    optimizer = make(two.parameters())
    for _ in range(steps):
        executor(x)
        optimizer.zero_grad()
        Loss(two)(x).backward()
        optimizer.step()
    return one.weight.detach().clone(), two.weight.detach()


def test_lamb_with_a_weight_norm_of_at_most_nothing_takes_adams_steps():
    """Programs set it for biases. The ratio is 1 where either of its parts is 0; it was 0, and nothing ever moved."""
    given, host = step_both(lambda p: poptorch.optim.LAMB(p, lr=0.01, max_weight_norm=0.0))
    assert torch.equal(given, host)
    adam, _ = step_both(lambda p: torch.optim.Adam(p, lr=0.01))
    torch.testing.assert_close(given, adam, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_a_float64_model_trains_in_float64(make):
    given, expected = step_both(lambda p: make(p, lr=0.01), torch.float64)
    assert torch.equal(given, expected)
    assert not torch.equal(given, given.float().double())


@pytest.mark.parametrize("layout", [(1, (0, 0)), (1, (0, 1)), (2, (0, 0)), (4, (0, 1))], ids=str)
def test_a_running_mean_in_float16_never_grows_beyond_what_it_is_of(layout):
    """512 gradients of 1 at a loss scale of 128 add up to 65,536: float16 has no such number."""
    replicas, ipus = layout
    model = Slope(ipus=ipus)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.5, loss_scaling=128.0, accum_type=torch.float16)
    executor = poptorch.trainingModel(
        model, quiet(accumulation=512 // replicas, replicas=replicas), optimizer
    )
    executor(torch.ones(512, 4))
    assert model.weight.tolist() == [0.5] * 4


def running(replicas, ipus):
    model = Slope(ipus=ipus)
    options = quiet(accumulation=6, replicas=replicas)
    options.Training.setMeanAccumulationAndReplicationReductionStrategy(
        poptorch.MeanReductionStrategy.Running
    )
    executor = poptorch.trainingModel(model, options, poptorch.optim.SGD(model.parameters(), lr=0.5))
    x = torch.randn(6 * replicas, 4, generator=torch.Generator().manual_seed(0))
    executor(x)
    return model.weight.detach().clone(), 1 - 0.5 * x.double().mean(0)


def test_a_running_mean_is_the_mean_in_every_layout():
    for replicas in (1, 3):
        given, mean = running(replicas, (0, 0))
        torch.testing.assert_close(given.double(), mean, rtol=1e-6, atol=1e-7)
        assert torch.equal(given, running(replicas, (0, 1))[0])


# ---- numbers that 32 bits don't hold ---------------------------------------------------------------------


class Times(nn.Module):
    def __init__(self, dtype=torch.int64):
        super().__init__()
        self.register_buffer("factor", torch.tensor([2], dtype=dtype))

    def forward(self, x):
        return x * self.factor


@pytest.mark.parametrize("mode", [poptorch.OutputMode.All, poptorch.OutputMode.Sum])
@pytest.mark.parametrize(
    "large, is_told, small",
    [
        (torch.tensor([2**40]), True, torch.int32),
        # A model with float64 weights returns float64.
        (torch.tensor([1e300], dtype=torch.float64), False, torch.float64),
    ],
    ids=["int64", "float64"],
)
def test_a_number_that_32_bits_do_not_hold_comes_back_in_64(large, is_told, small, mode, caplog):
    """2**40 came back as 0."""
    options = quiet().outputMode(mode)
    executor = poptorch.inferenceModel(Times(large.dtype), options)
    with caplog.at_level(logging.WARNING):
        given = executor(large)
    assert (given.dtype, given.tolist()) == (large.dtype, (large * 2).tolist())
    assert ("too large for torch." in caplog.text) == is_told
    assert executor(torch.ones_like(large)).dtype == small


def test_outputs_are_added_up_in_the_64_bits_that_the_model_has():
    executor = poptorch.inferenceModel(Times(), quiet(iterations=3).outputMode(poptorch.OutputMode.Sum))
    assert executor(torch.tensor([2**30, 2**30, -(2**31) + 5])).tolist() == [10]


# ---- loss scales -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ipus", [(0, 0), (0, 1)])
def test_gradients_that_a_loss_scale_makes_overflow_are_told_of_once(ipus, caplog):
    model = Slope(torch.float16, ipus)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, loss_scaling=1024.0)
    executor = poptorch.trainingModel(model, quiet(iterations=2, accumulation=3), optimizer)
    x = torch.ones(6, 4, dtype=torch.float16)
    with caplog.at_level(logging.WARNING):
        executor(x)
        assert "infinity" not in caplog.text
        x[4] = 900
        for _ in range(2):
            executor(x)
    told = [record.getMessage() for record in caplog.records if "infinity" in record.getMessage()]
    assert len(told) == 1
    assert "gradients of step 3 hold an infinity or a NaN" in told[0]
    assert "the loss scale is 1024" in told[0]
    assert "setAutomaticLossScaling(True)" in told[0]


# ---- loaded rates ----------------------------------------------------------------------------------------
