"""What forward reads and can't be followed is an error at calls 8, 64, 512, ... of a plan, which records it again."""

import argparse
import configparser
import multiprocessing
import os
import random
import sys
import threading
import weakref
from contextvars import ContextVar

import pytest
import torch
from executor_models import options, recordings
from torch import nn

import poptorch
from small_models import module

X = torch.tensor([[1.0, 2.0], [3.0, -1.0]])
SHARED = multiprocessing.Value("d", 2.0)
VARIABLE = ContextVar("scale", default=2.0)
LOCAL, HELD = threading.local(), argparse.Namespace(scale=2.0)
WEAK = weakref.ref(HELD)
SCALE = 2.0
TENSOR, LAYER = torch.ones(1), nn.Identity()
CONFIG = configparser.ConfigParser()
CONFIG["model"] = {"scale": "2.0"}


class Model(nn.Module):
    """A layer, and a function of the layer's output."""

    def __init__(self, read):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.read = nn.Linear(2, 2), read

    def forward(self, x):
        return self.layer(x) * float(self.read()), {"name": "output"}


def read_file():
    with open(os.environ["PANDO_TEST_FILE"]) as file:
        return file.read()


def write_file(path):
    path.write_text("5.0")


# name: what forward reads, and a change that nothing shows
PLACES = {
    "file": (read_file, write_file),
    "shared memory": (lambda: SHARED.value, lambda path: setattr(SHARED, "value", 5.0)),
    "arguments of the program": (lambda: len(sys.argv), lambda path: sys.argv.append("more")),
    "environment": (
        lambda: os.environ["PANDO_TEST_SCALE"],
        lambda path: os.environ.update(PANDO_TEST_SCALE="5"),
    ),
    "context variable": (lambda: VARIABLE.get(), lambda path: VARIABLE.set(5.0)),
    "thread local": (lambda: LOCAL.scale, lambda path: setattr(LOCAL, "scale", 5.0)),
    "weak reference": (lambda: WEAK().scale, lambda path: setattr(HELD, "scale", 5.0)),
    "requires_grad": (lambda: 1.0 + TENSOR.requires_grad, lambda path: TENSOR.requires_grad_()),
    "vars() of a layer": (lambda: vars(LAYER)["scale"], lambda path: setattr(LAYER, "scale", 5.0)),
    "global by its name": (lambda: globals()["SCA" + "LE"], lambda path: globals().update(SCALE=5.0)),
    "ConfigParser": (lambda: CONFIG["model"]["scale"], lambda path: CONFIG.set("model", "scale", "5.0")),
}


@pytest.fixture(autouse=True)
def places_as_before(tmp_path, monkeypatch):
    path = tmp_path / "scale"
    path.write_text("2.0")
    monkeypatch.setenv("PANDO_TEST_FILE", str(path))
    monkeypatch.setattr(sys, "argv", ["program"])
    monkeypatch.setenv("PANDO_TEST_SCALE", "2")
    VARIABLE.set(2.0)
    SHARED.value = LOCAL.scale = HELD.scale = 2.0
    LAYER.scale = 2.0
    TENSOR.requires_grad_(False)
    globals().update(SCALE=2.0)
    CONFIG.set("model", "scale", "2.0")
    return path


@pytest.mark.parametrize("name", PLACES)
def test_a_value_that_is_not_followed_is_an_error_at_the_eighth_call(name, places_as_before):
    read, change = PLACES[name]
    model = Model(read)
    executor = poptorch.inferenceModel(model, options())
    for _ in range(3):
        executor(X)
    change(places_as_before)
    for _ in range(4):
        executor(X)
    with pytest.raises(
        poptorch.Error, match=r"test_recording_net.py:\d+: forward computes something else"
    ) as caught:
        executor(X)
    assert "fix: keep the value in an attribute" in str(caught.value)
    for _ in range(6):  # recorded anew
        assert torch.equal(executor(X)[0], model(X)[0].detach())


def test_the_check_leaves_a_training_as_it_was_and_is_made_at_growing_distances():
    recorded, calls = [], []
    model = Model(lambda: 2.0)
    model.forward = lambda x: poptorch.identity_loss(model.layer(x).square().mean(), "none")
    twin = nn.Linear(2, 2)
    twin.load_state_dict(model.layer.state_dict())
    trainer = poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=0.01))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.01)
    handle = poptorch.registerPreCompileHook(lambda: recorded.append(len(calls)))
    for _ in range(69):
        calls.append(trainer(X))
        optimizer.zero_grad()
        twin(X).square().mean().backward()
        optimizer.step()
    handle.remove()
    assert recorded == [0, 7, 63]
    assert torch.equal(model.layer.weight, twin.weight)


