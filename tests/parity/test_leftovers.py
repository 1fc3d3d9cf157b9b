"""Tensors that forward keeps outside of itself have no value; what can't be wrong is put back, the rest is an error."""

import functools
import weakref
from typing import ClassVar

import pytest
import torch
from torch import nn

import poptorch
from popengine.compile.recording.current_capture import current
from popengine.compile.recording.leftovers import fake_tensors_in

history: list[torch.Tensor] = []


class Metric:
    def __init__(self):
        self.total = torch.zeros(())

    def update(self, value):
        self.total = self.total + value.sum()


class Keeps(nn.Module):
    def __init__(self, keep, **attributes):
        super().__init__()
        self.layer, self.keep = nn.Linear(2, 2), keep
        vars(self).update(attributes)

    def forward(self, x):
        y = self.layer(x)
        self.keep(self, y)
        return y * 2


def to_attribute(self, y):
    self.seen = y


@pytest.mark.parametrize(
    ("keep", "attributes", "path"),
    [
        (lambda m, y: m.seen.append(y.detach()), {"seen": []}, r"model.seen\[0\]"),
        (lambda m, y: m.seen.update(y=[y]), {"seen": {}}, r"model.seen\['y'\]\[0\]"),
        (lambda m, y: history.append(y), {}, r"history\[0\]"),
    ],
)
def test_a_tensor_that_is_left_behind_is_an_error_that_names_the_place(keep, attributes, path):
    model = Keeps(keep, **attributes)
    with pytest.raises(poptorch.Error, match=f"the forward leaves tensors behind in {path}\n"):
        poptorch.inferenceModel(model)(torch.ones(1, 2))
    history.clear()


@pytest.mark.parametrize(
    ("keep", "path"),
    [
        (lambda m, y: setattr(m.layer, "seen", m.layer.seen + y), r"layer\.seen"),
        (lambda m, y: m.metric.update(y), r"metric\.total"),
    ],
)
def test_a_state_that_is_read_and_replaced_is_an_error(keep, path):
    model = Keeps(keep, metric=Metric())
    model.layer.seen = torch.zeros(1, 2)
    with pytest.raises(poptorch.Error, match=f"changes {path}, which forward also reads") as caught:
        poptorch.inferenceModel(model)(torch.ones(1, 2))
    assert "a metric after the call" in str(caught.value)


@functools.lru_cache
def mask(size):
    return torch.arange(size) + 1.0


class Neuron(nn.Module):
    """A neuron whose state a function resets in all networks of the process, as in snntorch."""

    every: ClassVar = []
    latest = None

    def __init__(self, use):
        super().__init__()
        self.use = use
        self.register_buffer("state", torch.ones(2))
        Neuron.every.append(self)

    def forward(self, x):
        return self.use(self, x)


def cached(neuron, x):
    return x * mask(2)


def reset_all(neuron, x):
    for each in Neuron.every:
        each.state = torch.zeros_like(each.state)
    neuron.state = neuron.state + x.sum(0)
    return neuron.state * 1


def to_class(neuron, x):
    Neuron.latest = x * 2
    return x * 3


def to_name(neuron, x):
    global latest
    latest = x * 2
    return x * 3


latest = None


@pytest.mark.parametrize("use", [cached, reset_all, to_class, to_name])
def test_nothing_of_a_recording_is_left_in_caches_classes_globals_and_other_networks(use):
    Neuron.every.clear()
    neuron, other, x = Neuron(use), Neuron(use), torch.ones(2, 2)
    result = poptorch.inferenceModel(neuron)(x)
    assert type(other.state) is torch.Tensor and Neuron.latest is None and latest is None
    for model in (neuron, other):
        assert torch.equal(model(x), result)
        assert torch.equal(poptorch.inferenceModel(model)(x), result)
        Neuron.latest = globals()["latest"] = None


def test_state_in_a_class_and_in_another_network_is_an_error():
    def to_class(neuron, x):
        Neuron.latest = x if Neuron.latest is None else Neuron.latest + x
        return Neuron.latest * 1

    def to_other(neuron, x):
        other.state = other.state + x.sum(0)
        return other.state * 1

    other = Neuron(None)
    for use in (to_class, to_other):
        with pytest.raises(poptorch.Error, match=r"changes .*, which forward also reads"):
            poptorch.inferenceModel(Neuron(use))(torch.ones(2, 2))
        assert Neuron.latest is None and type(other.state) is torch.Tensor


def test_a_table_by_models_knows_the_model_of_an_executor():
    class Scaled(nn.Module):
        def forward(self, x):
            return x * table[self]

    model, x = Scaled(), torch.ones(2, 2)
    table = weakref.WeakKeyDictionary({model: 3.0})
    executor = poptorch.inferenceModel(model)
    assert torch.equal(executor(x), x * 3)
    assert torch.equal(executor.model(x), x * 3)


