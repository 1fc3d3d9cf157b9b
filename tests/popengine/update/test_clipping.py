"""Clipping equals torch.nn.utils.clip_grad_norm_, however the gradients are spread over stages."""

import pytest
import torch

from popengine.update.gradients import clamp_, clipping_factor, norm, scale_

SHAPES = [(), (7,), (13, 5), (3, 4, 2)]


def gradients():
    torch.manual_seed(0)
    return [torch.randn(shape) for shape in SHAPES]


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_two_stages_clip_to_the_bits_of_torch(max_norm):
    values = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    for value, gradient in zip(values, gradients(), strict=True):
        value.grad = gradient
    expected = torch.nn.utils.clip_grad_norm_(values, max_norm)

    mine = gradients()
    first, second = mine[:1], mine[1:]
    total = torch.linalg.vector_norm(torch.stack([norm(value) for value in (*first, *second)]))
    scale_(second, clipping_factor(total, max_norm))
    scale_(first, clipping_factor(total, max_norm))
    assert torch.equal(total, expected)
    for gradient, value in zip(mine, values, strict=True):
        assert value.grad is not None
        assert torch.equal(gradient, value.grad)


def test_the_norm_of_half_gradients_does_not_overflow():
    large = torch.full((100,), 60000.0, dtype=torch.float16)
    total = norm(large)
    assert total.item() == pytest.approx(600000.0)
    scale_([large], clipping_factor(total, 10.0))
    torch.testing.assert_close(large, torch.ones(100, dtype=torch.float16))


def test_clipping_by_value_has_the_bits_of_torch():
    torch.manual_seed(1)
    parameters = [torch.nn.Parameter(torch.zeros(5)), torch.nn.Parameter(torch.zeros(2, 3))]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    gradients = [parameter.grad.clone() for parameter in parameters]
    torch.nn.utils.clip_grad_value_(parameters, 0.3)
    clamp_(gradients, 0.3)
    assert all(torch.equal(g, p.grad) for g, p in zip(gradients, parameters, strict=True))
    assert gradients[0].abs().max() == 0.3
