"""Products of half precision in float32: exact copies in, one rounding out, weights once a step."""

import pytest
import torch
from engine_models import rates, train_state_of
from torch import nn
from torch.nn import functional

from popengine.compile import compile_graph
from popengine.compile.capture import capture
from popengine.compile.partition import partition
from popengine.compile.recording.current_capture import current
from popengine.compile.rewriting.partials import is_faster_in_float32, products_in_float32
from popengine.errors import RunError
from popengine.run import row_functions
from popengine.run.backends.eager import build
from popengine.run.engine import Engine
from popengine.settings import Counts, Optimizer, Settings, StagePlan, Strategy

HALVES = (torch.float16, torch.bfloat16)
aten = torch.ops.aten


def everything(operation, dtype):
    return True


class Attends(nn.Module):
    """A convolution, attention whose three weights are parts of one, a product with a bias and one without."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 8, 3, padding=1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.linear, self.last = nn.Linear(8, 8), nn.Linear(8, 5, bias=False)

    def forward(self, x, y):
        for name, part in (("A", self._first), ("B", self._second)):
            if (state := current()) is not None:
                state.enter_block(name, None)
            x = part(x)
        return x, functional.cross_entropy(x.float(), y)

    def _first(self, x):
        x = functional.relu(self.conv(x)).transpose(1, 2)
        return x + self.attention(x, x, x, need_weights=False)[0]

    def _second(self, x):
        return self.last(torch.tanh(self.linear(x)).mean(1))


def model_of(dtype):
    torch.manual_seed(0)
    return Attends().to(dtype)


def batch_of(dtype, rows=2):
    torch.manual_seed(1)
    return [torch.randn(rows, 4, 6).to(dtype), torch.randint(0, 5, (rows,))]


def graph_of(dtype, wide=True):
    model = model_of(dtype)
    graph = capture(model, lambda inputs: model(*inputs), batch_of(dtype), training=True)
    return products_in_float32(graph, everything)[0] if wide else graph


def strategy_of(*ipus):
    return Strategy(
        "1f1b", None, tuple(StagePlan((name,), ipu) for name, ipu in zip("AB", ipus, strict=True))
    )


def values_of(graph, dtype, look=None):
    """Every gradient, and what a model returns, of one micro-batch; by the names of its results."""
    model, inputs = model_of(dtype), batch_of(dtype)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {}
    for slot in graph.slots:
        given = inputs[int(slot.key)] if slot.role == "input" else state.get(slot.key)
        values[slot.name] = torch.ones(slot.shape, dtype=slot.dtype) if given is None else given.detach()
    parts = partition(graph, strategy_of(0, 0))
    with torch.no_grad():
        for name, piece in parts.prepared.items():
            (values[name],) = build(piece)([values[read] for read in piece.reads])
        for piece in parts.pieces:
            made = build(piece, look or (lambda operation: operation))([values[name] for name in piece.reads])
            values.update(zip(piece.writes, made, strict=True))
    return {result.key: values[result.name] for result in graph.results}


@pytest.mark.parametrize("dtype", HALVES)
def test_each_product_is_the_float32_one_of_the_same_numbers(dtype):
    """Its operands are copies of half values, and what follows it is its result, rounded once."""
    from popengine.compile.rewriting.partials import PRODUCTS

    seen = []

    def look(operation):
        def call(*args, **kwargs):
            if operation in PRODUCTS:
                tensors = [value for value in args if isinstance(value, torch.Tensor)]
                seen.append(str(operation))
                assert all(value.dtype == torch.float32 for value in tensors)
                sums = 1 if "attention" in str(operation) and "backward" in str(operation) else 0
                exact = sum(torch.equal(value.to(dtype).float(), value) for value in tensors)
                assert exact >= len(tensors) - sums  # attention's row sums are float32 themselves
            return operation(*args, **kwargs)

        return call

    found = values_of(graph_of(dtype), dtype, look)
    assert {name.split(".")[1] for name in seen} >= {"convolution", "convolution_backward", "addmm", "mm"}
    assert any("attention" in name for name in seen)
    plain = values_of(graph_of(dtype, wide=False), dtype)
    assert {key: value.dtype for key, value in found.items()} == {k: v.dtype for k, v in plain.items()}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(3, 5, 7), (16, 64, 24), (1, 300, 2)])
def test_a_product_is_correctly_rounded_and_never_less_exact_than_native(dtype, shape):
    """Against the product in float64, rounded once: all that float32 sums can differ from it is its last place."""
    rows, inner, columns = shape
    torch.manual_seed(2)
    x, weight = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype)
    layer = nn.Linear(inner, columns, bias=False).to(dtype)
    graph, _ = products_in_float32(
        capture(layer, lambda inputs: [layer(inputs[0])], [x], training=False), everything
    )
    parts = partition(graph, Strategy("sharded"))
    values = {"input_0": x, "parameter_weight": weight}
    for name, piece in parts.prepared.items():
        (values[name],) = build(piece)([values[read] for read in piece.reads])
    (piece,) = parts.pieces
    (found,) = build(piece)([values[name] for name in piece.reads])
    assert torch.equal(found, (x.float() @ weight.float().t()).to(dtype))
    exact = x.double() @ weight.double().t()
    rounded, native = exact.to(dtype), functional.linear(x, weight)
    assert (found == rounded).double().mean() > 0.97  # ties apart, which 2^-13 of all sums are near to
    assert (found.double() - exact).abs().max() <= (native.double() - exact).abs().max() + 1e-6


def test_only_what_was_chosen_is_computed_in_float32():
    graph, widened = products_in_float32(
        graph_of(torch.float16, wide=False), lambda operation, dtype: operation is aten.convolution.default
    )
    assert widened == ("convolution of float16",)
    types = {
        node.target: node.args[0].meta["val"].dtype
        for node in graph.code.nodes
        if node.target in (aten.convolution.default, aten.addmm.default)
    }
    assert types == {aten.convolution.default: torch.float32, aten.addmm.default: torch.float16}


@pytest.mark.parametrize(
    ("features", "products"), [({}, True), ({"avx512_bf16": True}, False), ({"avx512_fp16": True}, True)]
)
def test_the_processors_features_decide_what_is_computed_in_float32(monkeypatch, features, products):
    monkeypatch.setattr("popengine.compile.rewriting.partials.cpu_features", lambda: features)
    assert is_faster_in_float32(aten.mm.default, torch.bfloat16) is products
    assert is_faster_in_float32(aten.convolution_backward.default, torch.bfloat16) is products
    attention = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    assert is_faster_in_float32(attention, torch.bfloat16)


def test_copies_of_weights_belong_to_no_piece_and_copies_of_values_to_those_that_use_them():
    graph = graph_of(torch.float16)
    parts = partition(graph, strategy_of(0, 1))
    prepared_of = sorted(read for piece in parts.prepared.values() for read in piece.reads)
    matrices = {s.name for s in parts.signature.slots if s.role == "parameter" and len(s.shape) > 1}
    assert set(prepared_of) >= matrices
    assert len(set(prepared_of)) == len(prepared_of)  # forward and backward share one copy
    copies = {
        node.name
        for node in graph.code.nodes
        if node.target is aten._to_copy.default and node.meta["val"].dtype == torch.float32
    }
    results = {result.name for result in graph.results}
    for piece in parts.pieces:
        handed_on = copies.intersection(piece.writes) - results
        assert not handed_on  # else a half value would take three times its memory between two pieces


def engine_of(ipus, accumulation, recompute=False):
    model = model_of(torch.float16)
    optimizer = Optimizer("plain sgd")
    settings = Settings(
        True, Counts(2, accumulation), strategy_of(*ipus), optimizer=optimizer, recompute=recompute
    )
    plan = compile_graph(graph_of(torch.float16), settings)
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return Engine(plan, settings, train_state_of(weights, dict(model.named_parameters()), seed=7))


RATES = rates()


def test_a_weight_is_copied_once_a_step_and_the_copy_goes_with_the_last_piece_that_needs_it(monkeypatch):
    made, alive = [], []
    real = row_functions.PreparedValues._value

    def one(self, name):
        is_new = name not in self._made
        value = real(self, name)
        made.extend([name] * is_new)
        alive.append(len(self._made))
        return value

    monkeypatch.setattr(row_functions.PreparedValues, "_value", one)
    engine = engine_of((0, 1), accumulation=4)
    engine.run(batch_of(torch.float16, 16), RATES)
    count = len(engine.plan.partition.prepared)
    engine.close()
    assert len(made) == 2 * count  # two steps of four micro-batches
    assert max(alive) > 0
    assert alive[-1] == 0


def test_a_failed_call_leaves_no_old_copies_behind():
    """A copy of a weight as it was in the middle of a call would else be used by the next one."""
    engine, twin = engine_of((0, 1), 3), engine_of((0, 1), 3)
    images, labels = batch_of(torch.float16, 12)
    wrong = labels.clone()
    wrong[-1] = 99  # in the last micro-batch of the second step
    with pytest.raises(RunError, match="Target 99 is out of bounds"):
        engine.run([images, wrong], RATES)
    for name, value in engine.state.train_state.find_weights().items():
        twin.state.train_state.find_weights()[name].copy_(value)
    twin.state.train_state.random_state = engine.state.train_state.random_state
    found = engine.run([images, labels], RATES).outputs()[1]
    assert torch.equal(found, twin.run([images, labels], RATES).outputs()[1])
    engine.close()
    twin.close()
