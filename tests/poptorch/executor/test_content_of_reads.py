# ruff: noqa: E501  (tables with a form in each line)
"""What forward reads counts by its content: equal values, and items that forward does not read, record nothing."""

import dataclasses

import pytest
import torch
from executor_models import Applied, options, recordings

import poptorch

X = torch.tensor([[1.0, 2.0], [3.0, -1.0]])


@dataclasses.dataclass
class Data:
    scale: float = 2.0
    step: int = 0


class Meter:
    """As an AverageMeter: the program updates it, and forward reads one of its attributes."""

    def __init__(self):
        self.scale, self.count, self.history = 2.0, 0, []

    def update(self):
        self.count += 1
        self.history.append(self.count)


TABLE = {"scale": 2.0, "step": 0}


by_attribute = lambda m, y: y * m.v.scale  # noqa: E731
by_key = lambda m, y: y * m.v["scale"]  # noqa: E731


def recordings_of(calls):
    """The number of recordings while a function runs."""
    with recordings() as found:
        calls()
    return len(found)


def test_a_value_that_is_changed_in_the_equal_object_is_followed():
    model = Applied(by_key, v={"scale": 2.0})
    executor = poptorch.inferenceModel(model, options())
    for scale in (2.0, 2.0, 3.0, 2.0):
        model.v = {"scale": 2.0}
        assert torch.equal(executor(X), model(X).detach())
        model.v["scale"] = scale
        assert torch.equal(executor(X), model(X).detach())


def append(m):
    m.v["history"].append(1)


# name: function, value, and a change of what forward does not read
UNREAD = {
    "key": (by_key, lambda: {"scale": 2.0, "step": 0}, lambda m: m.v.update(step=m.v["step"] + 1)),
    "new keys": (by_key, lambda: {"scale": 2.0}, lambda m: m.v.setdefault(len(m.v), 1)),
    "get": (lambda m, y: y * m.v.get("scale", 1.0), lambda: {"scale": 2.0}, lambda m: m.v.setdefault(len(m.v), 1)),
    "list in a dictionary": (by_key, lambda: {"scale": 2.0, "history": []}, append),
    "global": (lambda m, y: y * TABLE["scale"], dict, lambda m: TABLE.update(step=TABLE["step"] + 1)),
    "attribute": (by_attribute, Data, lambda m: setattr(m.v, "step", m.v.step + 1)),
    "meter": (by_attribute, Meter, lambda m: m.v.update()),
    "appended by forward": (lambda m, y: (m.v.append(1), y)[1], list, lambda m: m.v.clear()),
    "long dictionary": (by_key, lambda: {"scale": 2.0, **dict.fromkeys(range(2000))}, lambda m: m.v.setdefault(len(m.v), 1)),
}  # fmt: skip


def changing_calls(function, make, change, number):
    """Return a function that makes calls, which give the outputs of plain PyTorch, and changes the model after each."""
    model = Applied(function, v=make())
    executor = poptorch.inferenceModel(model, options())

    def calls():
        for _ in range(number):
            assert torch.equal(executor(X), model(X).detach())
            change(model)

    return calls


@pytest.mark.parametrize("name", UNREAD)
def test_what_forward_does_not_read_records_nothing(name):
    calls = changing_calls(*UNREAD[name], number=5)
    assert recordings_of(calls) == 1


# name: function and value, which changes in every call and changes nothing
WITHOUT_EFFECT = {
    "number": (lambda m, y: y * (2.0 if m.v >= 0 else 3.0), int, lambda m: setattr(m, "v", m.v + 1)),
    "text": (lambda m, y: y * (2.0 if m.v else 3.0), lambda: "a", lambda m: setattr(m, "v", m.v + "a")),
    "growing list": (lambda m, y: y * (2.0 if m.v is not None and len(m.v) >= 0 else 3.0), list, lambda m: m.v.append(1)),
    "history": (lambda m, y: y * (2.0 if not any(m.v) else 3.0), list, lambda m: m.v.append(0)),
    "iterated": (lambda m, y: y * (2.0 if all(v >= 0 for v in m.v.values()) else 3.0), lambda: {"step": 0}, lambda m: m.v.update(step=m.v["step"] + 1)),
    "attribute": (lambda m, y: y * (2.0 if m.v.count >= 0 else 3.0), Meter, lambda m: m.v.update()),
    "hook": (lambda m, y: y * 2.0, int, lambda m: m.layer.register_forward_hook(lambda *args: None)),
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_a_value_of_every_call_that_changes_nothing_is_compared_no_more(name, caplog):
    calls = changing_calls(*WITHOUT_EFFECT[name], number=7)
    with caplog.at_level("INFO", "poptorch::python"):
        assert recordings_of(calls) == 4
    assert sum("compared no more" in message for message in caplog.messages) == 1
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


def test_a_value_that_changes_now_and_then_stays_compared():
    model = Applied(lambda m, y: y * (2.0 if m.v < 5 else 3.0), v=0)
    executor = poptorch.inferenceModel(model, options().checkRecording(False))
    for model.v in range(7):
        for _ in range(2):
            assert torch.equal(executor(X), model(X).detach())


@pytest.mark.parametrize("one", [1, True, 1.0])
@pytest.mark.parametrize(
    "make", [lambda v: [v] * 2000, lambda v: {v: 1}, lambda v: dict.fromkeys(range(2000), v)]
)
def test_one_true_and_1_0_differ_in_containers(one, make):
    model = Applied(lambda m, y: y * (1 if type(next(iter(m.v.values() if len(m.v) > 1 and isinstance(m.v, dict) else m.v))) is int else 2), v=make(1))  # fmt: skip
    executor = poptorch.inferenceModel(model, options())
    for value in (1, one, 1):
        model.v = make(value)
        assert torch.equal(executor(X), model(X).detach())
