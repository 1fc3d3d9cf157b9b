"""The engine on an accelerator that is not there: fake tensors have its device, but no contents.

They refuse operations on two devices, and to be read by the host. So a run shows that no tensor stays behind on the
CPU, and that the host waits for no value before the end of the call. What an accelerator computes, it does not show.
"""

import threading
from contextlib import ExitStack, contextmanager

import pytest
import torch
from small_engines import batch_for, planned, rates
from torch import nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.overrides import TorchFunctionMode

from popengine.compile import compile_graph
from popengine.compile.capture import capture
from popengine.errors import Error, RunError, UnrecoverableError
from popengine.run import devices, random_draws, state
from popengine.run.engine import Engine
from popengine.run.recorder import Recorder
from popengine.run.state import TrainState
from popengine.settings import Counts, Optimizer, Settings, Strategy

GPU = torch.device("cuda", 0)


class NoDriver(TorchFunctionMode):
    """Copies between devices and indices, for which torch asks a driver, also of fake tensors."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_:
            return args[0]
        if func is torch.Tensor.__getitem__:
            value, places = args
            for place in places if isinstance(places, tuple) else (places,):
                value = value.select(0, place)
            return value
        if func is torch.Tensor.to:
            value, *rest = args
            device = next((one for one in rest if isinstance(one, torch.device)), value.device)
            if device != value.device:
                return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def fake_gpu(monkeypatch):
    """What runs on this device, in any thread, is on fake tensors."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    @contextmanager
    def running(device):
        with ExitStack() as stack:
            if device == GPU:
                stack.enter_context(torch.inference_mode())  # autograd asks for a driver
                stack.enter_context(mode)
                stack.enter_context(NoDriver())
            yield

    def generator(device, key, place):
        assert device == GPU
        return torch.Generator()  # fake tensors only look whether there is one

    monkeypatch.setattr(devices, "as_current_device", running)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    monkeypatch.setattr(devices, "in_pinned_memory", lambda value, device: value)
    monkeypatch.setattr(random_draws, "generator", generator)
    monkeypatch.setattr(state, "has_same_bits", lambda one, other: True)  # of the host's buffers


def devices_of(engine):
    for values in engine.state.values:
        yield from (value.device for value in values.values())
    for states in engine.state.optimizer.values():
        yield from (value.device for name, value in states.items() if name != "step")


OPTIONS = [
    {},
    {"ipus": (0, 0, 0, 0), "dropout": 0.5},
    {"kind": "adamw", "counts": (2, 8, 2), "optimizer": {"flags": {"bias_correction": False}}},
    {
        "kind": "adam",
        "counts": (1, 8, 2),
        "shard_optimizer": 0,
        "optimizer": {"flags": {"bias_correction": False}},
    },
    {"optimizer": {"max_grad_norm": 1.0}},
    {"kind": "lamb", "optimizer": {"flags": {"bias_correction": False}}},
    {"ipus": (0, 1, 0, 1), "order": "sharded", "outputs": "sum", "recompute": True, "dropout": 0.5},
    {"training": False, "counts": (20, 1, 1)},
]


