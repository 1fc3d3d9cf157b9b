"""What a forward may do with torch while it is traced."""

import copy
import warnings

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional

import poptorch

PROBABILITIES = torch.randn(2, 5, 4)  # two sequences of five steps, four classes
LABELS, STEPS, LENGTHS = torch.tensor([[1, 2], [2, 3]]), torch.tensor([5, 4]), torch.tensor([2, 1])


class Judged(nn.Module):
    """A linear layer, and a loss of what it gives."""

    def __init__(self, loss):
        super().__init__()
        self.layer, self.loss = nn.Linear(4, 4), loss

    def forward(self, x, *targets):
        return self.loss(self.layer(x), *targets)


def trained(loss, *inputs):
    """The loss and the weight after one update: of an executor, and of plain PyTorch."""
    torch.manual_seed(0)
    model = Judged(loss)
    plain = copy.deepcopy(model)
    expected = plain(*inputs)
    expected.backward()
    trainer = poptorch.trainingModel(model, optimizer=poptorch.optim.SGD(model.parameters(), lr=0.1))
    found = trainer(*inputs)
    weight = plain.layer.weight.detach() - 0.1 * plain.layer.weight.grad
    return (found, model.layer.weight.detach().clone()), (expected.detach(), weight)


@pytest.mark.parametrize("zero_infinity", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_ctc_loss_trains_as_in_pytorch(reduction, zero_infinity):
    def loss(scores, labels, steps, lengths):
        log_probs = scores.permute(1, 0, 2).log_softmax(-1)
        value = functional.ctc_loss(log_probs, labels, steps, lengths, 0, reduction, zero_infinity)
        return poptorch.identity_loss(value, "mean") if reduction == "none" else value

    found, expected = trained(loss, PROBABILITIES, LABELS, STEPS, LENGTHS)
    torch.testing.assert_close(found, expected)


def test_the_ctc_loss_takes_lengths_as_python_integers_and_labels_in_a_row():
    def loss(scores, labels):
        return nn.CTCLoss()(scores.permute(1, 0, 2).log_softmax(-1), labels, (5, 5), (2, 1))

    found, expected = trained(loss, PROBABILITIES, LABELS.flatten()[:3].repeat(1))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("options", [{}, {"full": True, "reduction": "sum"}])
def test_the_gaussian_loss_trains_as_in_pytorch(options):
    def loss(scores, target):
        return functional.gaussian_nll_loss(scores, target, target.abs() + 1, **options)

    found, expected = trained(loss, torch.randn(3, 4), torch.randn(3, 4))
    torch.testing.assert_close(found, expected)


def test_distributions_do_not_check_their_parameters_by_reading_them():
    def forward(x):
        drawn = torch.distributions.Normal(x, torch.ones(2)).rsample()
        return drawn + torch.distributions.Uniform(torch.zeros(2), torch.ones(2)).sample()

    assert poptorch.inferenceModel(forward)(torch.zeros(3, 2)).shape == (3, 2)
    with pytest.raises(ValueError, match="constraint"):  # they do so on the host, before and after
        torch.distributions.Normal(torch.zeros(1), -torch.ones(1))


def test_a_traced_tensor_prints_as_unavailable(capsys):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x):
            print(x * self.weight, f"{self.weight}", torch.ones(1))
            return x

    poptorch.inferenceModel(Model())(torch.ones(1, 2))
    out = capsys.readouterr().out
    assert "tensor(<unavailable>, size=(1, 2), dtype=torch.float32)" in out
    assert "Parameter containing: tensor(<unavailable>, size=(2,), dtype=torch.float32)" in out


@pytest.mark.parametrize("convert", [lambda x: x.numpy(), lambda x: numpy.asarray(x)])
def test_the_values_of_a_traced_tensor_can_not_go_to_numpy(convert):
    model = poptorch.inferenceModel(lambda x: x + torch.from_numpy(convert(x)))
    with pytest.raises(poptorch.Error, match=r"poptorch.CPU"):
        model(torch.ones(2))


def test_backward_inside_forward_is_refused():
    def forward(x):
        x.sum().backward()
        return x

    with pytest.raises(poptorch.Error, match=r"backward\(\) can't be called inside a forward"):
        poptorch.inferenceModel(forward)(torch.ones(2))


def test_a_parameter_of_a_wrapped_model_prints_as_one():
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.5)
    executor = poptorch.trainingModel(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert repr(model.weight) == "Parameter containing:\ntensor([[0.5000]], requires_grad=True)"
    del executor
