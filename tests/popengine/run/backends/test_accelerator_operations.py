"""What is captured for a GPU runs on one: each operation has a kernel there.

Without a GPU, two things can be held against it: torch's own list of kernels, and fake tensors that say they are
on a GPU, which refuse to be mixed with others. Fake tensors have no numbers.
"""

import functools
from pathlib import Path

import pytest
import torch
import torchgen
from device_models import ROWS, Function, everything
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves

from popengine.compile.capture import capture
from popengine.compile.partition import partition
from popengine.run.backends.eager import _replacement_on_accelerator, build, operation_of
from popengine.settings import Strategy

GPU = torch.device("cuda")
aten = torch.ops.aten
# Fake tensors can't run these: torch has no shape function for them, or one that wants a driver.
NOT_AS_FAKES = ("MultiMarginLoss", "MultiLabelMarginLoss", "one dimension")


@functools.cache
def listed():
    """The entries of torch's list of native functions, by name."""
    yaml = pytest.importorskip("yaml")
    text = (Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml").read_text()
    entries = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    found = {entry["func"].partition("(")[0]: entry for entry in entries}
    generated = {
        name.strip(): entry for entry in entries for name in str(entry.get("autogen", "")).split(",")
    }
    return {**generated, **found}


def has_kernel(operation):
    """Whether torch lists a kernel for GPUs, or one for all devices."""
    if operation.namespace != "aten":
        return True  # ours are made of others
    entry = listed()[operation.name().removeprefix("aten::")]
    entry = listed().get(entry.get("structured_delegate"), entry)
    kernels = entry.get("dispatch")
    if kernels is None or "ufunc_inner_loop" in entry:
        return True
    keys = {key.strip() for several in kernels for key in several.split(",")}
    return "CUDA" in keys or any(key.startswith("Composite") for key in keys)


def pieces_of(module, samples, training, device="cuda"):
    """The module's graph and its partition into one stage; its loss is the mean of what it returns."""

    def forward(inputs):
        first = tree_leaves(module(*inputs))[0].float()
        return [first, nn.functional.mse_loss(first, torch.zeros_like(first))] if training else [first]

    graph = capture(module.train(training), forward, list(samples), training=training, device=device)
    return graph, partition(graph, Strategy())


def run_on_a_gpu(graph, parts):
    """What the pieces write, as fake tensors; and what the graph says of it."""
    described = {node.name: node.meta["val"] for node in graph.code.nodes if "val" in node.meta}

    def draw(operation, key, place, *args, **kwargs):
        return (_replacement_on_accelerator(operation, GPU) or operation)(*args, **kwargs)

    with FakeTensorMode(), torch.inference_mode():
        values = {
            slot.name: torch.empty_strided(
                slot.shape, described[slot.name].stride(), dtype=slot.dtype, device=GPU
            )
            for slot in graph.slots
        }
        for piece in parts.pieces:
            code = build(piece, device=GPU, draw=draw)
            key = [0] if piece.draws else []
            values.update(
                zip(piece.writes, code([*(values[name] for name in piece.reads), *key]), strict=True)
            )
    return values, described


MODELS = list(everything())


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model[0])
def test_a_captured_model_runs_on_a_gpu(model, training):
    name, module, *samples = model
    graph, parts = pieces_of(module, samples, training)
    called = {name for piece in parts.pieces for name in piece.calls}
    assert [name for name in called if not has_kernel(operation_of(name))] == []
    if name in NOT_AS_FAKES:
        return
    values, described = run_on_a_gpu(graph, parts)
    assert {value.device.type for value in values.values()} == {"cuda"}
    for result in graph.results:
        assert values[result.name].shape == described[result.name].shape
        assert values[result.name].dtype == described[result.name].dtype


@pytest.mark.parametrize(
    ("layer", "samples", "operation"),
    [
        (nn.LSTM(5, 6), [ROWS[None]], "aten.mkldnn_rnn_layer.default"),
        (
            Function(nn.functional.scaled_dot_product_attention),
            [torch.randn(2, 4, 6, 8)] * 3,
            "aten._scaled_dot_product_flash_attention_for_cpu.default",
        ),
    ],
    ids=["recurrent", "attention"],
)
def test_what_is_one_operation_on_cpus_only_is_several_elsewhere(layer, samples, operation):
    names = {}
    for device in ("cpu", "cuda"):
        _, parts = pieces_of(layer, samples, training=False, device=device)
        names[device] = parts.pieces[0].calls
    assert operation in names["cpu"]
    assert operation not in names["cuda"]
    assert torch.backends.mkldnn.enabled
    assert torch.backends.cuda.flash_sdp_enabled()


def on_gpu(operation):
    function = _replacement_on_accelerator(operation, GPU)
    assert function is not None
    return function


@pytest.mark.parametrize(
    ("operation", "args", "kwargs"),
    [
        (aten.zeros.default, ([2],), {"device": torch.device("cpu"), "pin_memory": False}),
        (aten.full.default, ([], 0.5), {"dtype": torch.float32, "device": torch.device("cpu")}),
        (aten.arange.start, (1, 4), {}),
        (aten.scalar_tensor.default, (3,), {"device": torch.device("cpu")}),
        (aten.rand.default, ([2],), {"device": torch.device("cpu")}),
        (aten.randint.low, (0, 4, [2]), {}),
        (aten.eye.default, (3,), {}),
    ],
    ids=str,
)
def test_an_operation_that_makes_a_tensor_makes_it_on_the_device(operation, args, kwargs):
    with FakeTensorMode():
        assert on_gpu(operation)(*args, **kwargs).device.type == "cuda"


def test_a_cast_to_the_device_of_the_capture_stays_where_it_is():
    with FakeTensorMode():
        value = torch.empty(3, device=GPU)
        cast = on_gpu(aten._to_copy.default)
        assert cast(value, dtype=torch.half, device=torch.device("cpu")).device.type == "cuda"


def test_any_other_operation_is_itself():
    assert _replacement_on_accelerator(aten.addmv.default, GPU) is None


def test_a_view_of_what_lies_otherwise_in_memory_is_a_copy():
    view = on_gpu(aten.view.default)
    assert torch.equal(view(ROWS.t(), [20]), ROWS.t().reshape(20))
