"""Anchored tensors: which names there are, when their values are taken, and how modes join them."""

import pytest
import torch
from executor_models import Trained, batch, options, trainer

import poptorch
from poptorch import OutputMode


def anchored(opts, **names):
    for short, long_name in names.items():
        opts.anchorTensor(short, long_name)
    return opts


def gradient_of(model, x, target):
    """Of the layer's weight, by plain PyTorch."""
    twin = Trained()
    twin.load_state_dict(model.state_dict())
    twin(x, target)[1].backward()
    assert twin.layer.weight.grad is not None
    return twin.layer.weight.grad


@pytest.mark.parametrize("name", ["layer.weight", "model.layer.weight"])
def test_a_gradient_and_the_weight_before_and_after_its_update(name):
    names = {"grad": f"Gradient___{name}", "new": f"UpdatedVar___{name}", "old": name}
    executor, model = trainer(opts=anchored(options(), **names))
    before, expected = model.layer.weight.detach().clone(), gradient_of(model, *batch())
    executor(*batch())
    assert torch.equal(executor.getAnchoredTensor("old"), before)
    torch.testing.assert_close(executor.getAnchoredTensor("grad"), expected)
    assert torch.equal(executor.getAnchoredTensor("new"), model.layer.weight)
    torch.testing.assert_close(model.layer.weight, before - 0.1 * expected)


def test_losses_and_inputs_have_names():
    opts = anchored(options(mode=OutputMode.Sum), loss="loss", first="loss:0", x="x")
    executor, _ = trainer(opts=opts)
    x, target = batch()
    _, loss = executor(x, target)
    assert executor.getAnchoredTensor("loss") == executor.getAnchoredTensor("first") == loss
    assert torch.equal(executor.getAnchoredTensor("x"), x)


@pytest.mark.parametrize(
    ("mode", "gradients", "updates"), [("All", 4 * 2, 4), ("Final", 1, 1), ("Sum", 1, 1), ("EveryN", 4, 2)]
)
def test_an_anchor_has_a_mode_of_its_own(mode, gradients, updates):
    opts = options(iterations=4, accumulation=2)  # the outputs' mode is Final
    for short, name in (("grad", "Gradient___layer.weight"), ("new", "UpdatedVar___layer.weight")):
        opts.anchorTensor(short, name, OutputMode[mode], 2)
    executor, model = trainer(opts=opts)
    output, _ = executor(*batch(8))
    assert output.shape == (1, 2)
    assert executor.getAnchoredTensor("grad").shape == (gradients * 2, 3)
    new = executor.getAnchoredTensor("new")
    assert new.shape == (updates * 2, 3)  # there is one update an iteration
    if mode != "Sum":
        assert torch.equal(new[-2:], model.layer.weight)


def test_anchors_change_no_result():
    plain, one = trainer(opts=options(iterations=2, accumulation=2))
    names = {"grad": "Gradient___layer.weight", "old": "layer.weight", "x": "x"}
    watched, other = trainer(opts=anchored(options(iterations=2, accumulation=2), **names))
    plain(*batch(4))
    watched(*batch(4))
    assert torch.equal(one.layer.weight, other.layer.weight)


def test_names_can_be_listed_once_compiled():
    executor, _ = trainer()
    with pytest.raises(AssertionError, match="needs a compiled model"):
        executor.getTensorNames()
    executor.compile(*batch())
    assert executor.getTensorNames() == [
        *("x", "target", "loss:0", "loss", "layer.weight", "layer.bias"),
        *("Gradient___layer.weight", "Gradient___layer.bias"),
        *("UpdatedVar___layer.weight", "UpdatedVar___layer.bias", "finalLossScale"),
    ]


def test_an_unknown_name_is_an_error_that_knows_the_right_one():
    for name, words in (
        ("Gradient___layer.wieght", "did you mean 'Gradient___layer.weight'"),
        ("model.x", "no tensor has that name"),  # an input
    ):
        with pytest.raises(poptorch.Error, match=words):
            trainer(opts=anchored(options(), tensor=name))[0](*batch())


def test_a_tensor_is_found_after_the_first_call_only():
    executor = poptorch.inferenceModel(Trained(), anchored(options(), w="layer.weight"))
    with pytest.raises(AssertionError, match="No tensor with name w found"):
        executor.getAnchoredTensor("w")
    executor(batch()[0])
    assert executor.getAnchoredTensor("w").shape == (2, 3)
    with pytest.raises(AssertionError, match="No tensor with name v found"):
        executor.getAnchoredTensor("v")


def test_one_tensor_can_be_anchored_in_several_modes():
    opts = options(iterations=2)
    for name in ("x", "layer.weight", "Gradient___layer.weight"):
        opts.anchorTensor(f"all {name}", name, OutputMode.All)
        opts.anchorTensor(f"sum {name}", name, OutputMode.Sum)
    executor, _ = trainer(opts=opts)
    executor(*batch(2))
    for name in ("x", "layer.weight", "Gradient___layer.weight"):
        one, other = executor.getAnchoredTensor(f"all {name}").chunk(2)
        torch.testing.assert_close(executor.getAnchoredTensor(f"sum {name}"), one + other)


def test_automatic_loss_scaling_is_visible_in_its_anchor_and_state_only():
    def train(opts):
        model = Trained()
        model.load_state_dict(first.state_dict())
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, loss_scaling=8.0)
        executor = poptorch.trainingModel(
            model, anchored(opts, grad="Gradient___layer.weight", scale="finalLossScale"), optimizer
        )
        return executor, optimizer

    first = Trained()
    opts = options(mode=OutputMode.All, iterations=3)
    opts.Training.setAutomaticLossScaling(True)
    scaled, optimizer = train(opts)
    plain, _ = train(options(mode=OutputMode.All, iterations=3))
    for _ in range(2):
        assert torch.equal(scaled(*batch(6))[1], plain(*batch(6))[1])
        assert torch.equal(scaled.getAnchoredTensor("grad"), plain.getAnchoredTensor("grad"))
    # No gradient is large, so it has doubled after each of five updates; this is the sixth's.
    assert scaled.getAnchoredTensor("scale") == 8 * 2**5
    assert plain.getAnchoredTensor("scale") == 8
    assert optimizer.state_dict()["ipu_state"]["lossScaleUpdateFactor"] == 2**6
    scaled.detachFromDevice()
    scaled(*batch(6))
    assert scaled.getAnchoredTensor("scale") == 8 * 2**8


def test_a_period_of_an_anchor_need_not_divide_the_device_iterations():
    opts = options(iterations=5)
    opts.anchorTensor("x", "x", OutputMode.EveryN, 2)
    executor = poptorch.inferenceModel(Trained(), opts)
    x = torch.arange(15.0).reshape(5, 3)
    executor(x)
    assert torch.equal(executor.getAnchoredTensor("x"), x[[1, 3]])
    opts = options(iterations=5)
    opts.anchorTensor("x", "x", OutputMode.EveryN, 6)
    with pytest.raises(poptorch.Error, match="output_return_period 6 is more than the deviceIterations"):
        poptorch.inferenceModel(Trained(), opts)(x)
