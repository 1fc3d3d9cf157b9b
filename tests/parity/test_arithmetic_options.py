"""Every option that changes arithmetic, over 20 pipelined updates; and those that must not change it."""

from functools import partial

import pytest
import torch
from parity_models import Digits
from parity_rules import ACCUMULATION, ROWS, UPDATES, Formula, plain, trained

import poptorch
from poptorch import optim

SGD = partial(optim.SGD, lr=0.05, momentum=0.9)
PLAIN_SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def assert_same(given, expected):
    assert [name for name, value in expected.items() if not torch.equal(given[name], value)] == []


def assert_near(given, expected, bound):
    for name, value in expected.items():
        torch.testing.assert_close(given[name], value, rtol=0, atol=bound, msg=lambda t, n=name: f"{n}: {t}")


def moved(weights, reference):
    return max((weights[name] - value).abs().max().item() for name, value in reference.items())


def sum_reduction(options):
    options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)


def test_sum_adds_up_the_micro_batches_and_mean_divides_by_their_number():
    slow = partial(torch.optim.SGD, lr=0.01)
    assert_same(trained(slow, sum_reduction), plain(slow, mean=False))
    assert_same(trained(slow), plain(slow))


@pytest.mark.parametrize("optimizer", [SGD, partial(optim.Adam, lr=0.01), partial(optim.AdamW, lr=0.01)])
def test_a_gradient_is_clipped_by_the_norm_of_all_stages(optimizer):
    twin = partial(getattr(torch.optim, optimizer.func.__name__), **optimizer.keywords)
    assert_same(trained(partial(optimizer, max_grad_norm=0.05)), plain(twin, clip=0.05))


def test_any_optimizer_may_carry_a_bound_on_each_element_of_its_gradients():
    def bounded(parameters):
        optimizer = PLAIN_SGD(parameters)
        optimizer.max_grad_value = 0.003
        return optimizer

    expected = plain(PLAIN_SGD, clip_value=0.003)
    assert_same(trained(bounded), expected)
    assert moved(expected, plain(PLAIN_SGD)) > 1e-3  # else nothing is tested


def test_a_loss_scale_leaves_the_updates_as_they_are():
    expected = plain(PLAIN_SGD)
    assert_same(trained(partial(SGD, loss_scaling=1024.0)), expected)
    # 1000 is no power of two: each product and quotient is rounded, at 6e-8 of its size.
    assert_near(trained(partial(SGD, loss_scaling=1000.0)), expected, 2e-5)


def test_gradients_are_added_up_in_the_accumulators_type():
    exact = plain(PLAIN_SGD)
    half = plain(PLAIN_SGD, sums=torch.float16)
    given = trained(partial(SGD, accum_type=torch.float16, use_combined_accum=True))
    assert moved(half, exact) > 5e-5  # else nothing is tested
    assert_near(given, half, 1e-6)


def rounded_velocity(lr, momentum):
    """SGD whose velocity is kept in float16, with torch's own sums: other float32 sums may round to another float16."""

    def rule(w, g, state):
        velocity = state.get("v", torch.zeros_like(w)).float().mul_(momentum).add_(g)
        state["v"] = velocity.half()
        return w.add(velocity, alpha=-lr)

    return rule


def test_a_state_is_kept_in_its_type():
    expected = plain(lambda parameters: Formula(parameters, rounded_velocity(0.05, 0.9)))
    given = trained(partial(SGD, velocity_accum_type=torch.float16))
    assert moved(expected, plain(PLAIN_SGD)) > 1e-5  # else nothing is tested
    assert_same(given, expected)


def test_automatic_loss_scaling_changes_no_bit():
    def automatic(options):
        options.Training.setAutomaticLossScaling(True)

    # It starts at 1/1024 and doubles with every update: powers of two throughout.
    assert_same(trained(partial(SGD, loss_scaling=2.0**-10), automatic), plain(PLAIN_SGD))


def test_recomputation_changes_no_bit():
    def recompute(options):
        options._Popart.set("autoRecomputation", 3)

    assert_same(trained(SGD, recompute), plain(PLAIN_SGD))


class Half(Digits):
    """Weights and activations in half precision."""

    def __init__(self):
        super().__init__()
        self.half()

    @staticmethod
    def data(rows):
        images, labels = Digits.data(rows)
        return [images.half(), labels]


class Autocast(Digits):
    """Products in half precision, weights in float32. On the host as torch does it there."""

    def forward(self, images, labels):
        host = torch.autocast("cpu", torch.float16, enabled=not poptorch.isRunningOnIpu())
        with poptorch.autocast(), host:
            scores = self.d(self.c(self.b(self.a(images))))
        return scores, self.loss(scores.float(), labels)


def in_float(w, g, state):
    """SGD on half weights: computed in float32, rounded once."""
    state["v"] = 0.9 * state.get("v", 0) + g.float()
    return (w.float() - 0.05 * state["v"]).half()


def native(options):
    options.Precision.halfKernels("native")


def in_float32(options):
    options.Precision.halfKernels("float32")


def test_half_weights_are_updated_in_float_and_rounded_once():
    expected = plain(lambda parameters: Formula(parameters, in_float), model=Half)
    given = trained(SGD, native, model=Half)
    assert all(value.dtype == torch.float16 for value in given.values())
    # A last bit of float16 weights below 1/2 is 2**-12; one that falls the other way carries over.
    assert_near(given, expected, 4 * 2.0**-12)


def test_what_is_computed_in_float32_follows_the_processors_features_and_is_said(monkeypatch, caplog):
    monkeypatch.setattr("popengine.compile.rewriting.partials.cpu_features", lambda: {"avx512_fp16": True})
    caplog.set_level("INFO", "poptorch::python")
    assert_same(trained(SGD, model=Half), trained(SGD, native, model=Half))
    monkeypatch.setattr("popengine.compile.rewriting.partials.cpu_features", lambda: {"avx2": True})
    assert "halfKernels auto" not in caplog.text
    assert_same(trained(SGD, model=Half), trained(SGD, in_float32, model=Half))
    assert "halfKernels auto: computed in float32 are addmm of float16, convolution of float16" in caplog.text


def test_autocast_trains_as_torchs_own():
    given, expected = trained(SGD, model=Autocast), plain(PLAIN_SGD, model=Autocast)
    assert moved(expected, plain(PLAIN_SGD)) > 1e-5  # else nothing is cast
    assert_near(given, expected, 1e-3)


SLOW = partial(torch.optim.SGD, lr=0.05)
# Each element of a gradient is the sum of 8 rows of up to 25 places each in another order, which moves it by
# less than 200 half last bits, 1.2e-5 of what is summed; gradients here are below 1/2, the rate is 0.05.
REORDERED = UPDATES * 0.05 * 0.5 * 1.2e-5


def test_four_replicas_train_as_one_with_batches_four_times_as_large():
    assert ROWS * 4 * ACCUMULATION == 32
    one, four = trained(SLOW, rows=4 * ROWS), trained(SLOW, replicas=4)
    assert_near(four, one, REORDERED)
    assert moved(one, plain(SLOW)) > 100 * REORDERED  # of other rows


def test_with_sum_four_replicas_train_with_four_times_the_rate():
    fast = partial(torch.optim.SGD, lr=0.05 / ACCUMULATION / 4)
    assert_near(trained(fast, sum_reduction, replicas=4), trained(SLOW, rows=4 * ROWS), REORDERED)


def test_replicas_add_up_in_the_same_order_in_every_run():
    first, *others = [trained(SGD, replicas=4) for _ in range(3)]
    for other in others:
        assert_same(other, first)
