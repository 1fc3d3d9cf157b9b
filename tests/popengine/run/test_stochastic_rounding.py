"""Stochastic rounding goes to one of the two neighbours, and is right on average."""

import math

import pytest
import torch

from popengine.run.optimizer_step import round_into


def rounded(value, dtype, count=1 << 16):
    source = torch.full((count,), value)
    return round_into(torch.empty(count, dtype=dtype), source, 7)


@pytest.mark.parametrize("value", [0.0, 1.0, -0.5, 65504.0, 2.0**-24, -(2.0**-14), math.inf, -math.inf])
def test_what_half_precision_can_hold_is_left_alone(value):
    assert rounded(value, torch.float16, 100).unique().tolist() == [value]


def test_nan_stays_nan():
    assert rounded(math.nan, torch.float16, 10).isnan().all()


def test_a_float32_target_is_copied_to():
    assert torch.equal(rounded(0.1, torch.float32, 10), torch.full((10,), 0.1))
