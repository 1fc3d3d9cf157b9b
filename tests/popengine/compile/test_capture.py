"""What capture writes down of a forward, and how it functionalizes it."""

import contextlib

import pytest
import torch
from engine_models import Net, captured, enter, graph_of, net
from torch import nn
from torch.nn import functional

import poptorch
from popengine.compile.capture import capture
from popengine.compile.recording.current_capture import current
from popengine.errors import CaptureError
from small_models import module


def forward_of(function, *samples, training=False):
    model = module(lambda self, *inputs: function(*inputs))
    return capture(model, lambda inputs: [model(*inputs)], list(samples), training=training)


def calls(graph):
    return [node for node in graph.code.nodes if node.op == "call_function"]


def test_slots_are_the_parameters_buffers_and_inputs_by_their_names():
    slots = {(slot.role, slot.key): slot for slot in graph_of().slots}
    assert slots["parameter", "norm.weight"].shape == (4,)
    assert slots["buffer", "norm.num_batches_tracked"].dtype == torch.int64
    assert slots["input", "1"].dtype == torch.int64
    assert ("loss_scale", "loss_scale") in slots


def test_results_are_outputs_gradients_and_written_buffers():
    kinds = {}
    for result in graph_of().results:
        kinds.setdefault(result.kind, []).append(result.key)
    assert kinds["output"] == ["0", "1"]
    assert kinds["gradient"] == [name for name, _ in net().named_parameters()]
    assert set(kinds["buffer"]) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def test_each_node_has_a_phase_a_line_and_in_the_forward_a_block():
    graph = graph_of()
    assert [visit.name for visit in graph.visits] == [None, "A", "B", "C", "D"]
    for node in calls(graph):
        assert node.meta["phase"] in ("F", "B")
        if node.meta["phase"] == "F":
            assert node.meta["block"] in range(1, 5)
            assert "engine_models.py:" in node.meta["where"]


def test_a_backward_node_has_the_block_of_its_forward():
    blocks = [
        n.meta["block"] for n in calls(graph_of()) if n.meta["phase"] == "B" and n.meta["block"] is not None
    ]
    assert set(blocks) - {-1} == {1, 2, 3, 4}
    assert blocks.index(4) < blocks.index(3) < blocks.index(2) < blocks.index(1)


class Fails(nn.Module):
    def forward(self, x):
        raise RuntimeError


