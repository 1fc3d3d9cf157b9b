"""Control flow at run time: a branch runs only the chosen body, a loop its body as often as it says."""

import pytest
import torch
from torch import nn

import poptorch
from small_models import module

X = torch.tensor([1.0, 2.0])
YES, NO = torch.tensor(True), torch.tensor(False)


def test_cond_decides_while_the_model_runs():
    def forward(condition, x):
        return poptorch.cond(condition, lambda a: a + 1, [x], lambda a: a * 10, [x])

    model = poptorch.inferenceModel(forward)
    for condition in (YES, NO):
        assert torch.equal(model(condition, X)[0], forward(condition, X)[0])
    assert isinstance(model(YES, X), list)
    assert torch.equal(poptorch.inferenceModel(forward)(NO[None], X)[0], X * 10)


def test_only_the_chosen_body_runs():
    ran = []

    def noted(name):
        return poptorch.CPU(lambda x: (ran.append(name), x + 1)[1], name)

    left, right = noted("left"), noted("right")
    model = poptorch.inferenceModel(lambda c, x: poptorch.cond(c, left, [x], right, [x]))
    model(YES, X)
    ran.clear()
    model(NO, X)
    assert ran == ["right"]


def test_bodies_use_the_model_around_them():
    def forward(self, condition, x):
        y = x * 3
        constant = torch.tensor([5.0, 6.0])

        def then_body(a):
            return self.layer(a) + y, y + constant

        return poptorch.cond(condition, then_body, [x], lambda: (x - y, constant + 1), [])

    plain = module(forward, layer=nn.Linear(2, 2))
    model = poptorch.inferenceModel(plain)
    for condition in (YES, NO):
        for found, expected in zip(model(condition, X), plain(condition, X), strict=True):
            torch.testing.assert_close(found, expected)


def test_what_a_body_changes_in_its_inputs_changes_for_itself_alone():
    def forward(condition, x):
        y = x + 0

        def body(a, b):
            a += 1
            b.mul_(2)
            return a + b

        y += 1
        return *poptorch.cond(condition, body, [x, y], body, [x, y]), x, y

    first, x, y = poptorch.inferenceModel(forward)(YES, X)
    assert torch.equal(first, (X + 1) + (X + 1) * 2)
    assert torch.equal(x, X)
    assert torch.equal(y, X + 1)


def test_branches_and_loops_nest():
    scale = torch.tensor(2.0)

    def forward(condition, x):
        offset = x * 0 + 1

        def turn(a):
            return poptorch.cond(condition, lambda b: b * scale + offset, [a], lambda b: b - offset, [a])[0]

        return poptorch.for_loop(3, turn, [x])[0]

    model = poptorch.inferenceModel(forward)
    assert torch.equal(model(YES, X), ((X * 2 + 1) * 2 + 1) * 2 + 1)
    assert torch.equal(model(NO, X), X - 3)


def test_a_loop_feeds_a_turn_to_the_next():
    def forward(x, y):
        def body(a, b):
            b += a
            return [b, a]

        return (*poptorch.for_loop(5, body, [x, y]), x, y)

    expected = forward(X, X * 2)
    found = poptorch.inferenceModel(forward)(X, X * 2)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(found[2], X)
    assert poptorch.for_loop(0, lambda a: a, [X])[0] is X


def test_random_numbers_in_a_body_are_those_of_the_seed():
    def forward(x):
        return poptorch.for_loop(2, lambda a: a + torch.rand(4) * torch.rand(4), [x])[0]

    options = poptorch.Options().randomSeed(3)
    x = torch.zeros(4)
    one, other = (poptorch.inferenceModel(forward, options) for _ in range(2))
    first = one(x)
    assert torch.equal(first, other(x))
    assert not torch.equal(first, one(x))
    assert 0 < first.min() < first.max() < 2


def test_a_body_may_run_in_a_later_stage():
    def forward(self, condition, x):
        poptorch.Block.start("a", ipu_id=0)
        y = self.a(x)
        poptorch.Block.start("b", ipu_id=1)
        return poptorch.cond(condition, lambda: self.b(y), [], lambda: y + 0, [])[0]

    plain, options = module(forward, a=nn.Linear(2, 2), b=nn.Linear(2, 2)), poptorch.Options()
    model = poptorch.inferenceModel(plain, options.deviceIterations(2))
    condition = torch.tensor([True, False])
    x = torch.randn(2, 2)
    expected = torch.cat([plain(condition[i : i + 1], x[i : i + 1]) for i in range(2)])
    torch.testing.assert_close(model(condition, x), expected)


