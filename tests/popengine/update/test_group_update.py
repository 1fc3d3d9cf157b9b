"""The update rules equal torch.optim to the last bit, and their own formulas where torch has none."""

import math

import pytest
import torch

from popengine.settings import Optimizer
from popengine.update.group_update import init_state, update

CHUNK = 1 << 16
SHAPES = [(), (3,), (17, 5), (300, 300), (2, 3, 4, 4), (40,)]  # one is larger than a chunk


def parameters(dtype=torch.float32):
    torch.manual_seed(1)
    return [torch.randn(shape).to(dtype) for shape in SHAPES]


def gradients(step, dtype=torch.float32):
    torch.manual_seed(100 + step)
    return [torch.randn(shape).to(dtype) for shape in SHAPES]


def train(optimizer, rates, steps=20, dtype=torch.float32):
    """The parameters after `steps` updates; `rates(step)` gives the group."""
    values = parameters(dtype)
    states = [init_state(optimizer, value) for value in values]
    for step in range(steps):
        update(optimizer, rates(step), values, gradients(step, dtype), states)
    return values, states


def train_with_torch(build, rates, steps=20):
    values = [torch.nn.Parameter(value) for value in parameters()]
    optimizer = build(values)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rates(step)["lr"]
        for value, gradient in zip(values, gradients(step), strict=True):
            value.grad = gradient
        optimizer.step()
    return [value.detach() for value in values]


def assert_same_bits(mine, theirs):
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def rule(kind, **fields):
    return Optimizer(kind=kind, group_of={}, **fields)


def decaying(**rates):
    return lambda step: {"lr": 0.05 / (1 + step), "maximize": 0.0, **rates}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr("popengine.update.group_update.CHUNK", CHUNK)


def test_a_shape_of_these_tests_spans_chunks():
    assert max(math.prod(shape) for shape in SHAPES) > CHUNK


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_has_the_bits_of_torch(momentum, nesterov, weight_decay, maximize):
    rates = decaying(
        momentum=momentum,
        dampening=0.0,
        weight_decay=weight_decay,
        nesterov=float(nesterov),
        maximize=float(maximize),
    )
    mine, _ = train(rule("sgd"), rates)
    theirs = train_with_torch(
        lambda p: torch.optim.SGD(
            p, 0.1, momentum, weight_decay=weight_decay, nesterov=nesterov, maximize=maximize
        ),
        rates,
    )
    assert_same_bits(mine, theirs)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("kind", "build"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)])
def test_adam_and_adamw_have_the_bits_of_torch(kind, build, weight_decay, maximize):
    rates = decaying(beta1=0.8, beta2=0.97, eps=1e-7, weight_decay=weight_decay, maximize=float(maximize))
    mine, _ = train(rule(kind), rates)
    theirs = train_with_torch(
        lambda p: build(p, betas=(0.8, 0.97), eps=1e-7, weight_decay=weight_decay, maximize=maximize), rates
    )
    assert_same_bits(mine, theirs)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("centered", [False, True])
def test_rmsprop_has_the_bits_of_torch(centered, weight_decay, momentum):
    rates = decaying(alpha=0.95, eps=1e-7, weight_decay=weight_decay, momentum=momentum)
    mine, _ = train(rule("rmsprop", flags={"centered": centered}), rates)
    theirs = train_with_torch(
        lambda p: torch.optim.RMSprop(
            p, alpha=0.95, eps=1e-7, weight_decay=weight_decay, momentum=momentum, centered=centered
        ),
        rates,
    )
    assert_same_bits(mine, theirs)


def test_sgd_with_torch_dampening_has_the_bits_of_torch():
    rates = decaying(momentum=0.9, dampening=0.3, weight_decay=0.1, nesterov=0.0)
    mine, _ = train(rule("sgd", flags={"torch_dampening": True}), rates)
    theirs = train_with_torch(
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.3, weight_decay=0.1), rates
    )
    assert_same_bits(mine, theirs)


def reference(step_of, rates, steps=20, start=0.0):
    """Run a formula in float64: step_of(weight, gradient, memory, rates, step) -> weight."""
    results = []
    for index, weight in enumerate(parameters(torch.float64)):
        memory = {
            "s": torch.full_like(weight, start),
            "v": torch.zeros_like(weight),
            "m": torch.zeros_like(weight),
        }
        for step in range(steps):
            weight = step_of(weight, gradients(step)[index].double(), memory, rates(step), step + 1)
        results.append(weight)
    return results


def assert_close(mine, expected, **tolerance):
    for a, b in zip(mine, expected, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), **tolerance)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_dampens_the_first_step_too(momentum):
    def formula(w, g, memory, r, step):
        memory["v"] = r["momentum"] * memory["v"] + (1 - r["dampening"]) * (g + r["weight_decay"] * w)
        return w - r["lr"] * memory["v"]

    rates = decaying(momentum=momentum, dampening=0.3, weight_decay=0.1, nesterov=0.0)
    mine, _ = train(rule("sgd"), rates)
    assert_close(mine, reference(formula, rates), rtol=1e-5, atol=1e-6)


