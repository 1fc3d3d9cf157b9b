"""The operations of `examples/by_feature/known_operations.py` compute what plain PyTorch computes."""

import pytest
import torch
from programs import imported
from torch import nn

import poptorch


@pytest.fixture(scope="module", autouse=True)
def registered():
    with imported("by_feature", "known_operations") as module:
        yield module


def used(name, *inputs, example=None, **attributes):
    example = inputs[0] if example is None else example
    (made,) = poptorch.custom_op([*inputs], name, "custom.ops", 1, [example], attributes)
    return made


TARGETS, LENGTHS = torch.tensor([[1, 2, 2], [3, 1, 0]]), (torch.tensor([7, 6]), torch.tensor([3, 2]))
ROUNDED = {"exponent_bits": 4, "mantissa_bits": 1, "rounding": "nearest"}


def ctc(reduction):
    return lambda x: nn.functional.ctc_loss(x, TARGETS, *LENGTHS, reduction=reduction).reshape(-1)


def distances(p):
    return lambda x, y: torch.cdist(x, y, p=p, compute_mode="donot_use_mm_for_euclid_dist")


def by_name(name, *more, shape=(), **attributes):
    example = torch.zeros(shape) if shape else None
    return lambda *inputs: used(name, *inputs, *more, example=example, **attributes)


X, Y = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)), torch.full((3, 5), 0.25)
SCORES = torch.randn(7, 2, 4, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
PAIRS = torch.cat([X[:1], Y[:1]])  # one pair of rows is equal, where a root has no gradient
# By name: the operation, what plain PyTorch computes, and the weights that both get.
OPERATIONS = {
    "copy": (by_name("CopyTensor"), torch.clone, (X,)),
    "remap": (by_name("RemapCE", grain_size=8, debug_str="x"), torch.clone, (X,)),
    "average": (by_name("ExpMovAvg", Y, factor=0.75), lambda x: 0.75 * x + 0.25 * Y, (X,)),
    "average by a tensor": (
        by_name("ExpMovAvg", Y, torch.tensor(0.75)),
        lambda x: torch.tensor(0.75) * x + (1 - torch.tensor(0.75)) * Y,
        (X,),
    ),
    "proxy": (
        by_name("AutogradProxy"),
        lambda value, proxy: value.detach() + proxy - proxy.detach(),
        (torch.arange(4.0), torch.arange(4.0) / 4),
    ),
    "L1": (by_name("L1Distance", shape=(3, 2), root_path="codelets.cpp"), distances(1), (X, PAIRS)),
    "L2": (by_name("L2Distance", shape=(3, 2)), distances(2), (X, PAIRS)),
    "CTC, mean": (by_name("Ctc", TARGETS, *LENGTHS, shape=1, reduction=1), ctc("mean"), (SCORES,)),
    "CTC, each": (by_name("CtcLoss", TARGETS, *LENGTHS, shape=2, reduction="none"), ctc("none"), (SCORES,)),
    "rounded": (
        by_name("SimulatedQuant", **ROUNDED),
        lambda x: x + torch.tensor([-0.2, 0.0, 0.4]),  # to the float format's next value
        (torch.tensor([1.2, -1.5, 2.6]),),
    ),
}


class Model(nn.Module):
    """All operations, each with weights of its own; the loss weighs what comes out, so that gradients differ."""

    def __init__(self, which):
        super().__init__()
        self.functions = [each[which] for each in OPERATIONS.values()]
        self.weights = nn.ParameterList(w.clone() for _, _, weights in OPERATIONS.values() for w in weights)

    def forward(self):
        weights = iter(self.weights)
        inputs = [[next(weights) for _ in each] for _, _, each in OPERATIONS.values()]
        made = [function(*own) for function, own in zip(self.functions, inputs, strict=True)]
        losses = [(x * torch.arange(1.0, x.numel() + 1).view(x.shape)).sum() for x in made]
        return *made, poptorch.identity_loss(torch.stack(losses).sum(), "none")


def test_operations_have_the_values_and_gradients_of_plain_pytorch():
    model, twin = Model(0), Model(1)
    options = poptorch.Options().showCompilationProgressBar(False)
    trainer = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=1.0))
    found, expected = trainer(), twin()
    expected[-1].backward()
    for name, one, other in zip(OPERATIONS, found, expected, strict=False):
        torch.testing.assert_close(one, other.detach(), msg=lambda text, name=name: f"{name}: {text}")
    for weight, plain in zip(model.weights, twin.weights, strict=True):
        gradient = torch.zeros_like(plain) if plain.grad is None else plain.grad
        torch.testing.assert_close(weight.detach(), plain.detach() - gradient)


def test_rounding_to_nearest_is_that_of_the_smaller_format():
    """Five bits of exponent and ten of mantissa are float16, but for its largest exponent."""
    x = torch.cat([torch.randn(1000), torch.tensor([0.0, -0.0, 65504.0, 3e38, -1e9])])
    found = used("SimulatedQuant", x, exponent_bits=5, mantissa_bits=10, rounding="nearest")
    assert torch.equal(found[:1000], x[:1000].half().float())
    assert found[-3:].tolist() == [65504.0, 65504.0, -65504.0]
    levels = used(
        "SimulatedQuant", torch.linspace(-2, 2, 999), exponent_bits=2, mantissa_bits=1, rounding="nearest"
    )
    assert levels.unique().tolist() == [-2, -1.5, -1, -0.75, -0.5, -0.25, 0, 0.25, 0.5, 0.75, 1, 1.5, 2]
    with pytest.raises(ValueError, match=r"and not 'stochastic'"):
        used("SimulatedQuant", x, exponent_bits=5, mantissa_bits=10)


def test_the_error_of_an_unknown_operation_names_the_example():
    options = poptorch.Options().showCompilationProgressBar(False)
    model = poptorch.inferenceModel(lambda x: used("AllToAll", x), options)
    with pytest.raises(poptorch.Error, match=r"fix: .*examples/by_feature/known_operations\.py registers"):
        model(X)