def test_training_is_refused():
    loop = lambda self, x: poptorch.for_loop(2, lambda a: a + 1, [self.layer(x)])  # noqa: E731
    branch = lambda self, x: poptorch.cond(YES, lambda a: a, [self.layer(x)], lambda a: a, [x])  # noqa: E731
    for forward, name in ((loop, "for_loop"), (branch, "cond")):
        with pytest.raises(poptorch.Error, match=rf"poptorch.{name}\(\) is only supported in inference\."):
            poptorch.trainingModel(module(forward, layer=nn.Linear(2, 2)))(X[None])


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match=r"\(Object is not list\)"):
        poptorch.cond(YES, lambda a: a, (X,), lambda a: a, [X])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\(Object is not list\)"):
        poptorch.for_loop(2, lambda a: a, X)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Object contained in list at index 1 is not torch.tensor"):
        poptorch.for_loop(2, lambda a, b: (a, b), [X, 1])  # type: ignore[list-item]
    with pytest.raises(poptorch.Error, match="same number of tensors"):
        poptorch.inferenceModel(
            lambda c, x: poptorch.cond(c, lambda: x + 1, [], lambda: x.sum(), []),
        )(YES, X)
    with pytest.raises(poptorch.Error, match="shapes and types of its inputs"):
        poptorch.inferenceModel(lambda x: poptorch.for_loop(2, lambda a: a.sum(), [x]))(X)


class Around(nn.Module):
    """A model with a loop, or a branch, whose body writes into something that is not its input."""

    def __init__(self, write, control):
        super().__init__()
        self.write, self.control = write, control
        self.layer, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.spectral = nn.utils.spectral_norm(nn.Linear(2, 2))
        self.register_buffer("state", torch.zeros(2))
        self.register_buffer("rows", torch.zeros(2, 2))
        self.plain, self.kept, self.seen = torch.zeros(2), [], None

    def forward(self, x):
        local, view = torch.zeros(2), self.rows[0]

        def body(y):
            self.write(self, y, local, view, x)
            return y + 1

        if self.control == "for_loop":
            (y,) = poptorch.for_loop(2, body, [x * 1])
        else:
            (y,) = poptorch.cond(x.sum() > 0, body, [x * 1], lambda y: y - 1, [x * 1])
        read = sum(value.sum() for value in (self.state, self.rows, local, view, *self.kept))
        return y, read


# Each writes into a tensor m.*, a local variable or a view outside of the body; y is the body's input [2, 2].
WRITES = {
    "add_": lambda m, y, local, view, x: m.state.add_(y[0]),
    "a slice": lambda m, y, local, view, x: m.rows[:, 1].mul_(2),
    "out": lambda m, y, local, view, x: torch.add(y[0], 1, out=m.state),
    "data": lambda m, y, local, view, x: setattr(m.state, "data", y[0]),
    "an assigned buffer": lambda m, y, local, view, x: setattr(m, "state", m.state + y[0]),
    "a weight's data": lambda m, y, local, view, x: m.layer.weight.data.add_(1),
    "a new weight's data": lambda m, y, local, view, x: setattr(m.layer.weight, "data", y * 1),
    "a weight, without gradients": lambda m, y, local, view, x: m.layer.weight.mul_(y.mean()),
    "a local variable": lambda m, y, local, view, x: local.add_(y[0]),
    "a row of a local variable": lambda m, y, local, view, x: local[:1].add_(y[0, :1]),
    "a view made outside": lambda m, y, local, view, x: view.add_(y[0]),
    "an input of forward": lambda m, y, local, view, x: x.add_(1),
    "a plain tensor": lambda m, y, local, view, x: m.plain.add_(y[0]),
    "running statistics": lambda m, y, local, view, x: m.norm.train()(y),
    "vectors of spectral_norm": lambda m, y, local, view, x: m.spectral.train()(y),
    "a result that is kept": lambda m, y, local, view, x: m.kept.append(y * 2),
}


@pytest.mark.parametrize("control", ["for_loop", "cond"])
@pytest.mark.parametrize("name", WRITES)
def test_a_body_that_writes_into_another_tensor_than_its_inputs_is_an_error_with_the_line(name, control):
    model = Around(WRITES[name], control)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(poptorch.Error, match=r"test_control\.py:\d+") as caught:
        poptorch.inferenceModel(model)(torch.ones(2, 2))
    assert "body" in str(caught.value)
    assert "fix: " in str(caught.value)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_a_body_may_write_into_what_it_makes_itself():
    def body(y):
        made = torch.zeros(2)
        made.add_(y[0]).mul_(2)
        return y.add_(made)

    def forward(x):
        return poptorch.for_loop(2, body, [x])[0]

    assert torch.equal(poptorch.inferenceModel(forward)(torch.ones(2, 2)), forward(torch.ones(2, 2)))
