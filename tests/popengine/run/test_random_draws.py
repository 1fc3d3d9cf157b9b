"""Random numbers belong to their place, and not to who draws them or in which order."""

import pytest
import torch

from popengine.run.random_draws import draw, hash_integers

aten = torch.ops.aten
CALLS = [
    (aten.rand.default, ([8],), {}),
    (aten.randn.default, ([8],), {"dtype": torch.float64}),
    (aten.randint.default, (1000, [8]), {}),
    (aten.randint.low, (5, 1000, [8]), {}),
    (aten.randperm.default, (50,), {}),
    (aten.rand_like.default, (torch.zeros(8),), {}),
    (aten.randn_like.default, (torch.zeros(8),), {}),
    (aten.randint_like.default, (torch.zeros(8), 1000), {}),
    (aten.randint_like.low_dtype, (torch.zeros(8), 5, 1000), {}),
    (aten.bernoulli.p, (torch.zeros(64), 0.5), {}),
    (aten.bernoulli.default, (torch.full((64,), 0.5),), {}),
    (aten.multinomial.default, (torch.ones(100), 8), {}),
    (aten.normal.Tensor_float, (torch.zeros(8), 1.0), {}),
    (aten.uniform.default, (torch.zeros(8),), {}),
    (aten.exponential.default, (torch.zeros(8),), {}),
]


@pytest.mark.parametrize(("operation", "args", "kwargs"), CALLS, ids=lambda value: str(value)[:24])
def test_a_draw_depends_on_its_key_and_place_alone(operation, args, kwargs):
    first = draw(operation, 1, 2, *args, **kwargs)
    draw(operation, 5, 5, *args, **kwargs)
    assert torch.equal(first, draw(operation, 1, 2, *args, **kwargs))
    assert not torch.equal(first, draw(operation, 1, 3, *args, **kwargs))
    assert not torch.equal(first, draw(operation, 2, 2, *args, **kwargs))


@torch.library.custom_op("draw_tests::noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def noise(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x)


def test_a_custom_operation_that_takes_no_generator_gets_torchs_own_seeded():
    operation = torch.ops.draw_tests.noise.default
    x = torch.zeros(8)
    assert torch.equal(draw(operation, 1, 2, x), draw(operation, 1, 2, x))
    assert not torch.equal(draw(operation, 1, 2, x), draw(operation, 1, 3, x))
    continued = [torch.Generator()] * 2  # as on an accelerator, from one micro-batch to the next
    assert not torch.equal(draw(operation, iter(continued), 2, x), draw(operation, iter(continued), 2, x))


def test_dropout_keeps_the_asked_share_and_scales_it():
    value, kept = draw(aten.native_dropout.default, 1, 2, torch.ones(10_000), 0.25, True)
    assert 0.74 < kept.float().mean() < 0.76
    assert torch.equal(value, kept / 0.75)


def test_numbers_next_to_each_other_mix_to_unlike_ones():
    found = {
        hash_integers(seed, step, micro_batch)
        for seed in range(10)
        for step in range(10)
        for micro_batch in range(10)
    }
    assert len(found) == 1000
    assert hash_integers(1, 2) != hash_integers(2, 1)
    # The first numbers of the published splitmix64, begun at 0 and at 1.
    assert (hash_integers(0), hash_integers(1)) == (0xE220A8397B1DCDAF, 0x910A2DEC89025CC1)
    assert all(0 <= number < 2**64 for number in found)
