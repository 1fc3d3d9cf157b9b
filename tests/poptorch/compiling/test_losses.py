"""The loss that a model returns is the one that is trained; PopTorch's marks stay where a program makes them."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional

import poptorch
from popengine.compile.capture import LOSSES

Output = namedtuple("Output", "loss logits")


@dataclass
class Fields:
    logits: torch.Tensor
    loss: torch.Tensor | None = None
    parts: dict | None = None


class Judged(nn.Module):
    def __init__(self, outcome):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.outcome = nn.Linear(4, 4), outcome

    def forward(self, x, target):
        return self.outcome(self.layer(x), target)


# With these rows no updated weight exceeds 1, so that one rounding is less than 1e-7.
X, TARGET = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0))


def opts():
    return poptorch.Options().showCompilationProgressBar(False)


def mse(y, t):
    return functional.mse_loss(y, t)


def l1(y, t):
    return functional.l1_loss(y, t)


def hand_written(y, t):
    return (y - t).pow(4).sum() / y.numel()


def weight_after(outcome, options=None, **more):
    """The weight after an update, and the outputs."""
    model = Judged(outcome)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    outputs = poptorch.trainingModel(model, options or opts(), optimizer, **more)(X, TARGET)
    return model.layer.weight.detach().clone(), outputs


def plain_weight(outcome, pick):
    model = Judged(outcome)
    pick(model(X, TARGET)).backward()
    return (model.layer.weight - 0.1 * model.layer.weight.grad).detach()


def first(value):
    return value[0]


def second(value):
    return value[1]


def itself(value):
    return value


RETURNED = {
    "scaled": (lambda y, t: mse(y, t) * 2, itself),
    "num_items_in_batch": (lambda y, t: (functional.mse_loss(y, t, reduction="sum") / 20, y), first),
    "with an auxiliary term": (lambda y, t: mse(y, t) + 0.1 * y.square().mean(), itself),
    "hand-written": (hand_written, itself),
    "hand-written, first": (lambda y, t: (hand_written(y, t), y), first),
    "of another loss": (lambda y, t: mse(l1(y, t).expand_as(y), t), itself),
    "in place": (lambda y, t: mse(y, t).mul_(3).add_(y.sum()), itself),
    "two losses, first": (lambda y, t: ((mse(y, t) + l1(y, t)) / 2, y), first),
    "two losses in a dictionary": (
        lambda y, t: {"logits": y, "loss": mse(y, t) + l1(y, t)},
        lambda v: v["loss"],
    ),
    "one of two in a dictionary": (
        lambda y, t: {"other": l1(y, t).detach(), "loss": mse(y, t)},
        lambda v: v["loss"],
    ),
    "a named tuple": (lambda y, t: Output(mse(y, t) + l1(y, t), y), lambda v: v.loss),
    "a dataclass": (lambda y, t: Fields(y, hand_written(y, t)), lambda v: v.loss),
    "scaled, behind the output": (lambda y, t: (y, mse(y, t) * 2), second),
    "a loss function's, behind the output": (lambda y, t: (y, mse(y, t)), second),
    "a loss function's, and its exponential": (lambda y, t: ((loss := mse(y, t)).exp(), loss, y), second),
    "a metric first, without a gradient": (lambda y, t: ((y > t).float().mean(), mse(y, t) * 2), second),
}

if torch.__version__ >= "2.13":  # which introduced this function
    RETURNED["linear_cross_entropy's, behind the output"] = (
        lambda y, t: (y, functional.linear_cross_entropy(y, torch.eye(y.shape[1]), t.softmax(1))),
        second,
    )


@pytest.mark.parametrize("name", RETURNED)
def test_the_returned_loss_is_trained(name):
    outcome, pick = RETURNED[name]
    weight, outputs = weight_after(outcome)
    torch.testing.assert_close(weight, plain_weight(outcome, pick), rtol=0, atol=1e-7)
    torch.testing.assert_close(pick(outputs), pick(Judged(outcome)(X, TARGET)).detach())


@pytest.mark.parametrize("name", [1, "1"])
def test_an_output_can_be_named_as_the_loss(name):
    def outcome(y, t):
        return mse(y, t), hand_written(y, t)

    expected = plain_weight(outcome, second)
    torch.testing.assert_close(weight_after(outcome, loss=name)[0], expected)
    torch.testing.assert_close(weight_after(outcome, opts().loss(name))[0], expected)


def test_a_nested_output_is_named_with_dots():
    def outcome(y, t):
        return Fields(y, mse(y, t), {"total": [l1(y, t), hand_written(y, t)]})

    found, _ = weight_after(outcome, loss="parts.total.1")
    torch.testing.assert_close(found, plain_weight(outcome, lambda v: v.parts["total"][1]))


def test_a_name_that_is_no_loss_is_an_error():
    with pytest.raises(poptorch.Error, match=r"output 'total' of forward, and that is no output"):
        weight_after(lambda y, t: {"loss": mse(y, t)}, loss="total")
    with pytest.raises(AssertionError, match="loss takes the name or the index"):
        opts().loss(2.5)


def test_what_a_program_marks_is_trained_whatever_it_returns():
    def outcome(y, t):
        marked = poptorch.identity_loss(mse(y, t) + l1(y, t), "none")
        return {"loss": marked * 5}

    def same(y, t):
        return mse(y, t) + l1(y, t)

    torch.testing.assert_close(weight_after(outcome)[0], plain_weight(same, itself))


def test_under_an_option_only_the_marked_loss_is_trained():
    """PopTorch's rule: what is computed from a loss function's result is not part of training."""
    found, output = weight_after(lambda y, t: mse(y, t) * 2, opts().loss(marked=True))
    torch.testing.assert_close(found, plain_weight(mse, itself))
    assert torch.equal(output, 2 * mse(Judged(mse).layer(X), TARGET).detach())
    with pytest.raises(poptorch.Error, match="Couldn't find a loss in graph!"):
        weight_after(hand_written, opts().loss(marked=True))


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (lambda y, t: y, "Couldn't find a loss in graph!"),
        (lambda y, t: (mse(y, t), l1(y, t)), "Multiple independent losses found in graph"),
        (lambda y, t: mse(y, t) + l1(y, t), "Multiple independent losses found in graph"),
        (lambda y, t: (y, mse(y, t) + l1(y, t)), "Multiple independent losses found in graph"),
        (lambda y, t: (y, hand_written(y, t)), "Couldn't find a loss in graph!"),
        (lambda y, t: (y, (loss := mse(y, t)) * 2, loss * 3), "2 scalars that are computed from the loss"),
        (lambda y, t: {"loss": functional.mse_loss(y, t, reduction="none")}, "training needs a scalar"),
    ],
)
def test_what_is_not_clear_is_an_error(outcome, words):
    with pytest.raises(poptorch.Error, match=words) as caught:
        weight_after(outcome)
    assert "poptorch.identity_loss" in str(caught.value)


@pytest.mark.parametrize("metric", [l1, mse, lambda y, t: l1(t, t)])
def test_a_metric_without_gradients_is_no_loss(metric):
    def outcome(y, t):
        with torch.no_grad():
            found = metric(y, t)
        return mse(y, t), found

    assert torch.equal(weight_after(outcome)[0], weight_after(mse)[0])


@pytest.mark.parametrize(
    ("outcome", "warnings"),
    [
        (lambda y, t: ((loss := mse(y, t)) + y.abs().sum(), loss), 1),
        (lambda y, t: {"mse": (loss := mse(y, t)), "total": loss * 2}, 1),
        (lambda y, t: ((loss := mse(y, t)), loss.detach() * 2), 0),
        (lambda y, t: ((loss := mse(y, t)) + y.abs().sum(), loss.detach()), 0),
        (lambda y, t: {"loss": (loss := mse(y, t)) * 2, "mse": loss}, 0),
        (lambda y, t: (poptorch.identity_loss(loss := mse(y, t), "none"), loss * 2), 0),
    ],
)
def test_a_returned_scalar_that_is_computed_from_the_trained_loss_has_a_warning(outcome, warnings, caplog):
    weight_after(outcome)
    assert caplog.text.count("a scalar computed from it, whose other terms are not trained") == warnings


def _classes(y):
    return torch.arange(len(y)) % y.shape[1]


# A call of each of torch's loss functions, on an output [rows, classes] and a target of this shape.
LOSS_CALLS = {
    "ctc_loss": lambda f, y, t: f(
        y[:, None].log_softmax(-1), torch.tensor([[1, 2]]), torch.tensor([len(y)]), torch.tensor([2])
    ),
    "nll_loss": lambda f, y, t: f(y.log_softmax(1), _classes(y)),
    "gaussian_nll_loss": lambda f, y, t: f(y, t, torch.ones_like(y)),
    "kl_div": lambda f, y, t: f(y.log_softmax(1), t.softmax(1), reduction="batchmean"),
    "cross_entropy": lambda f, y, t: f(y, _classes(y)),
    "binary_cross_entropy": lambda f, y, t: f(y.sigmoid(), t.sigmoid()),
    "binary_cross_entropy_with_logits": lambda f, y, t: f(y, t.sigmoid()),
    "linear_cross_entropy": lambda f, y, t: f(y, torch.eye(y.shape[1]), t.softmax(1)),
    "margin_ranking_loss": lambda f, y, t: f(y[:, 0], y[:, 1], t[:, 0].sign()),
    "hinge_embedding_loss": lambda f, y, t: f(y, t.sign()),
    "soft_margin_loss": lambda f, y, t: f(y, t.sign()),
    "multilabel_margin_loss": lambda f, y, t: f(y, _classes(y)[:, None].repeat(1, y.shape[1])),
    "multilabel_soft_margin_loss": lambda f, y, t: f(y, (t > 0).float()),
    "cosine_embedding_loss": lambda f, y, t: f(y, t, t[:, 0].sign()),
    "multi_margin_loss": lambda f, y, t: f(y, _classes(y)),
    "triplet_margin_loss": lambda f, y, t: f(y, t, -t),
    "triplet_margin_with_distance_loss": lambda f, y, t: f(y, t, -t),
}
LOSS_FUNCTIONS = [
    name for name, f in vars(functional).items() if callable(f) and name.islower() and f in LOSSES
]


def metric_of(name, y, t):
    return LOSS_CALLS.get(name, lambda f, y, t: f(y, t))(getattr(functional, name), y, t)


def unused(y, t, metric):
    metric()
    return hand_written(y, t)


def detached(y, t, metric):
    return hand_written(y, t), metric().detach()


def without_gradient(y, t, metric):
    with torch.no_grad():
        found = metric()
    return hand_written(y, t), found


def of_detached_output(y, t, metric):
    return {"loss": hand_written(y, t), "metric": metric(y.detach())}


def two_metrics(y, t, metric):
    metric(), mse(y, t)
    return hand_written(y, t), y


def kept_as_a_number_of_the_output(y, t, metric):
    return hand_written(y, t), (metric() > 0.5)


def beside_a_marked_loss(y, t, metric):
    metric()
    return poptorch.identity_loss(hand_written(y, t), "none"), y


WAYS = [
    unused,
    detached,
    without_gradient,
    of_detached_output,
    two_metrics,
    kept_as_a_number_of_the_output,
    beside_a_marked_loss,
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LOSS_FUNCTIONS)
def test_a_loss_function_that_is_called_as_a_metric_is_not_trained(name, way, caplog):
    def outcome(y, t):
        return way(y, t, lambda output=y: metric_of(name, output, t))

    weight, _ = weight_after(outcome)
    assert torch.equal(weight, weight_after(hand_written)[0])
    assert "not trained" not in caplog.text


@pytest.mark.parametrize(
    ("outcome", "pick"),
    [
        (lambda y, t: (hand_written(y, t), mse(y, t)), second),
        (lambda y, t: {"mine": hand_written(y, t), "mse": mse(y, t)}, lambda v: v["mse"]),
        (lambda y, t: (y, hand_written(y, t), mse(y, t) * 2), lambda v: v[2]),
    ],
)
def test_of_two_returned_scalars_that_could_be_meant_the_recorded_loss_is_trained_with_one_warning(
    outcome, pick, caplog
):
    weight, _ = weight_after(outcome)
    torch.testing.assert_close(weight, plain_weight(outcome, pick))
    (warning,) = [text for text in caplog.messages if "not trained" in text]
    assert warning.count("test_losses.py:") == 2  # both lines
    assert "loss=" in warning


# Of torch, and two that a capture replaces by functions of its own.
@pytest.mark.parametrize("name", ["mse_loss", "ctc_loss", "gaussian_nll_loss"])
def test_a_loss_without_an_output_of_its_own_is_trained_if_no_scalar_is_returned(name):
    def outcome(y, t):
        metric_of(name, y, t)
        return y

    assert torch.equal(weight_after(outcome)[0], weight_after(lambda y, t: metric_of(name, y, t))[0])