class Branches(nn.Module):
    """A module that runs twice, one that fails, one without a name, and operations of the model's own."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.fails = Fails()
        self.unnamed = [nn.Sigmoid()]

    def forward(self, x):
        with contextlib.suppress(RuntimeError):
            self.fails(x)
        x = self.unnamed[0](self.inner(self.inner(x))).exp()
        return poptorch.identity_loss(x, "mean")


def test_each_node_has_the_module_that_it_comes_from_and_the_backward_that_of_its_forward():
    model, before = Branches(), nn.Module.__call__
    graph = capture(model, lambda inputs: [model(*inputs)], [torch.zeros(2, 3)], training=True)
    assert nn.Module.__call__ is before
    found = {"F": {}, "B": {}}
    for node in calls(graph):
        found[node.meta["phase"]].setdefault(str(node.target).split(".")[1], set()).add(node.meta["module"])
    assert found["F"] == {
        **{"addmm": {"inner.0"}, "t": {"inner.0"}, "tanh": {"inner.1"}},
        **{"sigmoid": {""}, "exp": {""}, "mean": {""}},
    }
    backward = ("tanh_backward", "mm", "sigmoid_backward")
    assert [found["B"][name] for name in backward] == [{"inner.1"}, {"inner.0"}, {""}]


def test_a_tied_weight_has_one_slot():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    graph = capture(model, lambda inputs: [model(*inputs)], [torch.zeros(2, 3)], training=False)
    assert [slot.key for slot in graph.slots if slot.role == "parameter"] == ["0.weight", "0.bias", "1.bias"]


def test_no_operation_in_place_is_left():
    def function(x):
        y = x * 2
        y += 1
        y[0] = 3
        y.view(-1)[1:].mul_(2)
        return torch.relu_(y)

    graph = forward_of(function, torch.zeros(2, 2))
    assert not [node for node in calls(graph) if node.target._schema.is_mutable]


def test_a_tensor_from_outside_becomes_a_constant():
    held = torch.arange(3.0)
    graph = forward_of(lambda x: x + held + torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3))
    assert len(graph.constants) == 2
    held.zero_()  # the graph has the value of its capture
    assert any(torch.equal(value, torch.arange(3.0)) for value in graph.constants.values())


def test_what_no_result_needs_is_left_out():
    graph = forward_of(lambda x: (x.exp().sum(), x + 1)[1], torch.zeros(3))
    assert [node.target for node in calls(graph)] == [torch.ops.aten.add.Tensor]


def test_batch_norm_in_eval_mode_writes_no_buffer():
    graph = graph_of(Net().eval(), training=False)
    assert {result.kind for result in graph.results} == {"output"}


def test_draws_are_numbered_by_their_place_in_the_model():
    def function(x):
        return torch.rand(3) + functional.dropout(x, 0.5) + functional.dropout(x, 0.0) + torch.randn(3)

    graph = forward_of(function, torch.zeros(3))
    assert [node.meta["draw"] for node in calls(graph) if "draw" in node.meta] == [0, 1, 2]


def test_attention_without_dropout_draws_nothing():
    def function(q):
        return functional.scaled_dot_product_attention(q, q, q)

    graph = forward_of(function, torch.zeros(1, 2, 3, 4))
    assert not [node for node in calls(graph) if "draw" in node.meta]


def test_a_trained_parameter_written_by_forward_is_refused():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))

        def forward(self, x):
            with torch.no_grad():
                self.weight += 1
            return nn.functional.mse_loss(x * self.weight, x)

    model = Writes()
    with pytest.raises(CaptureError, match="Parameter weight is changed in place by the forward"):
        capture(model, lambda inputs: [model(*inputs)], [torch.zeros(3)], training=True)
    assert torch.equal(model.weight, torch.zeros(3))


def test_a_forward_that_raises_leaves_no_capture_and_the_module_as_it_was():
    model = net()
    parameters = list(model.parameters())

    def forward(inputs):
        enter("A")
        raise ValueError("mine")

    compiling = torch.compiler.is_compiling()
    with pytest.raises(ValueError, match="mine"):
        capture(model, forward, [torch.zeros(2, 4)], training=True)
    assert current() is None
    assert torch.compiler.is_compiling() == compiling
    assert all(one is two for one, two in zip(model.parameters(), parameters, strict=True))


@pytest.mark.parametrize(
    "chain",
    [
        lambda y, t: functional.mse_loss(y, t) * 3,
        lambda y, t: functional.mse_loss(functional.l1_loss(y, t).expand_as(y), t),
    ],
)
def test_a_loss_that_reaches_another_is_no_loss_of_its_own(chain):
    model = nn.Linear(3, 3)
    graph = capture(
        model,
        lambda inputs: [chain(model(inputs[0]), inputs[1])],
        [torch.zeros(2, 3), torch.zeros(2, 3)],
        training=True,
    )
    assert [result.key for result in graph.results if result.kind == "gradient"] == ["weight", "bias"]


def test_the_search_for_nan_is_off_while_a_model_is_captured():
    # autograd reads every gradient to find a NaN: a capture under detect_anomaly was refused as reading a value.
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        graph = captured(net())
        assert torch.is_anomaly_enabled()
    assert any(result.kind == "gradient" for result in graph.results)


class Chosen(nn.Module):
    """Two losses by torch's functions, and a third value that is trained."""

    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.value = value

    def forward(self, x):
        first = functional.mse_loss(self.weight * x, x)
        second = functional.l1_loss(self.weight, x)
        chosen = self.value(first, second)
        current().choose_loss(chosen, "here")
        return chosen


def graph_of_chosen(value):
    model = Chosen(value)
    return capture(model, lambda inputs: [model(*inputs)], [torch.ones(2)], training=True)


def test_a_chosen_loss_is_trained_whatever_is_marked():
    graph = graph_of_chosen(lambda first, second: first * 2)
    assert [result.key for result in graph.results if result.kind == "gradient"] == ["weight"]


def test_a_chosen_loss_is_a_scalar():
    with pytest.raises(CaptureError, match=r"the loss at here has shape \(2,\)"):
        graph_of_chosen(lambda first, second: torch.stack([first, second]))
