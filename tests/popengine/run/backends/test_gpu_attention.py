"""Attention without the CPU's kernel computes what that kernel computes."""

from typing import Any

import pytest
import torch

from popengine.run.backends import gpu_attention

aten = torch.ops.aten
torch.manual_seed(0)
HEADS = torch.randn(3, 2, 4, 7, 8)  # query, key and value
LOOKED_AT = torch.rand(2, 1, 7, 7) > 0.3
BIAS = torch.zeros(2, 1, 7, 7).masked_fill(~LOOKED_AT, float("-inf"))
CASES: dict[str, Any] = {
    "all": (HEADS, {}),
    "a scale": (HEADS, {"scale": 0.1}),
    "causal": (HEADS, {"is_causal": True}),
    "a mask": (HEADS, {"attn_mask": BIAS}),
    "a mask for all batches": (HEADS, {"attn_mask": BIAS[0, 0]}),
    "a mask of keys": (HEADS, {"attn_mask": BIAS[:, :, :1]}),
    "a row that sees nothing": (HEADS, {"attn_mask": torch.full((7, 7), -float("inf")).triu(0)}),
    "keys that heads share": ((HEADS[0], HEADS[1, :, :2], HEADS[2, :, :2]), {}),
    "more keys than queries": ((HEADS[0, :, :, :5], HEADS[1], HEADS[2]), {}),
    "by position": (HEADS.transpose(2, 3).contiguous().transpose(2, 3), {}),
    "parts of one product": (torch.randn(2, 7, 4, 24).transpose(1, 2).chunk(3, -1), {}),
    "half": (HEADS.bfloat16(), {"attn_mask": BIAS.bfloat16()}),
    "double": (HEADS.double(), {}),
}


@pytest.fixture(autouse=True)
def _without_a_fused_kernel(monkeypatch):
    monkeypatch.setattr(gpu_attention, "choose", lambda *given: "math")


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_attention_and_its_gradients_are_those_of_the_cpus_kernel(case):
    (query, key, value), options = case
    causal = options.get("is_causal", False)
    more = {name: value for name, value in options.items() if name != "is_causal"}
    # float32 sums in another order; in bfloat16 (8 bits) the last bit of a result may differ
    close: Any = (
        {"rtol": 2e-2, "atol": 2e-2} if query.dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    )
    wanted, sums = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, **more)
    output, own_sums = gpu_attention.forward(query, key, value, 0.0, causal, **more)
    torch.testing.assert_close(output, wanted, **close)
    assert output.stride() == wanted.stride()
    gradient = torch.randn_like(wanted)
    wanted_gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, wanted, sums, 0.0, causal, **more
    )
    gradients = gpu_attention.backward(gradient, query, key, value, output, own_sums, 0.0, causal, **more)
    for found, expected in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(found, expected, **close)
        assert found.stride() == expected.stride()


@pytest.mark.parametrize("length", [7, 8])
@pytest.mark.parametrize("shape", [(7, 1), (1, 1, 1, 0), (2, 4, 7, 0), (2, 1, 1, 0), (7, 0)], ids=str)
def test_a_mask_is_given_to_kernels_for_each_score_with_aligned_rows(shape, length):
    mask = torch.randn(tuple(size or length for size in shape))
    bias = gpu_attention._bias(mask, torch.empty(2, 4, 7, 8), torch.empty(2, 4, length, 8))
    assert bias is not None
    assert bias.shape == (2, 4, 7, length)
    assert torch.equal(bias, mask.expand(2, 4, 7, length))
    assert all(step % 8 == 0 for step in bias.stride()[:-1])
    assert bias.stride(-1) == 1


def test_kernels_are_given_dense_rows():
    columns = HEADS.transpose(3, 4).contiguous().transpose(3, 4)
    assert all(operand.stride(-1) == 1 for operand in gpu_attention._operands(*columns))
    (query, key, value), (q, k, v) = columns, HEADS
    expected, _ = gpu_attention.forward(q, k, v)
    torch.testing.assert_close(gpu_attention.forward(query, key, value)[0], expected)
