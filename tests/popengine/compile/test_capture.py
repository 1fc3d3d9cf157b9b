"""What capture writes down of a forward, and how it functionalizes it."""

import contextlib

import pytest
import torch
from engine_models import graph_of
from torch import nn
from torch.nn import functional

import poptorch
from popengine.compile.capture import capture
from popengine.compile.recording.current_capture import current
from popengine.compile.recording.functional import functionalize_graph
from popengine.compile.recording.graph_recorder import is_write
from popengine.errors import CaptureError
from small_models import module


def forward_of(function, *samples, training=False):
    model = module(lambda self, *inputs: function(*inputs))
    return capture(model, lambda inputs: [model(*inputs)], list(samples), training=training)


def calls(graph):
    return [node for node in graph.code.nodes if node.op == "call_function"]


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


def test_what_no_result_needs_is_left_out():
    graph = forward_of(lambda x: (x.exp().sum(), x + 1)[1], torch.zeros(3))
    assert [node.target for node in calls(graph)] == [torch.ops.aten.add.Tensor]


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
    model = module(
        lambda self, x: functional.mse_loss(self.weight.detach().add_(1) * self.weight * x, x),
        weight=nn.Parameter(torch.zeros(3)),
    )
    with pytest.raises(poptorch.Error, match="Parameter weight is changed in place by the forward"):
        poptorch.trainingModel(model)(torch.zeros(3))
    assert torch.equal(model.weight, torch.zeros(3))


def test_a_chosen_loss_is_a_scalar():
    def forward(self, x):
        chosen = self.weight * x
        current().choose_loss(chosen, "here")
        return chosen

    model = module(forward, weight=nn.Parameter(torch.ones(2)))
    with pytest.raises(CaptureError, match=r"the loss at here has shape \(2,\)"):
        capture(model, lambda inputs: [model(*inputs)], [torch.ones(2)], training=True)


@pytest.mark.parametrize(
    "forward, runs",
    [
        (lambda x: functional.dropout(x, 0.5), 0),
        (lambda x: (x * 2).add_(1).relu_(), 0),
        (lambda x: (lambda y: (y.add_(1), y.detach())[1])(x * 2), 0),  # another name
        (lambda x: (lambda y: (y[0].add_(1), y)[1])(x * 2), 1),  # through a view
        (lambda x: (lambda y: (y[0], y.add_(1))[0])(x * 2), 1),  # a view made before
        (lambda x: torch.empty(3).normal_() + x, 1),  # has no other form in torch
    ],
)
def test_a_write_costs_a_second_run_only_if_a_view_is_in_the_way(forward, runs, monkeypatch):
    functionalized = []
    monkeypatch.setattr(
        "popengine.compile.recording.functional.functionalize_graph",
        lambda *given, whole=functionalize_graph: (functionalized.append(given), whole(*given))[1],
    )
    graph = forward_of(forward, torch.ones(2, 3))
    assert not any(map(is_write, calls(graph)))
    assert len(functionalized) == runs
