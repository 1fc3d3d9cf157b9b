"""The engine on GPUs that are not there: fake tensors instead of theirs, which have a device but no contents.

They refuse operations on two devices, and to be read by the host. So a run proves that nothing stays behind on the
CPU, and that the host reads no value that it would have to wait for. What a GPU computes, it does not.
"""

from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from stand_ins import batch_for, engine_on, rates
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from popengine.compile import compile_graph
from popengine.compile.capture import capture
from popengine.errors import Error
from popengine.run.devices import cuda, of
from popengine.run.engine import Engine
from popengine.run.measure.recorder import Recorder
from popengine.run.state import random_draws
from popengine.settings import Counts, Optimizer, Settings, Strategy

pytestmark = pytest.mark.simulated
GPU = torch.device("cuda", 0)


class Stream:
    """Takes what a stream is told, and does nothing."""

    def __getattr__(self, name):
        return lambda *arguments: None


class Numbers:
    """Generators of a CPU, where fake tensors only look whether there is one."""

    def generator(self, device, key, place):
        assert device.type == "cuda"
        return torch.Generator()

    def refuse(self, operation):
        pass


class Transfers(TorchFunctionMode):
    """Copies between devices, of which fake tensors would ask a driver."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.copy_:
            return args[0]
        if func is torch.Tensor.cpu:
            return torch.zeros(args[0].shape, dtype=args[0].dtype)
        if func is torch.Tensor.to:
            value, *rest = args
            device = next((a for a in rest if isinstance(a, torch.device)), value.device)
            dtype = next((a for a in rest if isinstance(a, torch.dtype)), value.dtype)
            if device != value.device:
                return torch.empty_strided(value.shape, value.stride(), dtype=dtype, device=device)
        return func(*args, **kwargs)


class FakeGpu(cuda.Cuda):
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def _stream(self):
        return Stream()

    def _keep(self, value, stream):
        assert value.device == self.place

    @contextmanager
    def _on(self, stream):
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())  # autograd would ask for a driver
            stack.enter_context(self.mode)
            stack.enter_context(random_draws.drawing_from(Numbers()))
            stack.enter_context(Transfers())
            yield

    def host_empty(self, shape, dtype):
        with _disable_current_modes():
            return torch.zeros(tuple(shape), dtype=dtype)

    def graph(self, generators):
        return SimpleNamespace(capturing=nullcontext, replay=lambda: None)

    def on_host(self, value):
        return value


@pytest.fixture(autouse=True)
def fused_kernels(monkeypatch):
    """Fake tensors know none that takes its rate as a tensor: look that all it needs is on the GPU."""
    calls = []

    def kernel(*lists, lr, **rest):
        calls.append(1)
        assert {value.device for values in lists for value in values} | {lr.device} == {GPU}

    for name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_"):
        monkeypatch.setattr(torch, name, kernel)
    return calls


def devices_of(engine):
    for store in engine.stores.values():
        yield from (value.device for value in store.state.values())
        yield from (value.device for value in store.sums.values())
        yield from (
            v.device for state in store.states.values() for name, v in state.items() if name != "step"
        )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ipus": (0, 0, 0, 0), "dropout": 0.5},
        {"kind": "adamw", "counts": (2, 8, 2), "optimizer": {"max_grad_norm": 1.0}},
        {"kind": "adam", "counts": (2, 8, 2), "shard_optimizer": 0},
        {"kind": "adamw", "off_device": ("optimizer",)},
        {"kind": "lamb", "optimizer": {"bias_correction": False}},
        {"ipus": (0, 1, 0, 1), "mode": "sharded", "outputs": "sum", "recompute": True, "dropout": 0.5},
        {"training": False, "counts": (20, 1, 1)},
    ],
    ids=str,
)
def test_a_run_leaves_nothing_on_the_cpu_and_waits_for_nothing(options, fused_kernels, caplog):
    engine = engine_on(lambda ipu: FakeGpu(0), **options)
    hyper = rates(options.get("kind", "sgd")) if engine.settings.training else None
    for call in range(3):  # as it is, captured, replayed
        engine.run(batch_for(engine, call), hyper)
    assert caplog.text == ""
    states = {GPU} if "off_device" not in options else {GPU, torch.device("cpu")}
    assert set(devices_of(engine)) == states
    assert bool(fused_kernels) == (engine.settings.training and options.get("kind") != "lamb")
    assert {value.device.type for value in engine.read().values()} == {"cpu"}
    assert {v.device.type for state in engine.read_optimizer().values() for v in state.values()} <= {"cpu"}
    engine.close()


def test_automatic_loss_scaling_is_known_to_read_values():
    """The proof above can fail."""
    engine = engine_on(lambda ipu: FakeGpu(0), automatic_loss_scaling=True)
    with pytest.raises(RuntimeError):
        engine.run(batch_for(engine), rates("sgd"))


def test_a_profiled_run_goes_to_the_gpu_as_well():
    engine = engine_on(lambda ipu: FakeGpu(0), ipus=(0, 0, 0, 0))
    recorder = Recorder()
    engine.run(batch_for(engine), rates("sgd"), recorder)
    assert set(recorder.kept) == {(0, 0)}


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Dropout2d(0.5), nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(1)),
            *(nn.Flatten(), nn.Linear(4, 5)),
        )

    def forward(self, x, y):
        output = self.layers(x)
        return output, nn.functional.cross_entropy(output, y)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(11, 8), nn.Embedding(6, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.last = nn.Linear(8, 11, bias=False)
        self.last.weight = self.words.weight

    def forward(self, x, y):
        place = torch.arange(6)
        hidden = self.words(x) + self.places(place) + torch.rand(6, 8)
        mask = torch.full((6, 6), float("-inf")).triu(1)
        output = self.last(self.layer(hidden, src_mask=mask))
        return output, nn.functional.cross_entropy(output.flatten(0, 1), y.flatten())


MODELS = {
    "images": (Images, [torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.long)]),
    "words": (Words, [torch.zeros(2, 6, dtype=torch.long), torch.zeros(2, 6, dtype=torch.long)]),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_many_kinds_of_layers_run_there(name, training):
    kind, samples = MODELS[name]
    torch.manual_seed(0)
    model = kind().train(training)
    names = {key: 0 for key, _ in model.named_parameters()}
    optimizer = Optimizer("adamw", names) if training else None
    settings = Settings(training, Counts(2, 2 if training else 1), Strategy(), optimizer=optimizer)
    graph = capture(model, lambda inputs: model(*inputs), samples, training=training)
    engine = Engine(compile_graph(graph, settings), settings, model.state_dict(), 0, lambda ipu: FakeGpu(0))
    inputs = [sample.repeat(settings.counts.product, *[1] * (sample.dim() - 1)) for sample in samples]
    results = engine.run(inputs, rates("adamw") if training else None)
    assert len(results.outputs()) == 2
    assert set(devices_of(engine)) == {GPU}
    engine.close()


def test_ipus_are_dealt_out_to_the_gpus_there_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(cuda.Cuda, "_stream", lambda self: SimpleNamespace())
    assert [of("cuda")(ipu).place.index for ipu in range(4)] == [0, 1, 0, 1]


def test_without_a_gpu_the_error_says_why_and_what_to_do():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(
        Error, match=r'the device is "cuda", but torch (.|\n)*fix: (.|\n)*POPTORCH_DEVICE=cpu'
    ):
        of("cuda")
