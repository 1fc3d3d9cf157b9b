"""The engine on an accelerator that is not there: `late_device.py`, whose kernels are the CPU's and run late.

So the CPU's bits show that no tensor stays behind on the CPU, and that no work starts before what it needs.
"""

import threading
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from engine_models import train_state_of
from small_engines import LAYOUTS, assert_same, batch_for, engine_of, planned, rates, trained, trained_on_cpu
from torch import nn

import late_device
from late_device import late_devices
from popengine.compile import compile_graph
from popengine.compile.capture import capture
from popengine.compile.rewriting.memory_layout import with_fixed_strides
from popengine.errors import Error, RunError, UnrecoverableError
from popengine.order import ORDERS, Order
from popengine.run import devices
from popengine.run.engine import Engine
from popengine.run.recorder import Recorder
from popengine.run.train_state import TrainState
from popengine.settings import Counts, Optimizer, Settings, Strategy

GPU = torch.device("late", 0)
MORE_LAYOUTS = {f"order {name}": {"order": name} for name in ORDERS if name not in ("1f1b", "sharded")} | {
    "lamb": {"kind": "lamb"},
    "clipped values": {"optimizer": {"max_grad_value": 0.01}},
    "running means": {"reduction": "running", "counts": (2, 5, 2)},
}


@pytest.fixture
def late(monkeypatch):
    """The device GPU, which `options.device("cuda")` finds."""
    with late_devices(monkeypatch) as found:
        yield found[0]


def refuse(graph, function):
    graph.is_valid = False
    raise RuntimeError("operation not permitted when stream is capturing")


def on_device(**options):
    return Engine(*planned(device="cuda", **options))


# ---- the device itself -----------------------------------------------------------------------------------


def test_a_capture_that_fails_leaves_stream_and_generator_as_they_were(late):
    x, before = torch.zeros(2).to(GPU), devices.current_stream(GPU)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        devices.capture(late_device.Graph(GPU), None, GPU, lambda: (x + 1).sum().item())
    assert devices.current_stream(GPU) is before and not late_device.in_capture
    devices.capture(late_device.Graph(GPU), None, GPU, lambda: x + 1)
    assert (x + 1).tolist() == [1, 1]


# ---- the CPU's bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*LAYOUTS, *MORE_LAYOUTS])
def test_each_layout_has_the_bits_of_the_cpu(name, late):
    options = (LAYOUTS | MORE_LAYOUTS)[name]
    assert_same(trained(on_device(**options), calls=2), trained_on_cpu(**options))
    assert late.replays == (3 if options.get("training", True) else 1)  # all steps but the first
    draws = ("dropout" in options) * (2 if "recompute" in options else 1)  # of a micro-batch
    assert late.fills == late.replays * draws * 2


def test_draws_have_the_order_of_micro_batches_whatever_runs_first(late, monkeypatch):
    order = Order("last", lambda step, action, micro_batch: (-micro_batch,))
    monkeypatch.setitem(ORDERS, "last", order)
    options = {"order": "last", "dropout": 0.5, "recompute": True}
    assert_same(trained(on_device(**options), calls=2), trained_on_cpu(**options))


FUSED = rates("adamw", fused=True)


@pytest.mark.parametrize(
    ("options", "hyper", "reads"),
    [
        ({}, rates("sgd"), 0),
        ({"kind": "adamw"}, rates("adamw"), 0),
        ({"kind": "adamw"}, FUSED, 0),
        ({"optimizer": {"max_grad_norm": 0.1}}, rates("sgd"), 0),
        ({"automatic_loss_scaling": True}, rates("sgd"), 2),
    ],
    ids=["sgd", "adamw", "fused adamw", "clipping", "automatic loss scaling"],
)
def test_the_host_waits_at_the_end_of_a_call_and_once_a_step_for_automatic_loss_scaling(
    options, hyper, reads, late, monkeypatch
):
    monkeypatch.setattr("torch._fused_adamw_", lambda *args, **kwargs: None)  # has no kernel there
    engine, waits = on_device(**options), []
    for call in range(3):
        before = late.waits.copy()
        engine.run(batch_for(engine, call), hyper)
        waits.append(late.waits - before)
    assert waits[2] == Counter({"synchronize": 1, "download": reads})
    engine.close()


