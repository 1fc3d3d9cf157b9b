"""Backends: a compiled piece computes what the eager one computes, but for the rounding of fused kernels."""

import shutil
import warnings
from typing import Any

import pytest
import torch
from engine_models import graph_of, net, rates, train_state_of

from popengine.compile import compile_graph
from popengine.run.backends import inductor
from popengine.run.backends.eager import build
from popengine.run.backends.inductor import input_metadata
from popengine.run.engine import Engine
from popengine.run.recorder import Recorder
from popengine.settings import Counts, Optimizer, Settings, StagePlan, Strategy

# Fused kernels keep sums in another order: one float32 rounding (6e-8) an operation, over some twenty
# operations and three weight updates.
ROUNDING: Any = {"rtol": 2e-5, "atol": 1e-6}
RATES = rates()
needs_a_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


def settings_for(model, backend, **more):
    """Two stages on two ipus, three updates of four micro-batches."""
    strategy = Strategy(auto=None, stages=(StagePlan(("A", "B"), 0), StagePlan(("C", "D"), 1)))
    optimizer = Optimizer("plain sgd")
    return Settings(True, Counts(3, 4), strategy, optimizer=optimizer, backend=backend, **more)


def trained(backend, recorder=None, **more):
    """The losses of three updates, and the weights after them."""
    model = net(0.5)
    settings = settings_for(model, backend, **more)
    plan = compile_graph(graph_of(model), settings)
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    engine = Engine(plan, settings, train_state_of(weights, dict(model.named_parameters()), seed=7))
    torch.manual_seed(1)
    losses = (
        engine.run([torch.randn(24, 4), torch.randint(0, 3, (24,))], RATES, recorder).outputs()[1].clone()
    )
    found = {name: value.clone() for name, value in engine.state.train_state.find_weights().items()}
    engine.close()
    return {"losses": losses, **found}


def partition_of(model):
    return compile_graph(graph_of(model), settings_for(model, "inductor")).partition


def assert_close(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, **ROUNDING, msg=lambda text, name=name: f"{name}: {text}"
        )


@needs_a_compiler
def test_compiled_pieces_train_as_eager_ones_but_for_rounding():
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found = trained("inductor")
    assert_close(found, trained("eager"))


@needs_a_compiler
def test_compiled_pieces_are_compiled():
    inductor.compile_piece.cache_clear()
    codes = inductor.load_pieces(partition_of(net(0.5)), torch.device("cpu"))
    assert len(codes) == inductor.compile_piece.cache_info().currsize == 4


@needs_a_compiler
def test_kernels_have_one_thread_whatever_the_caller_has(monkeypatch):
    from torch._inductor import compile_fx, config

    seen = []
    real = compile_fx.compile_fx_inner
    monkeypatch.setattr(
        compile_fx, "compile_fx_inner", lambda *a, **kw: seen.append(config.cpp.threads) or real(*a, **kw)
    )
    inductor.compile_piece.cache_clear()
    partition = partition_of(net(0.5))
    inductor.load_pieces(partition, torch.device("cpu"))
    assert seen == [1] * len(partition.pieces)


@needs_a_compiler
def test_what_was_compiled_is_found_on_disk_by_the_next_process():
    from torch._dynamo.utils import counters

    partition = partition_of(net(0.5))
    inductor.load_pieces(partition, torch.device("cpu"))
    inductor.compile_piece.cache_clear()  # as in another process
    counters.clear()
    inductor.load_pieces(partition, torch.device("cpu"))
    assert counters["inductor"]["fxgraph_cache_hit"] == len(partition.pieces)
    assert not counters["inductor"]["fxgraph_cache_bypass"]


@needs_a_compiler
def test_values_that_lie_otherwise_in_memory_are_copied():
    partition = partition_of(net(0.5))
    piece, likes = partition.pieces[0], input_metadata(partition)[0]
    code, eager = inductor.compile_piece(piece, likes), build(piece)
    torch.manual_seed(1)
    values = [torch.randn(like.shape).abs().to(like.dtype) for like in likes]
    turned = [value.t().contiguous().t() if value.dim() == 2 else value for value in values]
    assert any(one.stride() != other.stride() for one, other in zip(values, turned, strict=True))
    key = 1 << 63  # of a draw: a number of 64 bits without a sign
    for found, expected in zip(code([*turned, key]), eager([*values, key]), strict=True):
        torch.testing.assert_close(found, expected, **ROUNDING)


def test_without_a_compiler_pieces_run_eagerly_after_one_warning(monkeypatch, forget_the_compiler):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    forget_the_compiler()
    with pytest.warns(RuntimeWarning, match=r"there is no C\+\+ compiler[^$]*fix: install") as seen:
        found = trained("inductor")
    assert len(seen) == 1
    expected = trained("eager")
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.fixture
def forget_the_compiler():
    """Torch looks for a compiler once in a process."""
    from torch._inductor import cpp_builder

    def forget():
        cpp_builder.cpp_compiler_search.cache_clear()

    yield forget
    forget()


@needs_a_compiler
def test_a_piece_that_can_not_be_compiled_runs_eagerly_and_is_named(monkeypatch):
    real = inductor.compile_piece

    def fails(piece, reads):
        if str(piece) == "F1":
            raise NotImplementedError("no lowering")
        return real(piece, reads)

    monkeypatch.setattr(inductor, "compile_piece", fails)
    with pytest.warns(RuntimeWarning, match=r"forward of stage 1 \(piece F1\) .* eagerly.*no lowering"):
        found = trained("inductor")
    assert_close(found, trained("eager"))


def test_pieces_for_an_accelerator_run_eagerly_with_a_warning():
    with pytest.warns(RuntimeWarning, match="and the device is 'cuda'"):
        codes = inductor.load_pieces(partition_of(net()), torch.device("cuda"))
    assert len(codes) == 4


def test_checks_of_each_operation_run_the_eager_backend(monkeypatch):
    monkeypatch.setattr(inductor, "load_pieces", None)
    assert trained("inductor", finite_checks=True)


@needs_a_compiler
def test_profiles_of_compiled_pieces_time_instructions_but_no_operations():
    recorder = Recorder()
    assert_close(trained("inductor", recorder=recorder), trained("eager"))
    assert recorder.steps == 3
    assert recorder.detail is not None and recorder.detail.runs == {}
