"""What a call returns in every output mode, against a plain loop over iterations, accumulation and replicas."""

import collections

import pytest
import torch
from torch import nn

import poptorch
from small_models import module

ITERATIONS, ACCUMULATION, REPLICAS, ROWS = 4, 3, 2, 2
Pair = collections.namedtuple("Pair", "rows total")


class Reports(nn.Module):
    """Outputs of several ranks; the weight starts at 1 and is trained."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        y = x * self.weight
        loss = y.square().mean()
        if self.training:
            loss = poptorch.identity_loss(loss, "none")
        return {"pair": Pair(y, y.sum()), "loss": loss, "column": [y.sum(0)], "none": None, "number": 3}


def plain(x, training, replicas, accumulation):
    """The outputs of every (iteration, accumulation, replica), in this order."""
    parts = x.reshape(ITERATIONS, accumulation, replicas, ROWS, 3)
    weight, found = torch.ones(3), []
    for iteration in range(ITERATIONS):
        gradient = torch.zeros(3)
        for micro_batch in parts[iteration].flatten(0, 1):
            y = micro_batch * weight
            found.append({"rows": y, "total": y.sum(), "loss": y.square().mean(), "column": y.sum(0)})
            gradient += (2 * y * micro_batch).sum(0) / y.numel()
        if training:
            weight = weight - 0.1 * gradient / (accumulation * replicas)
    return found


def chosen(found, mode, period, replicas, accumulation):
    """What an output mode returns of one output's values, stacked."""
    values = torch.stack(found).reshape(ITERATIONS, accumulation, replicas, *found[0].shape)
    if mode == poptorch.OutputMode.Final:
        values = values[-1, -1]
    elif mode == poptorch.OutputMode.Sum:
        values = values.sum((0, 1))
    elif mode == poptorch.OutputMode.EveryN:
        values = values[period - 1 :: period].flatten(0, 2)
    else:
        values = values.flatten(0, 2)
    if values.dim() == 1:
        return values if len(values) > 1 else values[0]
    return values.flatten(0, 1)


MODES = [
    (poptorch.OutputMode.All, 1),
    (poptorch.OutputMode.Final, 1),
    (poptorch.OutputMode.Sum, 1),
    (poptorch.OutputMode.EveryN, 1),
    (poptorch.OutputMode.EveryN, 2),
    (poptorch.OutputMode.EveryN, 4),
]


def executor_for(training, mode, period=1, replicas=1):
    options = poptorch.Options().deviceIterations(ITERATIONS).replicationFactor(replicas)
    options.outputMode(mode, period if mode == poptorch.OutputMode.EveryN else None)
    options.showCompilationProgressBar(False)
    if not training:
        return poptorch.inferenceModel(Reports().eval(), options)
    options.Training.gradientAccumulation(ACCUMULATION)
    model = Reports()
    return poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("replicas", [1, REPLICAS])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(("mode", "period"), MODES)
def test_outputs_are_those_of_a_plain_loop(mode, period, training, replicas):
    accumulation = ACCUMULATION if training else 1
    x = torch.randn(ITERATIONS * accumulation * replicas * ROWS, 3)
    output = executor_for(training, mode, period, replicas)(x)
    found = plain(x, training, replicas, accumulation)
    wanted = {
        name: chosen([one[name] for one in found], mode, period, replicas, accumulation) for name in found[0]
    }
    torch.testing.assert_close(output["pair"].rows, wanted["rows"])
    torch.testing.assert_close(output["pair"].total, wanted["total"])
    torch.testing.assert_close(output["loss"], wanted["loss"])
    torch.testing.assert_close(output["column"][0], wanted["column"])
    assert list(output) == ["pair", "loss", "column", "none", "number"]
    assert type(output["pair"]) is Pair
    assert (output["none"], output["number"]) == (None, 3)


def test_by_default_training_returns_the_final_and_inference_all_outputs():
    x = torch.randn(ITERATIONS * ACCUMULATION * ROWS, 3)
    trainer = executor_for(True, poptorch.OutputMode.Default)
    assert trainer.options.output_mode == poptorch.OutputMode.Final
    assert trainer(x)["loss"].shape == ()
    assert executor_for(False, poptorch.OutputMode.Default)(x)["loss"].shape == (ITERATIONS,)


@pytest.mark.parametrize(
    ("given", "returned"),
    [
        (torch.int64, torch.int32),
        (torch.int32, torch.int32),
        (torch.float64, torch.float32),
        (torch.float32, torch.float32),
        (torch.float16, torch.float16),
        (torch.uint8, torch.uint8),
        (torch.int8, torch.int8),
        (torch.int16, torch.int16),
        (torch.bool, torch.bool),
    ],
)
def test_64_bit_values_come_back_with_32_bits_and_others_as_they_are(given, returned):
    x = torch.arange(4).to(given)
    whole, first = poptorch.inferenceModel(lambda x: (x, x[:1]), quiet())(x)
    assert (whole.dtype, first.dtype) == (returned, returned)
    assert torch.equal(whole, x.to(returned))


def test_a_0d_input_reaches_every_micro_batch_as_it_is():
    x = torch.randn(4)
    assert torch.equal(
        poptorch.inferenceModel(lambda x, factor: x * factor, quiet())(x, torch.tensor(3.0)), x * 3
    )


def test_replicas_of_one_input_group_read_the_same_rows():
    x = torch.arange(4.0)
    for grouping, rows in [
        ("Consecutive", [0, 0, 1, 1, 2, 2, 3, 3]),
        ("Orthogonal", [0, 1, 0, 1, 2, 3, 2, 3]),
    ]:
        options = quiet().deviceIterations(2).replicationFactor(4)
        options.inputReplicaGrouping(2, getattr(poptorch.CommGroupType, grouping))
        assert poptorch.inferenceModel(module(lambda self, x: x + 0), options)(x).tolist() == rows, grouping


def quiet():
    return poptorch.Options().showCompilationProgressBar(False)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int32])
def test_a_sum_of_integers_does_not_wrap_around(dtype):
    options = poptorch.Options().deviceIterations(300).outputMode(poptorch.OutputMode.Sum)
    executor = poptorch.inferenceModel(lambda x: (x > 0).to(dtype), options)
    found = executor(torch.ones(600))
    assert found.dtype == torch.int32
    assert found.tolist() == [300, 300]
