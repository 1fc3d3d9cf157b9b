"""The engine on a real GPU (`make test-gpu`): near the CPU's numbers, and the same bits in all layouts.

Without a GPU these tests run on `late_device.py`, so that they fail on a GPU only for what is different there.
"""

import math

import pytest
import torch
from small_engines import LAYOUTS, NAMES, assert_same, engine_of, on_devices, planned, rates, trained
from torch.nn import functional

from late_device import late_devices
from popengine.run import devices
from popengine.run.engine import Engine

GPU = torch.device("cuda", 0)


def on_gpu(**options):
    return Engine(*planned(device="cuda", **options))


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    if torch.cuda.is_available():
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
        yield
    else:
        with late_devices(monkeypatch, count=4):
            yield


def assert_near(one, two):
    # The gradient of a bias before BatchNorm is a rounding error, which Adam scales up.
    one, two = ({k: v for k, v in found.items() if not k.startswith(_BIAS)} for found in (one, two))
    torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


_BIAS = ("a.bias", "norm.running_mean")


# A GPU draws other random numbers.
@pytest.mark.parametrize("name", [name for name, options in LAYOUTS.items() if "dropout" not in options])
def test_each_layout_computes_what_the_cpu_computes(name):
    one, two = trained(on_gpu(**LAYOUTS[name])), trained(engine_of(**LAYOUTS[name]))
    assert_near(one, two)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_layouts_have_the_same_bits(dropout):
    sharded = {"ipus": (0, 1, 0, 1), "order": "sharded"}
    layouts = [{}, {"ipus": (0, 0, 0, 0)}, sharded, {"order": "gpipe"}, {"recompute": True}]
    first, *others = (trained(on_gpu(dropout=dropout, **layout)) for layout in layouts)
    for other in others:
        assert_same(other, first)


@pytest.mark.parametrize("options", [{}, {"dropout": 0.5}, {"kind": "adamw"}, {"counts": (2, 8, 2)}], ids=str)
def test_replays_have_the_bits_of_steps_that_are_started_operation_by_operation(options, monkeypatch):
    engine = on_gpu(**options)
    one = trained(engine)
    assert engine.queue._captured._graphs
    monkeypatch.setattr("popengine.run.devices.new_graph", lambda device: None)
    assert_same(one, trained(on_gpu(**options)))


def test_rates_that_change_are_used_in_replays():
    hyper = [rates("adamw", lr=lr) for lr in (0.1, 0.01, 0.2)]
    one, two = (trained(make(kind="adamw"), hyper=hyper) for make in (on_gpu, engine_of))
    assert_near(one, two)


# A step on several devices has the bits of one GPU only if no ipu is on the CPU.
@pytest.mark.parametrize("which", NAMES)
@pytest.mark.parametrize("name", ["pipelined", "adam", "replicas", "clipping", "recomputation", "inference"])
def test_ipus_on_several_devices_compute_what_the_cpu_computes(name, which):
    if devices.accelerator_count() < len([name for name in NAMES[which] if name != "cpu"]):
        pytest.skip("fewer GPUs")
    options = {**LAYOUTS[name], "dropout": 0.0}
    several = trained(on_devices(which, **options))
    assert_near(several, trained(engine_of(**options)))
    if "cpu" not in NAMES[which]:
        assert_same(several, trained(on_gpu(**options)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [True, False])
def test_the_operation_of_attention_has_the_gradients_of_plain_pytorch(dtype, is_causal):
    parts = [torch.randn(2, 4, 64, 32, device=GPU, dtype=dtype, requires_grad=True) for _ in range(3)]
    expected = functional.scaled_dot_product_attention(*parts, is_causal=is_causal)
    (found,) = torch.ops.popengine.attention(parts, [float(is_causal), math.nan, 0.0])
    torch.testing.assert_close(found, expected)
    gradient = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad(output, parts, gradient) for output in (found, expected))
    torch.testing.assert_close(ours, theirs)
