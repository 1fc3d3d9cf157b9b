"""A value that forward reads counts when it changes, of each kind and in each place, replaced and changed in place."""

import argparse
import collections
import dataclasses
import functools
import types

import numpy as np
import pytest
import torch
from executor_models import options, recordings
from torch import nn

import poptorch

X = torch.tensor([[1.0, 2.0], [3.0, -1.0]])


class Object:
    def __init__(self, n):
        self.n = n


class Hiding(Object):
    """Its pickles are empty."""

    def __getstate__(self):
        return {}


class Slotted:
    __slots__ = ("n",)

    def __init__(self, n):
        self.n = n


class OwnList(list):
    def __init__(self, n):
        self.n = n


@dataclasses.dataclass
class Data:
    n: float


@dataclasses.dataclass(frozen=True)
class Frozen:
    n: float


class Loss(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.n = n

    def forward(self, y):
        return y * self.n


Pair = collections.namedtuple("Pair", "n m")


def with_default(n):
    def function(n=n):
        return n

    return function


def around(n):
    def function():
        return n

    return function


def set_default(function, n):
    function.__defaults__ = (n,)


def set_cell(function, n):
    function.__closure__[0].cell_contents = n


def set_attribute(value, n):
    value.n = n


def set_first(value, n):
    value[0] = n


# By kind: a value of a number, the number of a value, and a change in place.
KINDS = {
    "number": (float, lambda v: v, None),
    "text": (str, float, None),
    "list": (lambda n: [n], lambda v: v[0], set_first),
    "tuple": (lambda n: (1, (n,)), lambda v: v[1][0], None),
    "named tuple": (lambda n: Pair(n, [1]), lambda v: v.n, None),
    "dictionary": (lambda n: {"n": n, "m": 1}, lambda v: v["n"], lambda v, n: v.update(n=n)),
    "all of a dictionary": (lambda n: {"n": n}, lambda v: sum(v.values()), lambda v, n: v.update(n=n)),
    "set": (lambda n: {n}, lambda v: next(iter(v)), lambda v, n: (v.clear(), v.add(n))),
    "deque": (lambda n: collections.deque([n]), lambda v: v[-1], set_first),
    "OrderedDict": (lambda n: collections.OrderedDict(n=n), lambda v: v["n"], lambda v, n: v.update(n=n)),
    "defaultdict": (lambda n: collections.defaultdict(float, n=n), lambda v: v["n"], lambda v, n: v.update(n=n)),
    "frozenset": (lambda n: frozenset({n}), sum, None),
    "bytearray": (lambda n: bytearray([int(n)]), lambda v: v[0], lambda v, n: set_first(v, int(n))),
    "long list": (lambda n: [n] * 2000, lambda v: v[1500], lambda v, n: v.__setitem__(1500, n)),
    "long dictionary": (lambda n: dict.fromkeys(range(2000), n), lambda v: v[1999], lambda v, n: v.update({1999: n})),
    "argparse": (lambda n: argparse.Namespace(n=n), lambda v: v.n, set_attribute),
    "loss module": (Loss, lambda v: v(1.0), set_attribute),
    "layer without weights": (lambda n: nn.LeakyReLU(n / 10), lambda v: v(torch.tensor(-10.0)), None),
    "lambda": (lambda n: lambda: 2.0 if n == 2 else n, lambda v: v(), None),
    "number of numpy": (np.float32, float, None),
    "object": (Object, lambda v: v.n, set_attribute),
    "empty pickle": (Hiding, lambda v: v.n, set_attribute),
    "slots": (Slotted, lambda v: v.n, set_attribute),
    "subclass of list": (OwnList, lambda v: v.n, set_attribute),
    "dataclass": (Data, lambda v: v.n, set_attribute),
    "frozen dataclass": (Frozen, lambda v: v.n, None),
    "namespace": (lambda n: types.SimpleNamespace(n=n), lambda v: v.n, set_attribute),
    "array": (lambda n: np.array([n]), lambda v: float(v[0]), set_first),
    "tensor": (lambda n: torch.tensor([n]), lambda v: v.item(), lambda v, n: v.fill_(n)),
    "default value": (with_default, lambda v: v(), set_default),
    "outer variable": (around, lambda v: v(), set_cell),
    "partial": (lambda n: functools.partial(float, n), lambda v: v(), None),
    "nested": (lambda n: {"a": [Object([n])]}, lambda v: v["a"][0].n[0], lambda v, n: set_first(v["a"][0].n, n)),
}  # fmt: skip

module = types.ModuleType("module_of_values")
VALUE = None


class Holder:
    """An object and a class that have a value."""

    value = own = None


def set_global(model, v):
    global VALUE
    VALUE = v


# By place: sets the value, and returns it.
PLACES = {
    "attribute": (lambda m, v: setattr(m, "v", v), lambda m: m.v),
    "private attribute of a layer": (lambda m, v: setattr(m.part, "_v", v), lambda m: m.part._v),
    "attribute of an object": (lambda m, v: setattr(m.holder, "own", v), lambda m: m.holder.own),
    "class": (lambda m, v: setattr(type(m), "v", v), lambda m: m.v),
    "class of an object": (lambda m, v: setattr(Holder, "value", v), lambda m: m.holder.value),
    "global": (set_global, lambda m: VALUE),
    "module": (lambda m, v: setattr(module, "v", v), lambda m: module.v),
    "dictionary": (lambda m, v: m.table.update(v=v), lambda m: m.table["v"]),
    "list": (lambda m, v: m.items.__setitem__(slice(None), [v]), lambda m: m.items[0]),
    "default value": (lambda m, v: setattr(m.function, "__defaults__", (v,)), lambda m: m.function()),
    "attribute of a function": (lambda m, v: setattr(m.function, "v", v), lambda m: m.function.v),
}


def new_model(place, kind):
    """Return a model that multiplies by the number of a value in a place."""
    get, number_of = PLACES[place][1], KINDS[kind][1]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.part, self.holder, self.table, self.items = nn.Identity(), Holder(), {}, [None]
            self.function = lambda v=None: v

        def forward(self, x):
            return x * number_of(get(self))

    return Model()


PAIRS = [
    (place, kind)
    for place in PLACES
    for kind in KINDS
    if not (
        "class" in place and kind in ("default value", "outer variable", "lambda")
    )  # these would be methods
]


@pytest.mark.parametrize(("place", "kind"), PAIRS)
def test_a_value_counts_when_it_is_replaced_and_when_it_is_changed(place, kind):
    make, _, change = KINDS[kind]
    model = new_model(place, kind)
    PLACES[place][0](model, make(2.0))
    executor = poptorch.inferenceModel(model, options())

    def check(count):
        for _ in range(2):
            assert torch.equal(executor(X), model(X))
        assert len(recorded) == count

    with recordings() as recorded:
        check(1)
        PLACES[place][0](model, make(2.0))  # equal
        check(1)
        PLACES[place][0](model, make(3.0))
        check(2)
        PLACES[place][0](model, make(2.0))
        check(2)
        if change is not None:
            change(PLACES[place][1](model), 5.0)
            check(3)
