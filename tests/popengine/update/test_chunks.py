"""Updates in chunks: every element once, cut by the parameter alone, with the bits of the whole."""

import pytest
import torch

from popengine.settings import Optimizer
from popengine.update.group_update import CHUNK, ParameterUpdate, cut_into_chunks, init_state, update

ADAM = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}


def part(*shape):
    value = torch.empty(shape)
    return ParameterUpdate(value, torch.empty_like(value), {})


def test_large_parameters_are_cut_and_small_neighbours_share_a_chunk():
    parts = [part(3), part(2 * CHUNK + 5), part(7), part(2, 2)]
    assert cut_into_chunks(parts) == [
        [(0, 0, 0)],
        [(1, 0, CHUNK)],
        [(1, CHUNK, 2 * CHUNK)],
        [(1, 2 * CHUNK, 2 * CHUNK + 5), (2, 0, 0), (3, 0, 0)],
    ]


def test_tensors_that_lie_in_memory_in_different_orders_are_not_cut():
    weight = torch.empty(1024, 512)
    parts = [ParameterUpdate(weight, torch.empty(512, 1024).t(), {})]
    assert cut_into_chunks(parts) == [[(0, 0, 0)]]
    images = torch.empty(256, 256, 5, 5).to(memory_format=torch.channels_last)
    parts = [ParameterUpdate(images, torch.empty_like(images), {})]
    assert len(cut_into_chunks(parts)) == 2


def trained(kind, rates, weights, dtype=torch.float32, seed=None, **fields):
    """Weights after 3 updates, all at once."""
    optimizer = Optimizer(kind, {}, **fields)
    weights = [weight.to(dtype) for weight in weights]
    states = [init_state(optimizer, weight) for weight in weights]
    for step in range(3):
        torch.manual_seed(step)
        gradients = [torch.randn_like(weight.float()).to(dtype) for weight in weights]
        seeds = None if seed is None else [seed + step for _ in weights]
        update(optimizer, rates, weights, gradients, states, seeds)
    return weights


def test_half_weights_have_the_bits_of_an_update_in_one_chunk(monkeypatch):
    torch.manual_seed(0)
    weights = [torch.randn(CHUNK + 77)]
    mine = trained("adamw", ADAM, weights, torch.float16)
    monkeypatch.setattr("popengine.update.group_update.CHUNK", 1 << 30)
    assert torch.equal(mine[0], trained("adamw", ADAM, weights, torch.float16)[0])


def test_stochastic_rounding_does_not_depend_on_what_is_updated_beside():
    torch.manual_seed(0)
    large = torch.randn(CHUNK + 77)
    (alone,) = trained("adamw", ADAM, [large], torch.float16, seed=5)
    assert torch.equal(alone, trained("adamw", ADAM, [large, torch.randn(10)], torch.float16, seed=5)[0])
    assert not torch.equal(alone, trained("adamw", ADAM, [large], torch.float16, seed=6)[0])


@pytest.mark.parametrize("kind", ["lamb", "lars"])
def test_norms_do_not_depend_on_what_is_updated_beside(kind):
    """Layouts put other neighbours beside a parameter, and its norm may have no other bits for it."""
    rates = {**ADAM, "max_weight_norm": 10.0, "momentum": 0.9, "eta": 0.01}
    torch.manual_seed(0)
    large = torch.randn(300, 300)
    (alone,) = trained(kind, rates, [large.clone()])
    beside = trained(kind, rates, [large.clone(), torch.randn(10), torch.randn(200, 400)])
    assert torch.equal(alone, beside[0])
    torch.testing.assert_close(alone, trained(kind, rates, [large.double()], torch.float64)[0].float())
