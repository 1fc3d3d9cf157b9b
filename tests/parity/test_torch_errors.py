"""What torch refuses while a model is captured is an error with the user's line, a reason and a fix."""

import copy
import re
import warnings

import numpy as np
import pytest
import torch
from parity_runs import options
from torch import nn
from torch.nn import functional

import poptorch
from small_models import module

X, LABELS = torch.ones(2, 4), torch.tensor([0, 1])

torch.library.define("parity_tests::shapeless", "(Tensor x) -> Tensor")
torch.library.impl("parity_tests::shapeless", "CPU")(lambda x: x * 2)


class Sub(torch.Tensor):
    pass


CONSTANT = torch.ones(4).as_subclass(Sub)

# What an expression of a layer, its input and labels is refused for: torch's words, and ours.
REFUSED = {
    "a subclass of an input": (lambda layer, x, y: x.as_subclass(Sub) * 2, "of a subclass"),
    "a subclass of a list": (lambda layer, x, y: x * Sub([1.0]), "of a subclass"),
    "a subclass of a result": (lambda layer, x, y: Sub(layer(x)), "of a subclass"),
    "a constant of a subclass": (lambda layer, x, y: x * CONSTANT, "of a subclass"),
    "columns": (lambda layer, x, y: layer(x[:, :3]), "same reduction dim"),
    "dimensions": (lambda layer, x, y: nn.BatchNorm2d(3)(x), "expected 4D input"),
    "one row for its statistics": (
        lambda layer, x, y: nn.BatchNorm1d(4)(x[:1]),
        "more than 1 value per channel",
    ),
    "float labels": (
        lambda layer, x, y: functional.cross_entropy(layer(x), y.float()),
        "integers of 64 bits",
    ),
    "labels with a dimension more": (
        lambda layer, x, y: functional.cross_entropy(x, y[:, None]),
        "multi-target",
    ),
    "labels of other rows": (
        lambda layer, x, y: functional.cross_entropy(x, y.repeat(2)),
        "to match target batch_size",
    ),
    "one_hot of floats": (lambda layer, x, y: functional.one_hot(x), "integers of 64 bits"),
    "a view": (lambda layer, x, y: x.view(3, 3), "invalid for input of size 8"),
    "an index": (lambda layer, x, y: x[5], "out of bounds"),
    "einsum": (lambda layer, x, y: torch.einsum("ij,jk", x, x), "does not broadcast"),
    "a write": (lambda layer, x, y: x.__setitem__(0, torch.ones(7)), "must match the existing size"),
    "a gradient": (lambda layer, x, y: torch.autograd.grad(x.sum(), x), "does not require grad"),
    "another device": (lambda layer, x, y: x.cuda(), "leave `.cuda()`"),
    "a tensor on another device": (lambda layer, x, y: torch.ones(2, device="xpu") + 1, "leave `.cuda()`"),
    "an operation without shapes": (
        lambda layer, x, y: torch.ops.parity_tests.shapeless(x),
        "torch.library.register_fake",
    ),
    "memory": (lambda layer, x, y: x.untyped_storage()[0], "poptorch.CPU"),
    "an array": (lambda layer, x, y: np.ones(4) * x, "torch.from_numpy"),
}

if torch.__version__ >= "2.13":  # earlier, fake tensors accept such indices, and the call of the model fails
    REFUSED["float indices"] = (
        lambda layer, x, y: functional.embedding(x, layer.weight),
        "integers of 64 bits",
    )


class Refused(nn.Module):
    def __init__(self, expression):
        super().__init__()
        self.layer, self.expression = nn.Linear(4, 3), expression

    def forward(self, x, y):
        return self.expression(self.layer, x, y)


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_has_the_users_line_a_reason_and_a_fix(name):
    expression, words = REFUSED[name]
    with pytest.raises(poptorch.Error) as caught, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        poptorch.inferenceModel(Refused(expression))(X, LABELS)
    text = str(caught.value)
    line = re.escape(f"{__file__}:{expression.__code__.co_firstlineno}")
    assert re.match(rf"{line}\d?: ", text)  # an expression may begin at an earlier line
    assert "x: torch.float32 (2, 4), y: torch.int64 (2,)" in text
    assert words in text and "\n  why: " in text and "\n  fix: " in text


@pytest.mark.parametrize(
    "value", [X.numpy(), X.tolist(), None, "x", 3.0], ids=lambda value: type(value).__name__
)
def test_an_argument_that_is_no_tensor_is_named(value):
    with pytest.raises(poptorch.Error, match="must be Tensor, not") as caught:
        poptorch.inferenceModel(nn.Linear(4, 3))(value)
    fix = "pass this argument" if value is None else "torch.from_numpy"
    assert fix in str(caught.value)
    assert type(value).__name__.removesuffix("Type") in str(caught.value)


