"""What forward returns beside tensors is what plain PyTorch returns, in every call: names, numbers, structure."""

import collections
import copy
import dataclasses
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from executor_models import Applied, options, recordings

import poptorch

X = torch.tensor([[1.0, 2.0], [3.0, -1.0]])


class Pair(NamedTuple):
    y: Any
    name: Any


@dataclasses.dataclass
class Output:
    y: Any
    name: Any = None


class Named:
    """An object that is no container."""

    kind = "m0"

    def __init__(self, name):
        self.name = name


def as_plain(value):
    """The structure of a value: classes, keys in their order, and values; tensors as lists."""
    if isinstance(value, torch.Tensor):
        return "tensor", value.detach().tolist()
    if isinstance(value, dict):
        return type(value), [(key, as_plain(part)) for key, part in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [*map(as_plain, value)]
    if isinstance(value, np.ndarray):
        return "array", value.tolist()
    return type(value), as_plain(vars(value)) if hasattr(value, "__dict__") else value


# ---- values of the model, of globals, ... -------------------------------------------------------------------

NAMES = ("m0", "m0", "m1", "m2", "m1", "m0")
NUMBERS = (0, 0, 1, 2, 7, 1)
FLAGS = (True, True, False, True, False)
A, BC = ["a"], ["b", "c"]
ROWS = X[0], X[1]
GLOBAL = "m0"


def closure():
    name = "m0"

    def function(m, y):
        return y, name

    def change(m, value):
        nonlocal name
        name = value

    return function, change


def set_global(m, value):
    global GLOBAL
    GLOBAL = value


def set_class(m, value):
    Named.kind = value


CLOSURE, SET_CLOSURE = closure()

# name: function, attributes, values of the attribute "v" (or a function that sets a value)
FORMS = {
    "text": (lambda m, y: (y, m.v), {}, NAMES),
    "number": (lambda m, y: {"y": y, "epoch": m.v}, {}, NUMBERS),
    "float": (lambda m, y: [y, m.v * 0.5], {}, NUMBERS),
    "text of a number": (lambda m, y: {f"loss_ep{m.v}": y}, {}, NUMBERS),
    "flag": (lambda m, y: (y, m.v), {}, FLAGS),
    "1, 1.0 and True": (lambda m, y: (y, m.v), {}, (1, True, 1.0, 1, True)),
    "0.0 and -0.0": (lambda m, y: (y, m.v), {}, (0.0, -0.0, 0.0)),
    "None or a value": (lambda m, y: (y, m.v), {}, (None, "a", None)),
    "names": (lambda m, y: (y, m.v), {}, (A, BC, A)),
    "an item of names": (lambda m, y: (y, m.v[0]), {}, (A, BC, A)),
    "number of names": (lambda m, y: (y, len(m.v)), {}, (A, BC, ["d"], ["e", "f"])),
    "key": (lambda m, y: {m.v: y}, {}, NAMES),
    "order of keys": (lambda m, y: dict.fromkeys(m.v, y), {}, ("ab", "ba", "ab")),
    "list or tuple": (lambda m, y: m.v([y, y]), {}, (tuple, list, tuple)),
    "a layer more": (lambda m, y: (y, None) if m.v else {"y": y}, {}, FLAGS),
    "field of a dataclass": (lambda m, y: Output(y, m.v), {}, NAMES),
    "named tuple": (lambda m, y: Pair(y, m.v), {}, NAMES),
    "nested": (lambda m, y: {"a": [Pair(y, {"b": (m.v,)})]}, {}, NAMES),
    "object": (lambda m, y: (y, Named(m.v)), {}, NAMES),
    "array": (lambda m, y: (y, np.full(2, m.v)), {}, NUMBERS),
    "a plain tensor": (lambda m, y: (y, m.v), {}, (*ROWS, ROWS[0])),
    "closure": (CLOSURE, {}, (NAMES, SET_CLOSURE)),
    "global": (lambda m, y: (y, GLOBAL), {}, (NAMES, set_global)),
    "class": (lambda m, y: (y, Named.kind), {}, (NAMES, set_class)),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_value_in_what_forward_returns_is_the_present_one(name):
    function, attributes, values = FORMS[name]
    change = lambda m, value: setattr(m, "v", value)  # noqa: E731
    if callable(values[-1]) and isinstance(values[0], tuple):
        values, change = values
    model = Applied(function, **attributes)
    change(model, values[0])
    executor = poptorch.inferenceModel(model, options())
    with recordings() as found:
        for value in values:
            change(model, value)
            assert as_plain(executor(X)) == as_plain(model(X))
    assert len(found) <= len({(type(value), str(value)) for value in values})


# ---- arguments ------------------------------------------------------------------------------------------------

BATCHES = (["m0", "m1"], ["m2", "m3"], ["m4"], ["m5", "m6", "m7"], ["m2", "m3"])

# name: function, values of the argument
ARGUMENTS = {
    "names": (lambda m, y, v: {"y": y, "id": v}, BATCHES),
    "name of a row": (lambda m, y, v: [(y, v[0])], BATCHES),
    "list of names": (lambda m, y, v: (y, list(v)), BATCHES),
    "text of names": (lambda m, y, v: (y, ", ".join(v)), BATCHES),
    "capitals": (lambda m, y, v: {"y": y, "id": [name.upper() for name in v]}, BATCHES),
    "number of names": (lambda m, y, v: (y, len(v)), BATCHES),
    "name": (lambda m, y, v: (y, v), NAMES),
    "number": (lambda m, y, v: (y, v), NUMBERS),
    "number and a constant": (lambda m, y, v: (y, v, 0, 1), NUMBERS),
    "twice a number": (lambda m, y, v: (y, v * 2), NUMBERS),
    "flag": (lambda m, y, v: (y, v), FLAGS),
    "not a flag": (lambda m, y, v: (y, not v), FLAGS),
    "None or a value": (lambda m, y, v: (y, v), (None, "a", None, "b")),
    "structure": (lambda m, y, v: Output(y, 1) if v else (y, 1), FLAGS),
    "key": (lambda m, y, v: {v: y}, NAMES),
    "dictionary": (lambda m, y, v: (y, v), ({"a": 1}, {"a": 2}, {"b": 3}, {"a": 2})),
    "value of a dictionary": (lambda m, y, v: (y, v["a"]), ({"a": 1}, {"a": 2}, {"a": 3, "b": 4})),
    "tensors and names": (lambda m, y, v: {"y": y, **v}, tuple({"x": X * i, "id": f"m{i}"} for i in range(4))),
    "a batch": (lambda m, y, v: (y, v), tuple({"x": X * i, "id": [f"m{i}", i]} for i in range(4))),
    "object": (lambda m, y, v: (y, v), tuple(map(Named, NAMES))),
    "attribute of an object": (lambda m, y, v: (y, v.name), tuple(map(Named, NAMES))),
    "dataclass": (lambda m, y, v: (y, v), tuple(Output(1, name) for name in NAMES)),
    "array": (lambda m, y, v: (y, v), tuple(np.arange(n + 1) for n in NUMBERS)),
}  # fmt: skip


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_in_what_forward_returns_is_the_present_one(name, training):
    function, values = ARGUMENTS[name]
    model = Applied(function)
    if training:
        model.function = lambda m, y, *args: (
            poptorch.identity_loss(y.mean(), "none"),
            function(m, y * 0, *args),
        )
    twin = copy.deepcopy(model)
    wrap = poptorch.trainingModel if training else poptorch.inferenceModel
    executor = wrap(model, options())
    with recordings() as found:
        for value in values:
            expected, result = twin(X, value), executor(X, value)
            assert as_plain(result[1] if training else result) == as_plain(
                expected[1] if training else expected
            )
    assert len(found) <= len(values)
    executor.destroy()


def test_an_argument_that_forward_hands_through_is_the_object_of_the_call():
    executor = poptorch.inferenceModel(Applied(lambda m, y, ids, n: (y, {"id": ids, "n": n})), options())
    with recordings() as found:
        for n in range(7):  # the eighth call records forward again, to compare
            ids = [f"m{n}"]
            assert executor(X, ids, n)[1]["id"] is ids
    assert len(found) == 2


def test_a_keyword_that_changes_the_structure_and_a_plan_for_each_shape():
    def function(m, y, names=("a",), return_dict=True):
        return collections.OrderedDict(y=y, names=names) if return_dict else (y, names)

    model = Applied(function)
    executor = poptorch.inferenceModel(model, options().allowNewShapes())
    for rows in (2, 1, 2):
        for named in ({}, {"return_dict": False}, {"names": ("b",)}, {"names": ("c",), "return_dict": False}):
            assert as_plain(executor(X[:rows], **named)) == as_plain(model(X[:rows], **named))


def test_what_forward_sets_on_layers_is_set_in_every_call():
    def function(m, y, ids, n):
        m.layer.ids, m.layer.first, m.layer.ready = ids, ids[0].upper(), True
        return y

    model = Applied(function)
    executor = poptorch.inferenceModel(model, options())
    for n, ids in enumerate(BATCHES * 2):
        model.layer.ready = False
        executor(X, ids, n)
        assert model.layer.ids is ids
        assert (model.layer.first, model.layer.ready) == (ids[0].upper(), True)


def test_a_flag_and_hooks_that_forward_sets_once_are_no_state_beside_an_object_that_holds_tensors():
    def function(m, y):
        if not hasattr(m.layer, "is_installed"):
            m.layer.register_forward_hook(lambda layer, args, output: output)
            m.layer.is_installed = True
        return {"y": m.layer(y), "cache": Named([y, (y.sum(), 1)])}

    model = Applied(function)
    twin, executor = copy.deepcopy(model), poptorch.inferenceModel(model, options())
    for _ in range(2):
        assert torch.equal(executor(X)["y"], twin(X)["y"].detach())
    assert model.layer.is_installed and len(model.layer._forward_hooks) == 1


def test_notes_have_the_present_keys_and_values():
    def function(m, y, name):
        poptorch.notes.note(f"mean of {name}", {"value": y.mean(), "name": name, "epoch": m.epoch})
        if m.epoch:
            poptorch.notes.note("late", name)
        return y

    model = Applied(function, epoch=0)
    executor = poptorch.inferenceModel(model, options(iterations=2))
    x = torch.cat([X, X + 1])
    for epoch in range(3):
        for model.epoch in (epoch, epoch):
            for name in NAMES:
                y = executor(x, name)
                mean = torch.stack([rows.mean() for rows in y.split(2)]).tolist()
                late = [("late", name)] * (epoch > 0)
                expected = [(f"mean of {name}", {"value": mean, "name": name, "epoch": epoch}), *late]
                assert as_plain(executor.notes) == as_plain(
                    [
                        (key, {**v, "value": torch.tensor(v["value"])} if isinstance(v, dict) else v)
                        for key, v in expected
                    ]
                )


# What forward returns is filled with each call's values, or refused: no tensor without a value reaches the caller.


VALUES = torch.arange(8.0).reshape(4, 2)


class Slots:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


def doubles(wrap):
    """A forward that returns twice its input, wrapped."""
    return lambda x: wrap(x * 2)


def test_a_dataclass_is_an_argument_like_other_containers():
    # Its tensors were constants: a field that was changed between two calls went on with its old value.
    executor = poptorch.inferenceModel(lambda pair: pair.y * pair.name)
    pair = Output(VALUES, 3)
    assert torch.equal(executor(pair), VALUES * 3)
    pair.y = VALUES + 1
    assert torch.equal(executor(pair), (VALUES + 1) * 3)
    pair.name = 4
    with pytest.raises(poptorch.Error, match=r"Value mismatch for pair\.name: expected 3 but got 4"):
        executor(pair)


@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda y: {y}, r"output\[\.\.\.\]"),
        (lambda y: deque([y]), r"output\[0\]"),
        (lambda y: (y * i for i in range(2)), r"output\[\.\.\.\]"),
        (lambda y: map(torch.exp, [y]), r"output(\[\.\.\.\])+"),
        (lambda y: Named(y), r"output\.name"),
        (lambda y: Slots(y), r"output\[\.\.\.\]"),
        (lambda y: (y, Named([y])), r"output\[1\]\.name\[0\]"),
        (lambda y: [lambda: y], "y"),
        (lambda y: Output(y, {y}), r"output\.name\[\.\.\.\]"),
        (lambda y: torch.distributions.Normal(y, 1.0), r"output\.loc"),
    ],
    ids=["set", "deque", "generator", "map", "object", "slots", "tuple", "function", "field", "distribution"],
)
def test_a_tensor_in_what_is_no_container_is_refused_with_the_line_of_forward(wrap, path):
    with pytest.raises(poptorch.Error, match="can't be filled with a call's values") as caught:
        poptorch.inferenceModel(doubles(wrap))(VALUES)
    assert caught.match(f"holds tensors: .*{path}")
    assert f"{__file__}:{doubles(wrap).__code__.co_firstlineno}" in str(caught.value)


def test_an_object_in_a_named_field_has_no_values_which_is_said_and_reading_them_fails(caplog):
    executor = poptorch.inferenceModel(doubles(lambda y: {"y": y, "cache": Named([y])}))
    found = executor(VALUES)
    assert torch.equal(found["y"], VALUES * 2)
    assert [line for line in caplog.messages if 'output["cache"].name[0]' in line and "fix:" in line]
    with pytest.raises(RuntimeError):
        found["cache"].name[0].sum().item()


def test_an_object_without_tensors_comes_back_as_it_is():
    holder = Named(3)
    found = poptorch.inferenceModel(doubles(lambda y: (y, holder, range(2))))(VALUES)
    assert found[1] is holder and found[2] == range(2)
