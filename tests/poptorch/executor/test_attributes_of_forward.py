"""Attributes of the model that forward sets are the user's model's own: the program can set, reset and delete them."""

import copy
import functools

import pytest
import torch
from executor_models import Applied, options

import poptorch

X = torch.tensor([[1.0, 2.0], [3.0, -1.0]])


class Model(Applied):
    """Has a number `v`, a property and a cached property."""

    def __init__(self, function):
        super().__init__(function, v=2.0, _hidden=2.0, cache=None)
        self.layer.v = 2.0

    @property
    def hidden(self):
        return self._hidden

    @hidden.setter
    def hidden(self, value):
        self._hidden = value

    @functools.cached_property
    def doubled(self):
        return self.v * 2


def as_float(m, y):
    m.v = float(m.v)
    return y * m.v


def as_flag(m, y):
    m.flag = m.v > 3
    return y if m.flag else -y


def in_the_dictionary(m, y):
    m.__dict__["v"] = float(m.v)
    return y * m.v


def by_a_property(m, y):
    m.hidden = float(m.hidden)
    return y * m.hidden


def of_a_layer(m, y):
    m.layer.v = float(m.layer.v)
    return y * m.layer.v


def cached(m, y):
    if m.cache is None:
        m.cache = m.v * 2
    return y * m.cache


def cached_if_absent(m, y):
    if not hasattr(m, "kept"):
        m.kept = m.v * 2
    return y * m.kept


def cached_tensor(m, y):
    if m.cache is None:
        m.cache = torch.arange(2) * m.v
    return y * m.cache


def set_and_deleted(m, y):
    m.temporary = m.v
    y = y * m.temporary
    del m.temporary
    return y


def as_a_list(m, y):
    m.values = [m.v, 1.0]
    return y * m.values[0]


def set_v(m, value):
    m.v = value


def set_hidden(m, value):
    m.hidden = value


def set_of_layer(m, value):
    m.layer.v = value


def reset_cache(m, value):
    m.v, m.cache = value, None


def delete_cache(m, value):
    m.v = value
    vars(m).pop("kept", None)
    vars(m).pop("doubled", None)


# name: function, how the program sets the value
FORMS = {
    "float": (as_float, set_v),
    "flag": (as_flag, set_v),
    "__dict__": (in_the_dictionary, set_v),
    "property": (by_a_property, set_hidden),
    "layer": (of_a_layer, set_of_layer),
    "cache": (cached, reset_cache),
    "cache that is kept": (cached, set_v),
    "absent cache": (cached_if_absent, delete_cache),
    "cached_property": (lambda m, y: y * m.doubled, delete_cache),
    "cached_property that is kept": (lambda m, y: y * m.doubled, set_v),
    "cache of a tensor": (cached_tensor, reset_cache),
    "deleted": (set_and_deleted, set_v),
    "list": (as_a_list, set_v),
}
VALUES = (2.0, 2.0, 5.0, 3.0, 4.0, 2.0)


def plain_attributes(model):
    own = {name: value for name, value in vars(model).items() if not name.startswith("_")}
    return {name: value for name, value in own.items() if not callable(value) and not torch.is_tensor(value)}


@pytest.mark.parametrize("name", FORMS)
def test_what_forward_sets_and_the_program_sets_is_as_in_plain_pytorch(name):
    function, change = FORMS[name]
    model = Model(function)
    twin, executor = copy.deepcopy(model), poptorch.inferenceModel(model, options())
    for number, value in enumerate(VALUES):
        change(model, value)
        change(twin, value)
        assert torch.equal(executor(X), twin(X).detach())
        assert plain_attributes(model) == plain_attributes(twin)
        if number == 3:
            executor.destroy()


@pytest.mark.parametrize("name", FORMS)
def test_a_training_with_values_that_forward_and_the_program_set_has_the_weights_of_plain_pytorch(name):
    function, change = FORMS[name]

    def loss(m, y):
        return poptorch.identity_loss(function(m, y).square().mean(), "none")

    model = Model(loss)
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, twin)]
    executor = poptorch.trainingModel(model, options(), optimizers[0])
    for value in VALUES[1:]:
        change(model, value)
        change(twin, value)
        executor(X)
        optimizers[1].zero_grad()
        twin(X).backward()
        optimizers[1].step()
    assert torch.equal(model.layer.weight, twin.layer.weight)
    assert plain_attributes(model).keys() - {"copyWeightsToHostIfNeeded"} == plain_attributes(twin).keys()
