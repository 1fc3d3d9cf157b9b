"""Which kernels half precision takes: measured once, float32 only where it wins clearly."""

import logging

import pytest
import torch

from popengine.run.backends import half

aten = torch.ops.aten


@pytest.fixture
def seconds(monkeypatch):
    """What samples take, in turns natively and through float32."""
    found = []
    monkeypatch.setattr(half, "_best", lambda work: (work(), found.pop(0))[1])
    half._measured.cache_clear()
    yield found
    half._measured.cache_clear()


def test_float32_is_used_where_it_takes_less_than_half_the_time(seconds, caplog):
    caplog.set_level(logging.INFO, "popengine")
    seconds += [0.004, 0.001]
    assert half.faster_in_float32(aten.mm.default, torch.float16)
    assert "a sample of matrix products in torch.float16 takes 4.000 ms natively and 1.000 ms" in caplog.text
    seconds += [0.004, 0.003]
    assert not half.faster_in_float32(aten.mm.default, torch.bfloat16)


def test_one_measurement_answers_for_all_products_of_a_kind(seconds):
    seconds += [0.004, 0.001]
    for operation in (aten.mm, aten.addmm, aten.bmm):
        assert half.faster_in_float32(operation.default, torch.float16)
    assert seconds == []


@pytest.mark.parametrize(
    "operation",
    [
        aten.mm.default,
        aten.convolution.default,
        aten.convolution_backward.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    ],
)
def test_every_kind_has_a_sample_that_runs_and_leaves_random_numbers_alone(operation):
    half._measured.cache_clear()
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    assert half.faster_in_float32(operation, torch.float16) in (True, False)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