def test_a_variable_around_forward_is_looked_at():
    losses = []

    def forward(x):
        losses.append(x.sum())
        return x

    with pytest.raises(poptorch.Error, match=r"losses\[0\]"):
        poptorch.inferenceModel(forward)(torch.ones(1, 2))


def test_an_attribute_that_forward_makes_is_gone_afterwards():
    model = Keeps(to_attribute)
    x = torch.ones(1, 2)
    assert torch.equal(poptorch.inferenceModel(model)(x), model(x).detach())
    del model.seen
    trained = poptorch.trainingModel(nn.Sequential(model, nn.Identity()), optimizer=None)
    with pytest.raises(poptorch.Error, match="Couldn't find a loss"):
        trained(x)
    assert "seen" not in vars(model)


@pytest.mark.parametrize("before", [None, [], {"y": 1}, torch.zeros(1, 2)])
def test_an_attribute_that_forward_replaces_is_put_back_with_a_warning(before, caplog):
    model = Keeps(to_attribute, seen=before)
    x = torch.ones(1, 2)
    assert torch.equal(poptorch.inferenceModel(model)(x), model(x).detach())
    model.seen = before
    with caplog.at_level("WARNING", "poptorch::python"):
        poptorch.inferenceModel(model)(x)
    assert model.seen is before
    assert [r for r in caplog.messages if "the forward sets Keeps.seen to a tensor" in r] != []


def test_a_layer_that_forward_makes_is_a_warning_with_its_line(caplog):
    forward = lambda x: nn.Linear(2, 2)(x)  # noqa: E731
    with caplog.at_level("WARNING", "poptorch::python"):
        poptorch.inferenceModel(forward)(torch.ones(1, 2))
    assert f"sets {__file__}:{forward.__code__.co_firstlineno}: Linear.weight" in caplog.text


def test_a_plain_tensor_that_forward_only_writes_is_lost_with_a_warning(caplog):
    def forward(x):
        total.copy_(x.sum(0))
        return x * 2

    total = torch.zeros(2)
    with caplog.at_level("WARNING", "poptorch::python"):
        poptorch.inferenceModel(forward)(torch.ones(1, 2))
    assert total.tolist() == [0, 0]
    (message,) = [text for text in caplog.messages if "is changed in place by the forward" in text]
    assert "test_leftovers.py" in message
    assert "register_buffer" in message


class Makes(nn.Module):
    """Makes its weights when it first runs, as some programs do to learn the size of their input."""

    def __init__(self, make):
        super().__init__()
        self.first = nn.Module()
        self.first.weight = nn.Parameter(torch.ones(2))
        self.make = make

    def forward(self, x):
        if not hasattr(self.first, "made"):
            self.make(self.first)
        return x * self.first.weight


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda m: setattr(m, "made", nn.Linear(2, 2)), "Layer first.made"),
        (lambda m: setattr(m, "made", nn.Parameter(torch.ones(2))), "Parameter first.made"),
        (lambda m: setattr(m, "made", nn.Sequential(nn.ReLU(), nn.Linear(2, 2))), "Layer first.made"),
    ],
)
def test_weights_that_forward_makes_are_an_error_and_gone_afterwards(make, name):
    model, x = Makes(make), torch.ones(1, 2)
    with pytest.raises(poptorch.Error, match=f"{name} is made by the forward"):
        poptorch.inferenceModel(model)(x)
    assert [name for name, _ in model.named_parameters()] == ["first.weight"]
    model(x)  # in plain PyTorch
    assert torch.equal(poptorch.inferenceModel(model)(x), x)


@pytest.mark.parametrize(
    "make", [lambda m: m.register_buffer("made", torch.arange(2)), lambda m: setattr(m, "made", nn.ReLU())]
)
def test_a_cache_and_a_layer_without_weights_may_be_made_by_forward(make):
    assert torch.equal(poptorch.inferenceModel(Makes(make))(torch.ones(1, 2)), torch.ones(1, 2))


def test_another_caller_may_take_them_out():
    found = []

    class Taking(Keeps):
        def forward(self, x):
            y = super().forward(x)
            if current() is not None:
                for leftover in fake_tensors_in(self):
                    found.append(leftover.path)
                    leftover.put(None)
            return y

    model = Taking(lambda m, y: m.seen.append(y.detach()), seen=[])
    poptorch.inferenceModel(model)(torch.ones(1, 2))
    assert found == ["model.seen[0]"]
    assert model.seen == [None]


def test_the_search_enters_no_executor_and_no_loader_of_a_file():
    executor = poptorch.inferenceModel(nn.Linear(2, 2))
    executor(torch.ones(1, 2))
    holder, seen = {"executor": executor, "__loader__": [history]}, set()
    assert fake_tensors_in(holder, seen=seen) == []
    assert seen == {id(holder)}