def test_clipping_by_norm_measures_all_gradients_together(late, monkeypatch):
    counts, norms = [], torch._foreach_norm

    def counted(values, *more, **named):
        counts.append(len(values))
        return norms(values, *more, **named)

    monkeypatch.setattr(torch, "_foreach_norm", counted)
    engine = on_device(optimizer={"max_grad_norm": 0.1})
    engine.run(batch_for(engine), rates("sgd"))
    assert counts == [len(engine.state.units)] * 2  # steps
    engine.close()


def test_a_step_is_captured_again_if_a_weight_has_another_address(late):
    found = []
    for engine in (on_device(), engine_of()):
        for call in range(3):
            engine.run(batch_for(engine, call), rates("sgd"))
            weight = engine.state.train_state.find_weights()["a.weight"]
            weight.data = weight.detach().clone()
        engine.state.train_state.move_to_host()
        found.append({key: value.clone() for key, value in engine.state.train_state.find_weights().items()})
        engine.close()
    assert_same(*found)
    assert late.replays == 5


def test_a_step_with_an_operation_that_the_host_waits_for_is_not_captured(late, caplog):
    caplog.set_level("INFO", "popengine")
    graph = capture(
        nn.Identity(), lambda inputs: [torch.linalg.eigvalsh(inputs[0])], [torch.eye(3)], training=False
    )
    settings = Settings(False, Counts(), Strategy(), device="cuda")
    Engine(compile_graph(graph, settings), settings, TrainState(dict)).close()
    assert "operation by operation: the host waits for the values of _linalg_eigh" in caplog.text
    assert late.captures == 0


def test_steps_whose_weights_move_each_time_are_captured_three_times_in_a_row_at_most(late, caplog):
    engine = on_device()
    for call in range(6):
        engine.run(batch_for(engine, call), rates("sgd"))
        for weight in engine.state.train_state.find_weights().values():
            weight.data = weight.detach().clone()
    assert late.captures == 3
    assert caplog.text.count("weights or buffers have other memory at each call") == 1
    engine.close()


def test_a_call_waits_for_the_work_of_its_callers_stream(late):
    found = []
    for make in (on_device, engine_of):
        engine = make()
        engine.run(batch_for(engine), rates("sgd"))
        for call in range(3):
            stream = late_device.Stream(late) if make is on_device else nullcontext()
            with stream:
                for weight in engine.state.train_state.find_weights().values():
                    for _ in range(20 * weight.is_floating_point()):  # the stream is late
                        weight.detach().mul_(1.01)
                engine.run(batch_for(engine, call), rates("sgd"))
        engine.state.train_state.move_to_host()
        found.append({key: value.clone() for key, value in engine.state.train_state.find_weights().items()})
        engine.close()
    assert_same(*found)


def test_a_step_that_cannot_be_captured_runs_and_the_log_says_why(late, monkeypatch, caplog):
    caplog.set_level("INFO", "popengine")
    options = {"dropout": 0.5, "counts": (2, 3, 2)}
    for why in ("enableFloatingPointExceptions reads each value", "operation not permitted"):
        if why.startswith("operation"):
            monkeypatch.setattr(late_device.Graph, "put", refuse)
        more = {"finite_checks": True} if why.startswith("enable") else {}
        assert_same(trained(on_device(**options, **more), calls=1), trained_on_cpu(calls=1, **options))
        assert f"steps on late:0 are started operation by operation: {why}" in caplog.text
    assert late.replays == 0


