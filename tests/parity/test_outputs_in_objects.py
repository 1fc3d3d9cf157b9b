"""What forward returns is filled with each call's values, or refused: no tensor without a value reaches the caller."""

from collections import deque
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import poptorch

X = torch.arange(8.0).reshape(4, 2)


@dataclass
class Pair:
    one: torch.Tensor
    more: object


class Holder:
    """No container: an object with a tensor."""

    def __init__(self, value):
        self.value = value


class Slots:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Doubles(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(x * 2)


def test_a_dataclass_is_returned_with_each_calls_values():
    executor = poptorch.inferenceModel(Doubles(lambda y: Pair(y, [{"z": Pair(y + 1, "word")}])))
    for x in (X, X + 1):
        found = executor(x)
        assert type(found) is Pair
        assert torch.equal(found.one, x * 2)
        assert torch.equal(found.more[0]["z"].one, x * 2 + 1)
        assert found.more[0]["z"].more == "word"


def test_a_dataclass_is_an_argument_like_other_containers():
    # Its tensors were constants: a field that was changed between two calls went on with its old value.
    executor = poptorch.inferenceModel(lambda pair: pair.one * pair.more)
    pair = Pair(X, 3)
    assert torch.equal(executor(pair), X * 3)
    pair.one = X + 1
    assert torch.equal(executor(pair), (X + 1) * 3)
    pair.more = 4
    with pytest.raises(poptorch.Error, match=r"Value mismatch for pair\.more: expected 3 but got 4"):
        executor(pair)


@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda y: {y}, r"output\[\.\.\.\]"),
        (lambda y: deque([y]), r"output\[0\]"),
        (lambda y: (y * i for i in range(2)), r"output\[\.\.\.\]"),
        (lambda y: map(torch.exp, [y]), r"output(\[\.\.\.\])+"),
        (lambda y: Holder(y), r"output\.value"),
        (lambda y: Slots(y), r"output\[\.\.\.\]"),
        (lambda y: (y, Holder([y])), r"output\[1\]\.value\[0\]"),
        (lambda y: [lambda: y], "y"),
        (lambda y: Pair(y, {y}), r"output\.more\[\.\.\.\]"),
        (lambda y: torch.distributions.Normal(y, 1.0), r"output\.loc"),
    ],
    ids=["set", "deque", "generator", "map", "object", "slots", "tuple", "function", "field", "distribution"],
)
def test_a_tensor_in_what_is_no_container_is_refused_with_the_line_of_forward(wrap, path):
    with pytest.raises(poptorch.Error, match="can't be filled with a call's values") as caught:
        poptorch.inferenceModel(Doubles(wrap))(X)
    assert caught.match(f"holds tensors: .*{path}")
    assert f"{__file__}:{Doubles.forward.__code__.co_firstlineno}" in str(caught.value)


def test_an_object_in_a_named_field_has_no_values_which_is_said_and_reading_them_fails(caplog):
    executor = poptorch.inferenceModel(Doubles(lambda y: {"y": y, "cache": Holder([y])}))
    found = executor(X)
    assert torch.equal(found["y"], X * 2)
    assert [line for line in caplog.messages if 'output["cache"].value[0]' in line and "fix:" in line]
    with pytest.raises(RuntimeError):
        found["cache"].value[0].sum().item()


def test_an_object_without_tensors_comes_back_as_it_is():
    holder = Holder(3)
    found = poptorch.inferenceModel(Doubles(lambda y: (y, holder, range(2))))(X)
    assert found[1] is holder and found[2] == range(2)