@pytest.mark.parametrize(
    "expression",
    [lambda layer, x, y: np.tanh(x), lambda layer, x, y: x.numpy(), lambda layer, x, y: x * np.ones(4)],
)
def test_numpy_in_the_forward_is_refused_at_the_users_line(expression):
    line = f"{__file__}:{expression.__code__.co_firstlineno}"
    with pytest.raises(poptorch.Error, match=f"^{re.escape(line)}: .* to numpy"):
        poptorch.inferenceModel(Refused(expression))(X, LABELS)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_arguments_with_different_numbers_of_rows_are_named(accumulation):
    model = Refused(lambda layer, x, y: functional.cross_entropy(layer(x), y))
    trainer = poptorch.trainingModel(model, options(accumulation=accumulation))
    with pytest.raises(poptorch.Error, match=r"different numbers of rows: \{'x': 8, 'y': 6}") as caught:
        trainer(torch.ones(8 * accumulation, 4), torch.zeros(6 * accumulation, dtype=torch.long))
    assert "fix: pass as many rows of each" in str(caught.value)


@pytest.mark.parametrize("kind", [RuntimeError, IndexError, ValueError])
def test_a_program_that_expects_torchs_error_catches_it(kind):
    expression = {RuntimeError: "view", IndexError: "index", ValueError: "labels of other rows"}[kind]
    expression, _ = REFUSED[next(name for name in REFUSED if name.endswith(expression))]
    with pytest.raises(kind):
        expression(nn.Linear(4, 3), X, LABELS)
    with pytest.raises(kind):
        poptorch.inferenceModel(Refused(expression))(X, LABELS)


def test_an_error_of_the_users_own_code_is_left_as_it_is():
    def refuse(layer, x, y):
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$") as caught:
        poptorch.inferenceModel(Refused(refuse))(X, LABELS)
    assert type(caught.value) is ValueError


def test_a_backward_that_torch_refuses_is_explained():
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient[:1]

    model = Refused(lambda layer, x, y: poptorch.identity_loss(Wrong.apply(layer(x)), "mean"))
    with pytest.raises(poptorch.Error, match="WrongBackward returned an invalid gradient") as caught:
        poptorch.trainingModel(model, options(accumulation=1))(X, LABELS)
    assert "fix:" in str(caught.value)


def on_meta():
    with torch.device("meta"):
        return nn.Linear(4, 3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (on_meta, r"weight, bias of the model are on the meta device[^$]*to_empty"),
        (lambda: nn.LazyLinear(3), r"weight, bias of the model have no shape yet[^$]*model\(\*micro_batch\)"),
        (lambda: torch.jit.script(nn.Linear(4, 3)), "a module of torch.jit"),
        (lambda: nn.Sequential(torch.jit.trace(nn.Linear(4, 3), X)), "a module of torch.jit"),
    ],
    ids=["meta", "lazy", "scripted", "traced"],
)
def test_a_model_that_can_not_be_captured_is_refused(make, words):
    with pytest.raises(poptorch.Error, match=words):
        poptorch.inferenceModel(make())(X)


def test_a_sparse_output_is_refused():
    with pytest.raises(poptorch.Error, match=r"an output of forward.*is a sparse tensor"):
        poptorch.inferenceModel(lambda x: x.to_sparse())(X)


def test_a_sparse_gradient_is_refused():
    model = Refused(lambda layer, x, y: poptorch.identity_loss(layer(y), "mean"))
    model.layer = nn.Embedding(4, 2, sparse=True)
    with pytest.raises(poptorch.Error, match=r"the gradient of layer\.weight is a sparse[^$]*sparse=False"):
        poptorch.trainingModel(model, options(accumulation=1))(X, LABELS)


def test_a_write_into_others_memory_is_refused_at_its_line():
    def forward(x):
        return x.set_(torch.ones(3))

    with pytest.raises(poptorch.Error, match="another memory or size") as caught:
        poptorch.inferenceModel(forward)(copy.deepcopy(X))
    assert f"{__file__}:{forward.__code__.co_firstlineno + 1}" in str(caught.value)


@pytest.mark.parametrize("derive", [torch.func.hessian, lambda f: torch.func.jacrev(torch.func.jacrev(f))])
def test_a_hessian_of_each_row_is_refused_in_training_with_a_fix_that_works(derive):
    torch.manual_seed(0)
    model = module(
        lambda self, x: torch.func.vmap(derive(lambda row: self.layer(row).tanh().sum()))(x).sum(),
        layer=nn.Linear(4, 3),
    )
    expected = model(X).detach()
    executor = poptorch.trainingModel(
        model, options(accumulation=1), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    if derive is torch.func.hessian:
        with pytest.raises(poptorch.Error, match=r"test_torch_errors\.py:\d+") as caught:
            executor(X)
        assert "torch.func.jacrev(torch.func.jacrev(f))" in str(caught.value)
    else:
        torch.testing.assert_close(executor(X).squeeze(), expected)