class ReadsByStrides(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.weight = nn.GroupNorm(2, 4), nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        x = self.norm(x.to(memory_format=torch.channels_last))
        y = x.flatten(1)[:, :8] @ self.weight
        bits = (y * 2).view(torch.int32) >> 23
        pairs = torch.view_as_complex((y + 1).view(2, 4, 2)).abs()
        return y.as_strided((2, 4), (1, 2)), (y * 3).as_strided((4,), (2,), 1), bits, pairs, y.unfold(1, 3, 2)


def test_strides_of_the_device_differ_and_results_do_not(late, monkeypatch):
    torch.manual_seed(0)
    model, x = ReadsByStrides().eval(), torch.randn(2, 4, 3, 3)
    graph = with_fixed_strides(capture(model, lambda inputs: [*model(*inputs)], [x], training=False))
    settings = Settings(False, Counts(), Strategy(), device="cuda")
    weights = {key: value.detach().clone() for key, value in model.state_dict().items()}
    monkeypatch.setattr(late_device, "other_strides", True)
    engine = Engine(compile_graph(graph, settings), settings, TrainState(weights.copy))
    for ours, theirs in zip(engine.run([x], None).outputs(), model(x), strict=True):
        torch.testing.assert_close(ours, theirs)
    engine.close()


@pytest.mark.parametrize("name", ["images", "words"])
def test_models_compute_the_same_with_other_strides(name, late, monkeypatch):
    monkeypatch.setattr(late_device, "other_strides", True)
    one, two = run_model(name, False, GPU), run_model(name, False, devices.CPU)
    torch.testing.assert_close(one, two)


def test_a_profiled_call_has_the_bits_of_the_cpu_and_the_time_of_the_device(late):
    """A kernel takes a millisecond there, so no other clock gives these times."""
    recorder, engine = Recorder(), on_device()
    assert_same(trained(engine, calls=2, recorder=recorder), trained_on_cpu())
    assert len(recorder.kept) == 4
    runs = [run for step in recorder.kept for run in step]
    assert all(run.computed % 1_000_000 == 0 for run in runs)
    forward = [run.computed for run in runs if engine.plan.tasks[run.task].kind == "forward"]
    assert min(forward) >= 1_000_000


def test_a_profiled_step_makes_its_tensors_on_the_device(late):
    """Pieces with clocks were built for the CPU."""
    model = torch.nn.ReLU()
    graph = capture(
        model, lambda inputs: [model(inputs[0]) + torch.rand(3)], [torch.zeros(3)], training=False
    )
    settings = Settings(False, Counts(iterations=2), Strategy(), device="cuda")
    engine = Engine(compile_graph(graph, settings), settings, TrainState(dict))
    engine.run([torch.zeros(6)], None, Recorder())
    engine.close()


def test_a_tensor_that_is_left_behind_fails_the_call(late, monkeypatch):
    engine, to = on_device(), torch.Tensor.to

    def leave_inputs(value, *where, non_blocking=False, **others):
        return value if non_blocking else to(value, *where, **others)

    monkeypatch.setattr(torch.Tensor, "to", leave_inputs)
    with pytest.raises(RunError, match="Expected all tensors to be on the same device"):
        engine.run(batch_for(engine), rates("sgd"))
    engine.close()


def test_one_thread_starts_all_work_of_an_accelerator(late):
    before, others = torch.get_num_threads(), set(threading.enumerate())
    torch.set_num_threads(4)
    try:
        engine = on_device()
        engine.run(batch_for(engine), rates("sgd"))
        names = {thread.name for thread in threading.enumerate() if thread not in others}
        assert {name for name in names if name.startswith("core")} == {"core 0"}
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


def run_model(name, training, device):
    """The outputs and weights after a call of a model of MODELS."""
    kind, samples = MODELS[name]
    torch.manual_seed(0)
    model = kind().train(training)
    counts = Counts(2, 2 if training else 1)
    optimizer = Optimizer("adamw") if training else None
    settings = Settings(training, counts, Strategy(), optimizer=optimizer, devices=(str(device),))
    graph = capture(model, lambda inputs: model(*inputs), list(samples), training=training, device="cuda")
    weights = {key: value.detach().clone() for key, value in model.state_dict().items()}
    state = train_state_of(weights, dict(model.named_parameters()), "adamw" if training else None)
    engine = Engine(compile_graph(graph, settings), settings, state)
    inputs = [sample.repeat(counts.product, *[1] * (sample.dim() - 1)) for sample in samples]
    inputs = [torch.randn_like(x) if x.is_floating_point() else torch.randint_like(x, 5) for x in inputs]
    results = engine.run(inputs, rates("adamw") if training else None)
    found = {str(index): value for index, value in enumerate(results.outputs())}
    engine.state.train_state.move_to_host()
    found |= engine.state.train_state.find_weights()
    engine.close()
    return found


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", ["images", "words"])
def test_models_of_many_kinds_of_layers_have_the_bits_of_the_cpu(name, training, late):
    assert_same(run_model(name, training, GPU), run_model(name, training, devices.CPU))


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


def test_a_kernel_that_fails_ends_all_calls_and_names_no_bare_error_of_the_driver(late):
    engine = on_device()
    rows, labels = batch_for(engine)
    labels[-1] = 7  # of three classes
    for _ in range(2):
        with pytest.raises(
            UnrecoverableError, match=r"the device late:0 failed(.|\n)*weights and the .* are lost"
        ):
            engine.run([rows, labels], rates("sgd"))
    assert not engine.state.train_state.move_to_host()
    engine.close()
