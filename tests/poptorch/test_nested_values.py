"""Nested values are walked in one order, rebuilt in their own classes and described without their tensors."""

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass

import pytest
import torch

from popengine.errors import Error
from poptorch.nested_values import (
    ICustomArgParser,
    registerCustomArgParser,
    spec_of,
    tensors_of,
    with_tensors,
)

Point = namedtuple("Point", "x y")


class Row(list):
    pass


class Needy(dict):
    def __init__(self, a, b):
        super().__init__(a=a, b=b)

    def __copy__(self):
        raise TypeError("no copies of me")


class Box:
    """No container, unless it is registered."""

    def __init__(self, left, right):
        self.left, self.right = left, right

    def __eq__(self, other):
        return vars(self) == vars(other)


@dataclass(frozen=True)
class Pair:
    first: torch.Tensor
    second: object


@dataclass(slots=True)
class Slots:
    first: torch.Tensor


class BoxParser(ICustomArgParser):
    def yieldTensors(self, struct):
        yield struct.left
        yield struct.right

    def reconstruct(self, original_structure, tensor_iterator):
        return Box(next(tensor_iterator), next(tensor_iterator))


@pytest.fixture
def box_is_registered():
    registerCustomArgParser(Box, BoxParser())
    yield
    registerCustomArgParser(Box, None)


def paths_of(value, name):
    return [path for path, part in spec_of(value, name) if part.type is torch.Tensor]


def t(value: float) -> torch.Tensor:
    return torch.tensor(value)


def plus_one(value):
    return with_tensors(value, iter([tensor + 1 for tensor in tensors_of(value)]))


def test_tensors_are_found_at_any_depth_in_one_order():
    value = (t(1), [t(2), {"z": t(4), "a": (t(3), None)}], "word", 5)
    assert tensors_of(value) == [1, 2, 3, 4]
    assert paths_of(value, "b") == ["b[0]", "b[1][0]", 'b[1][1]["a"][0]', 'b[1][1]["z"]']


def test_a_tensor_alone_has_the_path_of_its_name():
    assert paths_of(t(1), "x") == ["x"] and plus_one(t(1)) == 2


def test_the_fields_of_a_dataclass_have_paths_and_differ_by_what_they_hold():
    pair = Pair(t(1), {"a": t(2)})
    assert paths_of(pair, "b") == ["b.first", 'b.second["a"]']
    assert spec_of(Pair(t(1), 2)) == spec_of(Pair(t(2), 2)) != spec_of(Pair(t(1), 3))


def test_the_order_of_keys_is_irrelevant_and_kept():
    assert tensors_of({"a": t(1), "b": t(2)}) == tensors_of({"b": t(2), "a": t(1)})
    assert spec_of({"a": t(1), "b": t(2)}) == spec_of({"b": t(2), "a": t(1)})
    assert list(plus_one({"b": t(2), "a": t(1)}).items()) == [("b", 3), ("a", 2)]


def test_keys_that_can_not_be_sorted_keep_their_order():
    assert tensors_of({"a": t(1), 0: t(2)}) == [1, 2]


@pytest.mark.parametrize(
    "value",
    [
        (t(1), 2),
        [t(1), None],
        Row([t(1)]),
        Point(t(1), "y"),
        torch.max(torch.tensor([[1.0, 3.0]]), 1),
        {"k": t(1), 3: t(2)},
        OrderedDict(b=t(1), a=t(2)),
        Needy(t(1), 2),
        Pair(t(1), [t(2), "word"]),
        Slots(t(1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_containers_are_rebuilt_in_their_own_class(value):
    rebuilt = plus_one(value)
    assert type(rebuilt) is type(value)
    assert spec_of(rebuilt) == spec_of(value)
    assert tensors_of(rebuilt) == [tensor + 1 for tensor in tensors_of(value)]


def test_what_a_subclass_added_is_kept():
    value = defaultdict(list, k=t(1))
    assert plus_one(value)["missing"] == [] and value.keys() == {"k"}


def test_a_model_output_of_transformers_is_rebuilt_with_its_attributes():
    output = pytest.importorskip("transformers.modeling_outputs").BaseModelOutput
    test_containers_are_rebuilt_in_their_own_class(output(last_hidden_state=t(1), hidden_states=(t(2), t(3))))
    assert plus_one(output(last_hidden_state=t(1))).last_hidden_state == 2


def test_what_holds_no_tensor_is_left_alone():
    inner, box = [1, 2], Box(t(1), t(2))
    rebuilt = plus_one((inner, box, t(1)))
    assert rebuilt[0] is inner and rebuilt[1] is box


def test_a_registered_type_holds_tensors(box_is_registered):
    value = {"b": [Box(t(1), t(2))]}
    assert paths_of(value, "x") == ['x["b"][0][0]', 'x["b"][0][1]']
    assert plus_one(value)["b"][0] == Box(t(2), t(3))
    assert spec_of(value) == spec_of({"b": [Box(t(5), t(6))]})


def test_registration_wants_a_parser_and_none_takes_it_back(box_is_registered):
    with pytest.raises(Error, match="arg_parser must inherit from ICustomArgParser"):
        registerCustomArgParser(Box, object())  # type: ignore[arg-type]
    registerCustomArgParser(Box, None)
    assert tensors_of(Box(t(1), t(2))) == []


def test_a_parser_without_both_methods_can_not_be_made():
    class Half(ICustomArgParser):
        def yieldTensors(self, struct):
            yield struct

    with pytest.raises(TypeError):
        Half()  # type: ignore[abstract]
