"""What was captured on the CPU runs on a GPU: each operation has a kernel there or a stand-in.

Without a GPU, two things can be held against it: torch's own list of kernels, and fake tensors that say they are
on a GPU, which refuse to be mixed with others. Fake tensors have no numbers; those are compared in
`test_gpu_attention.py`.
"""

import functools
from pathlib import Path

import pytest
import torch
import torchgen
from device_models import ROWS, everything
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves

from popengine.compile.capture import capture
from popengine.compile.partition import partition
from popengine.errors import Error
from popengine.run.backends import gpu_attention, gpu_operations
from popengine.run.backends.eager import build
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


def has_kernel(operation, device):
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
        return gpu_operations.for_device(operation, GPU)(*args, **kwargs)

    with FakeTensorMode(), torch.inference_mode():
        values = {
            slot.name: torch.empty_strided(
                slot.shape, described[slot.name].stride(), dtype=slot.dtype, device=GPU
            )
            for slot in graph.slots
        }
        for piece in parts.pieces:
            code = build(piece, lambda operation: gpu_operations.for_device(operation, GPU), draw=draw)
            key = [0] if piece.draws else []
            values.update(
                zip(piece.writes, code([*(values[name] for name in piece.reads), *key]), strict=True)
            )
    return values, described


MODELS = list(everything())


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("model", MODELS, ids=[name for name, *_ in MODELS])
def test_a_captured_model_runs_on_a_gpu(model, training, monkeypatch):
    name, module, *samples = model
    graph, parts = pieces_of(module, samples, training)
    assert not gpu_operations.unsupported(parts, GPU, has_kernel)
    if name in NOT_AS_FAKES:
        return
    for kernel in ("flash", "efficient", "math"):
        monkeypatch.setattr(gpu_attention, "choose", lambda *given, kernel=kernel: kernel)
        values, described = run_on_a_gpu(graph, parts)
        assert {value.device.type for value in values.values()} == {"cuda"}
        for result in graph.results:
            assert values[result.name].shape == described[result.name].shape
            assert values[result.name].dtype == described[result.name].dtype


def test_a_recurrent_layer_is_one_operation_on_the_cpu_only():
    names = {}
    for device in ("cpu", "cuda"):
        _, parts = pieces_of(nn.LSTM(5, 6), [ROWS[None]], training=False, device=device)
        names[device] = parts.pieces[0].calls
    assert "aten.mkldnn_rnn_layer.default" in names["cpu"]
    assert "aten.mkldnn_rnn_layer.default" not in names["cuda"]
    assert torch.backends.mkldnn.enabled


def test_what_has_no_kernel_is_an_error_with_its_name_its_line_and_a_way_out(monkeypatch):
    _, parts = pieces_of(nn.LSTM(5, 6), [ROWS[None]], training=True, device="cpu")
    monkeypatch.setattr(gpu_operations, "_has_kernel", has_kernel)
    with pytest.raises(Error) as caught:
        gpu_operations.check(parts, GPU)
    assert "no kernel for a 'cuda' device" in caught.value.message
    assert f"aten.mkldnn_rnn_layer.default at {__file__}:" in caught.value.message
    assert "POPTORCH_DEVICE=cpu" in caught.value.message


def test_a_model_whose_operations_all_run_passes_the_check(monkeypatch):
    _, parts = pieces_of(nn.Linear(5, 2), [ROWS], training=True)
    monkeypatch.setattr(gpu_operations, "_has_kernel", has_kernel)
    gpu_operations.check(parts, GPU)


def test_a_torch_without_kernels_for_gpus_passes_the_check():
    if torch.backends.cuda.is_built():
        pytest.skip("this torch has them")
    _, parts = pieces_of(nn.LSTM(5, 6), [ROWS[None]], training=True, device="cpu")
    gpu_operations.check(parts, GPU)


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
        assert gpu_operations.for_device(operation, GPU)(*args, **kwargs).device.type == "cuda"


def test_a_cast_to_the_device_of_the_capture_stays_where_it_is():
    with FakeTensorMode():
        value = torch.empty(3, device=GPU)
        cast = gpu_operations.for_device(aten._to_copy.default, GPU)
        assert cast(value, dtype=torch.half, device=torch.device("cpu")).device.type == "cuda"


def test_any_other_operation_is_itself():
    assert gpu_operations.for_device(aten.addmv.default, GPU) is aten.addmv.default._op


def test_a_view_of_what_lies_otherwise_in_memory_is_a_copy():
    view = gpu_operations.for_device(aten.view.default, GPU)
    assert torch.equal(view(ROWS.t(), [20]), ROWS.t().reshape(20))
