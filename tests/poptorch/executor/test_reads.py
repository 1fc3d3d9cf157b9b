# ruff: noqa: E501  (a table with a place in each line)
"""What forward reads from Python between calls: places for a number, changes of structure, state, random numbers.

Each model is called, changed, and called again; plain PyTorch says what it must compute.
"""

import collections
import copy
import dataclasses
import datetime
import enum
import functools
import random
import sys
import time
import types
import weakref

import numpy as np
import pytest
import torch
from executor_models import Applied, options, recordings
from torch import nn

import poptorch

X = torch.tensor([[1.0, 2.0], [3.0, -1.0]])


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


# ---- places where a number can live ------------------------------------------------------------------------


class Mode(enum.Enum):
    SMALL = 2.0
    LARGE = 5.0


@dataclasses.dataclass
class Data:
    scale: float = 2.0


class Config:
    scale = 2.0

    def __init__(self, **values):
        vars(self).update(values)


class Mapped(Config):
    """As configurations of transformers, which have several names for one attribute."""

    def __getattribute__(self, name):
        return super().__getattribute__("inner_scale" if name == "scale" else name)


class Scaling(torch.autograd.Function):
    factor = 2.0

    @staticmethod
    def forward(ctx, x):
        return x * Scaling.factor

    @staticmethod
    def backward(ctx, gradient):
        return gradient * Scaling.factor


Pair = collections.namedtuple("Pair", "a b")


def read(model):
    return model.scale


def read_deeply(model):
    return read(model) + 0


def with_attribute(model, y):
    return y * with_attribute.scale


with_attribute.scale = 2.0


def with_default(y, scale=2.0):
    return y * scale


def with_keyword(y, *, table={"scale": 2.0}):  # noqa: B006
    return y * table["scale"]


def assign(name, value, owner=lambda model: model):
    return lambda model: setattr(owner(model), name, value)


def item(key, value, owner):
    return lambda model: owner(model).__setitem__(key, value)


class Holder:
    """An object with the names of a partial function's attributes, and without `__getattr__` of its own."""

    kind = 2.0

    class Inner:
        scale = 2.0

    def __init__(self, **values):
        self.func, self.args, self.values = None, (), {"scale": 2.0}
        vars(self).update(values)

    @staticmethod
    def by_class():
        return Holder.kind

    def __copy__(self):
        return Holder(**vars(self))


class KeyErrors(Holder):
    def __getattr__(self, name):
        return vars(self)["values"][name]


class InheritedTuple(Pair):
    extra = 2.0


def by_import(model, y):
    from collections_of_numbers import scale

    return y * scale


def set_back(owner, name, value):
    """A change that is undone after the test."""
    return lambda model: CHANGED.setattr(owner, name, value)


def move_to_end(model):
    model.table["a"] = model.table.pop("a")


CHANGED = pytest.MonkeyPatch()
sys.modules["collections_of_numbers"] = collections_of_numbers = types.ModuleType("collections_of_numbers")
collections_of_numbers.scale = 2.0
HELD = Holder(scale=2.0)
OPTIMIZER = torch.optim.SGD([torch.zeros(1)], lr=2.0)
by_attribute = lambda model, y: y * model.scale  # noqa: E731
FIVE = torch.tensor([5.0, 5.0])


# name: function, attributes, change
class Second:
    second = 2.0


class Heir(Holder, Second):
    second = 3.0


def subclass_of(kind):
    return type(f"Own{kind.__name__}", (kind,), {})


def with_scale(value):
    value.scale = 2.0
    return value


ATTRIBUTED = {
    **{kind.__name__: subclass_of(kind)() for kind in (list, dict, tuple, set, str, int, float)},
    "an array": np.ones(1).view(subclass_of(np.ndarray)),
    "a tensor of a class": torch.ones(1).as_subclass(subclass_of(torch.Tensor)),
    "a tensor": torch.ones(1),
    "a function": lambda: None,
}