def test_the_error_leaves_the_weights_of_a_training(places_as_before):
    model = Model(lambda: 2.0)
    model.forward = lambda x: poptorch.identity_loss(
        (model.layer(x) * float(read_file())).square().mean(), "none"
    )
    trainer = poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in range(7):
        trainer(X)
    write_file(places_as_before)
    before = model.layer.weight.detach().clone()
    with pytest.raises(poptorch.Error, match="forward computes something else"):
        trainer(X)
    assert torch.equal(model.layer.weight, before)
    trainer(X)
    assert not torch.equal(model.layer.weight, before)


def test_what_forward_returns_is_checked_too(places_as_before):
    model = Model(lambda: 2.0)
    model.forward = lambda x: {"y": model.layer(x), "text": read_file()}
    executor = poptorch.inferenceModel(model, options())
    executor(X)
    write_file(places_as_before)
    for _ in range(6):
        executor(X)
    with pytest.raises(poptorch.Error, match="what forward returns differs"):
        executor(X)
    assert executor(X)["text"] == "5.0"


def test_an_argument_that_seemed_not_to_matter_is_checked():
    executor = poptorch.inferenceModel(lambda x, n: x * (2.0 if n < 5 else 3.0), options())
    for n in range(7):
        executor(X, n)
    with pytest.raises(poptorch.Error, match="an argument that seemed not to matter"):
        executor(X, 7)


@pytest.mark.parametrize("is_off", [True, False], ids=["option", "random numbers"])
def test_nothing_is_checked_with_the_option_off_and_for_random_numbers(is_off, places_as_before):
    model = Model(read_file if is_off else random.random)
    executor = poptorch.inferenceModel(model, options().checkRecording(not is_off))
    with recordings() as recorded:
        first = executor(X)[0]
        write_file(places_as_before)
        for _ in range(8):
            assert torch.equal(executor(X)[0], first)
    assert len(recorded) == 1


def test_compare_records_forward_in_each_update(places_as_before):
    def forward(self, x):
        scale = float(read_file())
        if poptorch.isRunningOnIpu():
            write_file(places_as_before)
        return poptorch.identity_loss((self.layer(x) * scale).square().mean(), "none")

    with pytest.raises(poptorch.Error, match="forward computes something else"):
        poptorch.testing.compare(module(forward, layer=nn.Linear(2, 2)), options(), (X,), updates=2)


class Holder:
    """An object that is no container."""

    def __init__(self, *values):
        self.values = [*values]


poptorch.registerCustomOp("Halve", "recording.net", 1, lambda x: x / 2)


def with_custom_operation(m, x):
    return poptorch.custom_op([m.norm(x).sum(0) + x], "Halve", "recording.net", 1, [x])[0]


def with_an_object(m, x):
    return {"y": m.layer(x), "cache": Holder(x, (x, 1), Holder())}


def with_hooks_that_are_set_once(m, x):
    if not hasattr(m, "is_hooked"):
        m.layer.register_forward_hook(lambda layer, args, output: output)
        m.is_hooked = True
    return m.layer(x)


def with_a_cache(m, x):
    m.cache = getattr(m, "cache", None) or {"scale": torch.full((2,), 3.0)}
    return m.layer(x) * m.cache["scale"]


def with_new_objects(m, x):
    m.holder, m.function = Holder(2.0), lambda y: y * 2
    return m.function(m.layer(x)) * m.holder.values[0], m.function, m.holder


def with_objects_that_refer_to_each_other(m, x):
    m.holder = Holder(1)
    m.holder.values.append(Holder(m.holder, m))
    return m.layer(x)


def with_a_note(m, x):
    poptorch.notes.note("mean", {"value": x.mean(), "step": m.step})
    m.step = m.step
    return torch.nn.functional.dropout(m.layer(x))


NO_CHANGES = (
    with_custom_operation,
    with_an_object,
    with_hooks_that_are_set_once,
    with_a_cache,
    with_new_objects,
    with_objects_that_refer_to_each_other,
    with_a_note,
)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("function", NO_CHANGES, ids=lambda function: function.__name__)
def test_a_forward_that_computes_the_same_raises_no_error_and_says_nothing_twice(function, training, caplog):
    def forward(self, x):
        y = function(self, self.layer(x))
        first = y["y"] if isinstance(y, dict) else y[0] if isinstance(y, tuple) else y
        return y, poptorch.identity_loss(first.square().mean(), "none")

    model = module(forward, layer=nn.Linear(2, 2), norm=nn.BatchNorm1d(2), step=1)
    chosen = options().anchorTensor("gradient", "Gradient___layer.weight") if training else options()
    executor = poptorch.trainingModel(model, chosen) if training else poptorch.inferenceModel(model, chosen)
    with recordings() as recorded:
        executor(X)
        said = len(caplog.records)
        for _ in range(8):
            executor(X)
    assert len(recorded) == 2 and len(caplog.records) == said