@pytest.mark.parametrize("recorder", [lambda: None, Recorder], ids=["", "profiled"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_call_leaves_no_tensor_on_the_cpu_and_reads_none(options, recorder, fake_gpu):
    parts, recorder = planned(device="cuda", **options), recorder()
    with devices.as_current_device(GPU):
        engine = Engine(*parts, GPU)
        hyper = rates(options.get("kind", "sgd")) if engine.settings.training else None
        for call in range(2):
            results = engine.run(batch_for(engine, call), hyper, recorder)
            assert {value.device.type for value in results.outputs()} == {"cpu"}
        assert set(devices_of(engine)) == {GPU}
        assert {value.device.type for value in engine.state.shared.find_weights().values()} == {"cpu"}
    engine.close()


def test_a_profiled_step_makes_its_tensors_on_the_device(fake_gpu):
    """Pieces with clocks were built for the CPU."""
    model = torch.nn.ReLU()
    graph = capture(
        model, lambda inputs: [model(inputs[0]) + torch.rand(3)], [torch.zeros(3)], training=False
    )
    settings = Settings(False, Counts(iterations=2), Strategy(), device="cuda")
    with devices.as_current_device(GPU):
        engine = Engine(compile_graph(graph, settings), settings, TrainState(dict), GPU)
        engine.run([torch.zeros(6)], None, Recorder())
    engine.close()


def left_on_the_cpu(value, device):
    return value


def read_by_the_host(value, device):
    return value.to(device) * value.to(device).sum().item()


@pytest.mark.parametrize(
    ("upload", "error"),
    [
        (left_on_the_cpu, "found (at least two|two different) devices,? c"),
        (read_by_the_host, "_local_scalar_dense"),
    ],
    ids=["left behind", "read"],
)
def test_a_tensor_that_is_left_behind_or_read_fails_the_call(upload, error, fake_gpu, monkeypatch):
    monkeypatch.setattr("popengine.run.row_functions.upload", upload)
    parts = planned(device="cuda")
    with devices.as_current_device(GPU):
        engine = Engine(*parts, GPU)
        with pytest.raises((RunError, DataDependentOutputException), match=error):
            engine.run(batch_for(engine), rates("sgd"))
    engine.close()


def test_one_thread_starts_all_work_of_an_accelerator(fake_gpu):
    parts, before = planned(device="cuda"), torch.get_num_threads()
    torch.set_num_threads(4)
    others = set(threading.enumerate())
    try:
        with devices.as_current_device(GPU):
            engine = Engine(*parts, GPU)
            engine.run(batch_for(engine), rates("sgd"))
            assert {thread.name for thread in threading.enumerate() if thread not in others} == {"core 0"}
    finally:
        torch.set_num_threads(before)
    engine.close()


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
    "images": (Images, (torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.long))),
    "words": (Words, (torch.zeros(2, 6, dtype=torch.long), torch.zeros(2, 6, dtype=torch.long))),
}


@pytest.fixture(params=[(name, training) for name in MODELS for training in (True, False)], ids=str)
def compiled(request):
    name, training = request.param
    kind, samples = MODELS[name]
    torch.manual_seed(0)
    model = kind().train(training)
    names = {key: 0 for key, _ in model.named_parameters()}
    optimizer = Optimizer("adamw", names, flags={"bias_correction": False}) if training else None
    counts = Counts(2, 2 if training else 1)
    settings = Settings(training, counts, Strategy(), optimizer=optimizer, device="cuda")
    graph = capture(model, lambda inputs: model(*inputs), list(samples), training=training, device="cuda")
    inputs = [sample.repeat(counts.product, *[1] * (sample.dim() - 1)) for sample in samples]
    return compile_graph(graph, settings), settings, model.state_dict(), inputs


def test_models_of_many_kinds_of_layers_run_there(compiled, fake_gpu):
    plan, settings, weights, inputs = compiled
    with devices.as_current_device(GPU):
        engine = Engine(plan, settings, TrainState(weights.copy), GPU)
        results = engine.run(inputs, rates("adamw") if settings.training else None)
        assert [value.device.type for value in results.outputs()] == ["cpu", "cpu"]
        assert set(devices_of(engine)) == {GPU}
    engine.close()


# ---- what there is no device for -------------------------------------------------------------------------


@pytest.mark.parametrize("there", [None, torch.device("xpu")])
def test_an_accelerator_that_is_not_there_is_an_error_that_says_what_is(there, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: there)
    seen = "no accelerator" if there is None else "one of kind 'xpu'"
    with pytest.raises(Error, match=rf'the device is "cuda", but torch .* finds {seen}\n  fix: (.|\n)*=cpu'):
        devices.check_available("cuda")


def test_several_processes_that_train_together_are_refused(monkeypatch):
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda")
    )
    devices.check_available("cuda")
    devices.check_available("cpu", processes=2)
    with pytest.raises(
        Error, match=r"2 processes train together\n  why: .*host's memory only\n  fix: one process"
    ):
        devices.check_available("cuda", processes=2)


def test_a_kernel_that_fails_ends_the_use_of_the_device(monkeypatch):
    def fail(device):
        raise RuntimeError("device-side assert triggered")

    monkeypatch.setattr(torch.accelerator, "synchronize", fail)
    devices.synchronize(devices.CPU)
    with pytest.raises(UnrecoverableError, match=r"the device cuda:0 failed .*assert triggered"):
        devices.synchronize(GPU)