def test_momentum_that_starts_later_finds_its_velocity():
    optimizer, value = rule("sgd"), torch.ones(2)
    states = [init_state(optimizer, value)]
    assert states == [{}]
    for momentum in (0.0, 0.5, 0.5):
        group = {"lr": 1.0, "momentum": momentum, "dampening": 0.0, "weight_decay": 0.0}
        update(optimizer, group, [value], [torch.ones(2)], states)
    assert value.tolist() == [1 - 1 - 1 - 1.5] * 2


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_without_bias_correction_the_moments_are_used_as_they_are(kind):
    def formula(w, g, memory, r, step):
        if kind == "adam":
            g = g + r["weight_decay"] * w
        else:
            w = w - r["lr"] * r["weight_decay"] * w
        memory["m"] = r["beta1"] * memory["m"] + (1 - r["beta1"]) * g
        memory["v"] = r["beta2"] * memory["v"] + (1 - r["beta2"]) * g * g
        return w - r["lr"] * memory["m"] / (memory["v"].sqrt() + r["eps"])

    rates = decaying(beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.1)
    mine, _ = train(rule(kind, flags={"bias_correction": False}), rates)
    assert_close(mine, reference(formula, rates), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_tensorflow_rmsprop_starts_at_one_with_eps_in_the_root_and_lr_in_the_buffer(momentum, centered):
    def formula(w, g, memory, r, step):
        g = g + r["weight_decay"] * w
        memory["s"] = r["alpha"] * memory["s"] + (1 - r["alpha"]) * g * g
        memory["m"] = r["alpha"] * memory["m"] + (1 - r["alpha"]) * g
        spread = memory["s"] - memory["m"] ** 2 if centered else memory["s"]
        memory["v"] = r["momentum"] * memory["v"] + r["lr"] * g / (spread + r["eps"]).sqrt()
        return w - memory["v"]

    rates = decaying(alpha=0.9, eps=1e-3, weight_decay=0.1, momentum=momentum)
    mine, _ = train(rule("rmsprop", flags={"use_tf_variant": True, "centered": centered}), rates)
    assert_close(mine, reference(formula, rates, start=1.0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("max_weight_norm", [65500.0, 2.0])
def test_lamb_scales_each_step_by_the_norm_of_its_weight(max_weight_norm, bias_correction):
    def formula(w, g, memory, r, step):
        memory["m"] = r["beta1"] * memory["m"] + (1 - r["beta1"]) * g
        memory["v"] = r["beta2"] * memory["v"] + (1 - r["beta2"]) * g * g
        m, v = memory["m"], memory["v"]
        if bias_correction:
            m, v = m / (1 - r["beta1"] ** step), v / (1 - r["beta2"] ** step)
        u = m / (v.sqrt() + r["eps"]) + r["weight_decay"] * w
        return w - r["lr"] * w.norm().clamp(max=r["max_weight_norm"]) / u.norm() * u

    rates = decaying(beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.01, max_weight_norm=max_weight_norm)
    mine, _ = train(rule("lamb", flags={"bias_correction": bias_correction}), rates)
    assert_close(mine, reference(formula, rates), rtol=1e-4, atol=1e-5)


def test_lamb_trusts_a_weight_that_is_zero_with_one():
    optimizer, value = rule("lamb"), torch.zeros(3)
    group = {"lr": 0.5, "beta1": 0.9, "beta2": 0.9, "eps": 0.0, "weight_decay": 0.0, "max_weight_norm": 10.0}
    update(optimizer, group, [value], [torch.ones(3)], [init_state(optimizer, value)])
    torch.testing.assert_close(value, torch.full((3,), -0.5))


ADAMW = decaying(beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)


def test_half_weights_are_updated_in_float_and_rounded_once():
    optimizer = rule("adamw")
    half = [value.half() for value in parameters()]
    states = [init_state(optimizer, value) for value in half]
    assert {state["exp_avg_sq"].dtype for state in states} == {torch.float32}
    given = [gradient.half() for gradient in gradients(0)]

    wide = [value.float() for value in half]
    wide_states = [init_state(optimizer, value) for value in wide]
    update(optimizer, ADAMW(0), wide, [gradient.float() for gradient in given], wide_states)

    update(optimizer, ADAMW(0), half, given, states)
    assert_same_bits(half, [value.half() for value in wide])
    assert_same_bits([state["exp_avg_sq"] for state in states], [s["exp_avg_sq"] for s in wide_states])


def test_half_weights_stay_finite_under_tiny_gradients():
    optimizer, value = rule("adamw"), torch.ones(4, dtype=torch.float16)
    states = [init_state(optimizer, value)]
    for step in range(20):
        update(optimizer, ADAMW(step), [value], [torch.full((4,), 1e-7, dtype=torch.float16)], states)
    assert torch.isfinite(value).all()
    assert (value < 1).all()


@pytest.mark.parametrize("kind", ["sgd", "adamw", "lamb"])
def test_states_keep_the_dtype_that_was_asked_for(kind):
    types = {"momentum_buffer": torch.float16} if kind == "sgd" else {"exp_avg": torch.float16}
    rates = decaying(momentum=0.9, beta1=0.9, beta2=0.9, eps=1e-4, weight_decay=0.0, max_weight_norm=65500.0)
    mine, states = train(rule(kind, state_types=types), rates, steps=3)
    wide, _ = train(rule(kind), rates, steps=3)
    name = next(iter(types))
    assert {state[name].dtype for state in states} == {torch.float16}
    assert_close(mine, wide, rtol=1e-2, atol=1e-2)


def test_stochastic_rounding_lets_updates_below_half_an_ulp_add_up():
    optimizer = rule("sgd")
    group = {"lr": 1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}
    nearest, random = torch.ones(1000, dtype=torch.float16), torch.ones(1000, dtype=torch.float16)
    for step in range(100):
        update(optimizer, group, [nearest], [torch.full((1000,), -1e-4)], [{}])
        update(optimizer, group, [random], [torch.full((1000,), -1e-4)], [{}], [step])
    assert nearest.float().mean().item() == 1.0
    assert random.float().mean().item() == pytest.approx(1.01, abs=3e-4)


def test_a_step_is_a_float32_scalar_on_the_cpu():
    step = init_state(rule("adam"), torch.ones(3, dtype=torch.float16))["step"]
    assert (step.dtype, step.shape, step.device.type) == (torch.float32, (), "cpu")