PLACES = {
    "helper of a helper": (lambda m, y: y * read_deeply(m), {"scale": 2.0}, assign("scale", 5.0)),
    "getattr": (lambda m, y: y * getattr(m, "sc" + "ale", 1.0), {"scale": 2.0}, assign("scale", 5.0)),
    "absent attribute": (lambda m, y: y * getattr(m, "scale", 2.0), {}, assign("scale", 5.0)),
    "removed attribute": (lambda m, y: y * getattr(m, "scale", 2.0), {"scale": 5.0}, lambda m: delattr(m, "scale")),
    "flag": (lambda m, y: y if m.flag else -y, {"flag": True}, assign("flag", False)),
    "text": (lambda m, y: getattr(y, m.name)(), {"name": "relu"}, assign("name", "exp")),
    "dtype": (lambda m, y: y.to(m.dtype).float(), {"dtype": torch.float32}, assign("dtype", torch.bfloat16)),
    "new key": (lambda m, y: y * m.table.get("scale", 2.0), {"table": {}}, item("scale", 5.0, lambda m: m.table)),
    "list that grows": (lambda m, y: y * len(m.values), {"values": [1.0]}, lambda m: m.values.append(2.0)),
    "enum": (lambda m, y: y * m.mode.value, {"mode": Mode.SMALL}, assign("mode", Mode.LARGE)),
    "configuration with names": (lambda m, y: y * m.c.scale, {"c": Mapped(inner_scale=2.0)}, assign("inner_scale", 5.0, lambda m: m.c)),
    "plain tensor, filled": (lambda m, y: y * m.t, {"t": torch.full((2,), 2.0)}, lambda m: m.t.fill_(5)),
    "plain tensor, replaced": (lambda m, y: y * m.t, {"t": torch.full((2,), 2.0)}, assign("t", FIVE)),
    "plain tensor of another type": (lambda m, y: y * m.t, {"t": torch.full((2,), 2.0)}, assign("t", torch.tensor([2, 5]))),
    "tensor in a list": (lambda m, y: y * m.ts[0], {"ts": [torch.full((2,), 2.0)]}, item(0, FIVE, lambda m: m.ts)),
    "partial": (lambda m, y: m.f(y), {"f": functools.partial(with_default, scale=2.0)}, lambda m: m.f.keywords.update(scale=5.0)),
    "keyword default": (lambda m, y: with_keyword(y), {}, lambda m: with_keyword.__kwdefaults__["table"].update(scale=5.0)),
    "autograd function": (lambda m, y: Scaling.apply(y), {}, lambda m: setattr(Scaling, "factor", 5.0)),
    "import in forward": (by_import, {}, set_back(collections_of_numbers, "scale", 5.0)),
    "vars(object)": (lambda m, y: y * vars(m.h)["scale"], {"h": Holder(scale=2.0)}, assign("scale", 5.0, lambda m: m.h)),
    "copy of an object": (lambda m, y: y * copy.copy(m.h).scale, {"h": Holder(scale=2.0)}, assign("scale", 5.0, lambda m: m.h)),
    "object with args": (lambda m, y: y * m.h.scale, {"h": Holder(scale=2.0)}, assign("scale", 5.0, lambda m: m.h)),
    "__getattr__ that raises KeyError": (lambda m, y: y * m.h.scale, {"h": KeyErrors()}, item("scale", 5.0, lambda m: m.h.values)),
    "order of a dictionary": (lambda m, y: y * next(iter(m.table.values())), {"table": {"a": 2.0, "b": 3.0}}, move_to_end),
    "long list of lists": (lambda m, y: y * m.values[1500][0], {"values": [[2.0] for _ in range(2000)]}, item(0, 5.0, lambda m: m.values[1500])),
    "torch.from_numpy": (lambda m, y: y * torch.from_numpy(m.n), {"n": np.ones(2, np.float32)}, item(0, 5.0, lambda m: m.n)),
    "torch.tensor of an array": (lambda m, y: y * torch.tensor(m.n), {"n": np.ones(2, np.float32)}, item(0, 5.0, lambda m: m.n)),
    "mapping proxy": (lambda m, y: y * m.p["scale"], {"p": types.MappingProxyType(vars(HELD))}, assign("scale", 7.0, lambda m: HELD)),
    "set of objects": (lambda m, y: y * sum(h.scale for h in m.s), {"s": {Holder(scale=2.0)}}, assign("scale", 5.0, lambda m: next(iter(m.s)))),
    "static method of a class": (lambda m, y: y * Holder.by_class(), {}, set_back(Holder, "kind", 7.0)),
    "class in a dictionary": (lambda m, y: y * m.d["a"].kind, {"d": {"a": Holder}}, set_back(Holder, "kind", 9.0)),
    "nested class": (lambda m, y: y * Holder.Inner.scale, {}, set_back(Holder.Inner, "scale", 5.0)),
    "class of a tuple": (lambda m, y: y * m.t.extra, {"t": InheritedTuple(1, 2)}, set_back(InheritedTuple, "extra", 5.0)),
    "attribute of a parameter": (lambda m, y: y * getattr(m.layer.weight, "scale", 2.0), {}, assign("scale", 5.0, lambda m: m.layer.weight)),
    **{
        f"attribute of {name}": (lambda m, y: y * m.v.scale, {"v": with_scale(value)}, assign("scale", 5.0, lambda m: m.v))
        for name, value in ATTRIBUTED.items()
    },
    "second base by super()": (lambda m, y: y * super(Holder, m.h).second, {"h": Heir()}, set_back(Second, "second", 5.0)),
    "learning rate": (lambda m, y: y * OPTIMIZER.param_groups[0]["lr"], {}, item("lr", 5.0, lambda m: OPTIMIZER.param_groups[0])),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_a_value_that_forward_reads_and_that_changes_counts_at_the_next_call(name, caplog):
    function, attributes, change = PLACES[name]
    model = Applied(function, **attributes)
    executor = poptorch.inferenceModel(model, options())
    before = model(X).detach()
    for _ in range(2):
        assert torch.equal(executor(X), before)
    recorded = len(executor._executable.recordings)
    change(model)
    expected = model(X).detach()
    assert not torch.equal(expected, before)
    for _ in range(2):
        assert torch.equal(executor(X), expected)
    CHANGED.undo()
    is_bound = name in ("plain tensor, filled", "plain tensor, replaced", "tensor in a list")
    assert executor.plan_count == (1 if is_bound else 2)
    assert recorded == 1
    assert warnings(caplog) == []


# how forward takes the value of a plain tensor to Python
WAYS = {
    "tolist": lambda v: v.tolist()[1],
    "tolist of a part": lambda v: v[1:].tolist()[0],
    "item": lambda v: v[1].item(),
    "float": lambda v: float(v[1]),
    "if": lambda v: 2.0 if v[1] > 2 else 3.0,
    "numpy": lambda v: float(v.numpy()[1]),
    "asarray": lambda v: float(np.asarray(v)[1]),
    "asarray with a type": lambda v: float(np.asarray(v, dtype=np.float64)[1]),
    "array": lambda v: float(np.array(v)[1]),
    "iterated": lambda v: [float(each) for each in v][1],
    "format": lambda v: float(f"{v[1]:.1f}"),
}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("is_written", [True, False], ids=["written", "replaced"])
def test_the_values_of_a_plain_tensor_are_those_of_the_call(name, is_written):
    model = Applied(lambda m, y: y * WAYS[name](m.v), v=torch.tensor([1.0, 2.0]))
    executor = poptorch.inferenceModel(model, options())
    for value in (2.0, 5.0, 5.0, 2.0):
        if is_written:
            model.v[1] = value
        else:
            model.v = torch.tensor([1.0, value])
        assert torch.equal(executor(X), model(X).detach())


def test_plans_are_kept_for_values_and_the_ninth_is_an_error(caplog):
    model = Applied(by_attribute, scale=0.0)
    executor = poptorch.inferenceModel(model, options())
    with recordings() as captures:
        for value in (*range(8), *range(8)):
            model.scale = float(value)
            assert torch.equal(executor(X), model(X).detach())
        assert len(captures) == 8
    model.scale = 8.0
    with pytest.raises(poptorch.Error, match=r"(?s)scale is 8.0, and was 7.0.*batchDims.*register_buffer"):
        executor(X)
    model.scale = 3.0
    assert torch.equal(executor(X), model(X).detach())


def test_a_value_that_does_not_change_the_graph_is_not_compiled_for(caplog):
    model = Applied(lambda m, y: y * (2.0 if m.epoch < 5 else 3.0), epoch=0)
    executor = poptorch.inferenceModel(model, options())
    with caplog.at_level("INFO", "poptorch::python"):
        for model.epoch in (0, 1, 2, 6, 7, 1):
            assert torch.equal(executor(X), model(X).detach())
    assert executor.plan_count == 2
    assert "recorded again, with an equal graph: epoch is 1, and was 0" in caplog.messages
    assert any("for epoch is 6, and was 2" in message for message in caplog.messages)


def test_a_global_with_the_name_of_an_attribute_is_not_read(caplog):
    """Programs have globals such as `loss` and `scale` of their own, which change in each call."""
    program = types.ModuleType("program")
    exec("def rule(m, y):\n    return {'shift': y * m.scale}['shift']", vars(program))
    model = Applied(program.rule, scale=2.0)
    executor = poptorch.inferenceModel(model, options())
    with caplog.at_level("INFO", "poptorch::python"):
        for step in range(3):
            program.scale = program.shift = float(step)
            assert torch.equal(executor(X), model(X).detach())
    assert not [message for message in caplog.messages if "recorded again" in message]


def once(make):
    """A way to set the buffer "made" where there is none."""

    def way(m, y):
        if getattr(m, "made", None) is None:
            m.register_buffer("made", make(y))

    return way


def always(make):
    return lambda m, y: m.register_buffer("made", make(y))


def zeros(y):
    return torch.zeros(2)


def start_or_go_on(m, y):
    new = y.detach().sum(0)
    m.register_buffer("made", new if getattr(m, "made", None) is None else m.made * 0.9 + new)


STATEFUL = {
    "a value of the first call": (once(lambda y: y.detach().sum(0)), lambda m, y: y + m.made),
    "written in place": (once(zeros), lambda m, y: y + m.made.add_(y.detach().sum(0))),
    "a counter": (once(lambda y: torch.zeros(())), lambda m, y: y * m.made.add_(1.0)),
    "assigned": (
        once(zeros),
        lambda m, y: setattr(m, "made", m.made * 0.9 + y.detach().sum(0)) or y + m.made,
    ),
    "another start": (start_or_go_on, lambda m, y: y + m.made),
}


@pytest.mark.parametrize("is_declared", [False, True], ids=["not there", "None"])
@pytest.mark.parametrize("way", STATEFUL)
def test_state_in_a_buffer_that_forward_makes_is_an_error(way, is_declared):
    set_buffer, use = STATEFUL[way]
    model = Applied(lambda m, y: (set_buffer(m, y), use(m, y))[1])
    if is_declared:
        model.register_buffer("made", None)
    with pytest.raises(poptorch.Error, match=r"Buffer made is made by the forward(?s:.*)in __init__"):
        poptorch.inferenceModel(model, options())(X)
    assert dict(model.named_buffers()) == {}


@pytest.mark.parametrize(
    "make", [once(lambda y: torch.arange(2.0)), always(zeros), always(lambda y: y.detach() * 2)]
)
def test_a_buffer_that_forward_makes_may_be_a_constant_or_of_one_call(make):
    model = Applied(lambda m, y: (make(m, y), y + m.made)[1])
    expected = copy.deepcopy(model)
    executor = poptorch.inferenceModel(model, options())
    for x in (X, X + 1.0):
        assert torch.equal(executor(x), expected(x).detach())


def test_a_change_counts_in_training_and_in_a_plan_for_another_shape():
    def loss(model, y):
        return poptorch.identity_loss((y * model.scale).square().mean(), "none")

    weights = []
    for is_plain in (True, False):
        model = Applied(loss, scale=1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        executor = poptorch.trainingModel(model, options().allowNewShapes(), optimizer)
        for number in range(6):
            model.scale = 1.0 + number % 3
            x = X[: 1 + number % 2]
            if is_plain:
                optimizer.zero_grad()
                (model.layer(x) * model.scale).square().mean().backward()
                optimizer.step()
            else:
                executor(x)
        weights.append(model.layer.weight.detach().clone())
    assert torch.equal(*weights)


# ---- structure ------------------------------------------------------------------------------------------------


class Tripled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 3


class Negative(Applied):
    def forward(self, x):
        return -super().forward(x)


def part(model):
    return model.part


def set_forward(model):
    type(model.part).forward = lambda self, x: x * 7


call = lambda model, y: model.part(y)  # noqa: E731
STRUCTURES = {
    "None becomes a layer": (lambda m, y: y if m.part is None else m.part(y), lambda: None, assign("part", nn.Linear(2, 2))),
    "a layer becomes None": (lambda m, y: y if m.part is None else m.part(y), lambda: nn.Linear(2, 2), assign("part", None)),
    "Sequential.append": (call, lambda: nn.Sequential(nn.ReLU()), lambda m: m.part.append(nn.Linear(2, 2))),
    "a layer of a Sequential": (call, lambda: nn.Sequential(nn.ReLU()), lambda m: m.part.__setitem__(0, nn.Tanh())),
    "a layer of another class": (call, lambda: nn.Linear(2, 2), assign("part", Tripled(2, 2))),
    "a function in a list": (lambda m, y: sum(f(y) for f in m.part), lambda: [torch.relu], lambda m: m.part.append(torch.exp)),
    "forward of a class": (call, lambda: type("Own", (nn.Module,), {"forward": lambda self, x: x * 2})(), set_forward),
    "forward of an instance": (call, lambda: nn.Linear(2, 2), assign("forward", lambda x: x * 7, part)),
    "a hook": (call, lambda: nn.ReLU(), lambda m: m.part.register_forward_hook(lambda module, x, y: y * 3)),
    "the class of the model": (call, lambda: nn.ReLU(), assign("__class__", Negative)),
    "a class of a layer": (call, lambda: nn.Linear(2, 2), assign("__class__", Tripled, part)),
}  # fmt: skip


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_change_of_structure_counts_at_the_next_call(name, caplog):
    function, make, change = STRUCTURES[name]
    model = Applied(function, part=make())
    executor = poptorch.inferenceModel(model, options())
    before = model(X).detach()
    assert torch.equal(executor(X), before)
    change(model)
    expected = model(X).detach()
    assert not torch.equal(expected, before)
    for _ in range(2):
        assert torch.equal(executor(X), expected)
    assert warnings(caplog) == []


# ---- state of forward -----------------------------------------------------------------------------------------


class Counting:
    count = 0


total = 0


def count_attribute(m, y):
    m.n += 1
    return y * m.n


def keep_output(m, y):
    m.h = y + (m.h if hasattr(m, "h") else 0)
    return m.h


def count_in_class(m, y):
    Counting.count += 1
    return y * Counting.count


def count_in_global(m, y):
    global total
    total += 1
    return y * total


def count_in_dictionary(m, y):
    m.table["n"] = m.table.get("n", 0) + 1
    return y * m.table["n"]


def keep_in_closure():
    n = 0

    def function(m, y):
        nonlocal n
        n += 1
        return y * n

    return function


STATES = {
    "attribute": (count_attribute, {"n": 0}, "n"),
    "created attribute": (keep_output, {}, "h"),
    "class": (count_in_class, {}, "Counting.count"),
    "global": (count_in_global, {}, "total"),
    "dictionary": (count_in_dictionary, {"table": {}}, "table"),
    "closure": (keep_in_closure(), {}, "n"),
}


@pytest.mark.parametrize("name", STATES)
def test_state_that_forward_keeps_is_an_error_that_names_it(name):
    function, attributes, path = STATES[name]
    line = count_attribute.__code__.co_firstlineno + 1
    place = f"test_reads.py:{line} " if function is count_attribute else ""
    with pytest.raises(poptorch.Error, match=rf"{place}changes .*{path}.*(?s:.*)register_buffer"):
        poptorch.inferenceModel(Applied(function, **attributes), options())(X)


def count_for_prints(m, y):
    m.calls += 1
    return y * 2


def cache_constant(m, y):
    if not hasattr(m, "mask"):
        m.mask = torch.ones(2).cumsum(0)
        m.factor = 3.0
    return y * m.mask * m.factor


def cache_from_none(m, y):
    if m.mask is None:
        m.mask = torch.ones(2) * 3
    return y * m.mask


def test_a_counter_that_does_not_matter_is_one_warning(caplog):
    model = Applied(count_for_prints, calls=0)
    executor = poptorch.inferenceModel(model, options())
    for _ in range(3):
        assert torch.equal(executor(X), model.layer(X).detach() * 2)
    (message,) = warnings(caplog)
    assert "changes calls: Python's side of forward runs only when it is recorded" in message
    assert executor.model.calls == 1


@pytest.mark.parametrize(
    ("function", "attributes"), [(cache_constant, {}), (cache_from_none, {"mask": None})]
)
def test_a_constant_that_is_made_once_is_right_and_silent(function, attributes, caplog):
    model, executor = Applied(function, **attributes), None
    executor = poptorch.inferenceModel(model, options().allowNewShapes())
    expected = Applied(function, **attributes)
    for x in (X, X[:1], X):
        assert torch.equal(executor(x), expected(x).detach())
    assert warnings(caplog) == []


def test_a_list_that_forward_appends_to_is_no_state(caplog):
    seen = []
    model = Applied(lambda m, y: seen.append(tuple(y.shape)) or y)
    executor = poptorch.inferenceModel(model, options())
    for _ in range(2):
        executor(X)
    assert seen == [(2, 2)]
    assert warnings(caplog) == []


# ---- random numbers and time ----------------------------------------------------------------------------------

DRAWS = {
    "random": (lambda m: random.random(), "random numbers"),
    "randint": (lambda m: random.randint(1, 9), "random numbers"),
    "Random": (lambda m: m.source.random(), "random numbers"),
    "numpy": (lambda m: float(np.random.rand()), "random numbers"),
    "numpy choice": (lambda m: float(np.random.choice([1.0, 2.0, 3.0])), "random numbers"),
    "Generator": (lambda m: float(m.generator.normal()), "random numbers"),
    "time": (lambda m: time.time() % 2, "the time"),
    "perf_counter": (lambda m: time.perf_counter() % 2, "the time"),
    "datetime": (lambda m: datetime.datetime.now().second, "the time"),
    "perf_counter_ns": (lambda m: time.perf_counter_ns() % 2, "the time"),
    "process_time": (lambda m: time.process_time() % 2, "the time"),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_value_of_chance_or_time_is_one_warning_with_the_line(name, caplog):
    draw, what = DRAWS[name]
    model = Applied(lambda m, y: y * draw(m), source=random.Random(1), generator=np.random.default_rng(1))
    executor = poptorch.inferenceModel(model, options())
    assert torch.equal(executor(X), executor(X))
    (message,) = warnings(caplog)
    assert f"test_reads.py:{draw.__code__.co_firstlineno}: forward asks for {what}" in message


def test_torchs_random_numbers_are_drawn_anew_without_a_warning(caplog):
    executor = poptorch.inferenceModel(Applied(lambda m, y: y * torch.rand(2)), options())
    assert not torch.equal(executor(X), executor(X))
    assert warnings(caplog) == []


# ---- arguments that are no tensors ----------------------------------------------------------------------------


class Sample:
    def __init__(self, name):
        self.name = name


VALUES = {
    "text": ("mol4", "mol5"),
    "None": (None, "mol4"),
    "another type": (1, "one"),
    "list": (["mol4"], ["mol5", "mol6"]),
    "tuple": ((1, 2), (3,)),
    "set": ({1}, {2}),
    "dictionary": ({"id": 1}, {"id": 2}),
    "other keys": ({"id": 1}, {"name": "mol4"}),
    "nested": ({"ids": [1, {"a": 2}]}, {"ids": [1, {"a": 3}]}),
    "numpy array": (np.array([1, 2]), np.array([3, 4])),
    "numpy texts": (np.array(["a"]), np.array(["b", "c"])),
    "date": (datetime.date(2026, 1, 1), datetime.date(2026, 1, 2)),
    "enum": (Mode.SMALL, Mode.LARGE),
    "dataclass": (Data(1.0), Data(2.0)),
    "namespace": (types.SimpleNamespace(id=1), types.SimpleNamespace(id=2)),
    "object": (Sample("mol4"), Sample("mol5")),
    "range": (range(2), range(3)),
    "function": (abs, max),
}


class Named(nn.Module):
    def forward(self, batch, power=1):
        return batch["x"] ** power


@pytest.mark.parametrize("name", VALUES)
def test_an_argument_that_forward_does_not_read_may_change(name, caplog):
    executor = poptorch.inferenceModel(Named(), options())
    with recordings() as captures:
        for number in range(4):
            batch = {"x": X + number, "extra": VALUES[name][number % 2]}
            assert torch.equal(executor(batch), X + number)
    assert len(captures) == 2
    assert executor.plan_count == 1


def test_an_argument_that_matters_is_refused_or_has_a_plan_of_its_own():
    executor = poptorch.inferenceModel(Named(), options())
    executor({"x": X})
    for _ in range(2):
        with pytest.raises(poptorch.Error, match="Value mismatch for power: expected 1 but got 2"):
            executor({"x": X}, power=2)
    executor = poptorch.inferenceModel(Named(), options().allowNewShapes())
    for power in (1, 2, 1, 3, 2):
        assert torch.equal(executor({"x": X}, power=power), X**power)
    assert executor.plan_count == 3


def test_an_argument_and_an_attribute_may_change_before_the_same_call():
    class Scaled(nn.Module):
        scale = 2.0

        def forward(self, x, name, power=1, uses_power=False):
            return x * self.scale ** (power if uses_power else 1), name

    model = Scaled()
    executor = poptorch.inferenceModel(model, options())
    for scale, name, power in ((2.0, "a", 1), (3.0, "b", 2), (2.0, "c", 3), (5.0, "c", 4)):
        model.scale = scale
        result, given = executor(X, name, power)
        assert torch.equal(result, X * scale) and given == name
    model.scale = 7.0
    with pytest.raises(poptorch.Error, match="mismatch"):
        executor(X, "d", 2, uses_power=True)


def test_an_executor_keeps_no_batch():
    executor, batch = poptorch.inferenceModel(Named(), options()), {"x": X.clone(), "name": "a"}
    kept = weakref.ref(batch["x"])
    executor(batch)
    del batch
    assert kept() is None


def test_an_array_that_changes_is_told_to_be_a_tensor():
    executor = poptorch.inferenceModel(lambda x, array: x * float(array[0]), options())
    executor(X, np.array([1.0]))
    with pytest.raises(poptorch.Error, match=r"(?s)Value mismatch for array.*torch.from_numpy"):
        executor(X, np.array([2.0]))


def fill_default(x, seen={}):  # noqa: B006
    seen["x"] = x * 2
    return x + 1


def test_a_default_value_that_forward_fills_stays_as_it_was(caplog):
    executor = poptorch.inferenceModel(fill_default, options())
    for _ in range(2):
        assert torch.equal(executor(X), X + 1)
    assert fill_default.__defaults__ == ({},)
    assert len(warnings(caplog)) == 1


class Making(dict):
    """Makes an object of the class that it holds at each access, as the table of activations of transformers does."""

    def __getitem__(self, key):
        return super().__getitem__(key)()


MADE = Making(relu=nn.ReLU, tanh=nn.Tanh)


def test_a_container_that_makes_its_items_keeps_what_it_holds(caplog):
    model = Applied(lambda m, y: MADE["relu"](y))
    executor = poptorch.inferenceModel(model, options())
    assert torch.equal(executor(X), model(X))
    assert list(MADE.values()) == [nn.ReLU, nn.Tanh] and warnings(caplog) == []
    MADE.update(relu=nn.Sigmoid)
    assert torch.equal(executor(X), model(X))
