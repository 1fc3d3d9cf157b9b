"""Identities and scopes: the same values and gradients, and a mark in the graph."""

import pytest
import torch
from torch import nn

import poptorch
from small_models import module

X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def nodes(model):
    """The names of the operations of a compiled model, and its nodes."""
    found = [n for n in model._executable.graph.code.nodes if n.op == "call_function"]
    return [str(node.target) for node in found], found


def compiled(forward, *inputs):
    model = poptorch.inferenceModel(forward)
    return model, model(*inputs)


MARKS = [
    (lambda x: poptorch.nop(x), "poptorch.nop.default"),
    (lambda x: poptorch.recomputationCheckpoint(x), "poptorch.recomputation_checkpoint.default"),
    (lambda x: poptorch.set_available_memory(x, 0.3), "poptorch.set_available_memory.default"),
    (
        lambda x: poptorch.set_overlap_for_input(x, poptorch.OverlapMode.NoOverlap),
        "poptorch.set_overlap_for_input.default",
    ),
]


@pytest.mark.parametrize(("function", "name"), MARKS)
def test_a_mark_is_the_identity_on_the_host_and_a_node_in_the_graph(function, name):
    assert function(X) is X
    model, out = compiled(lambda x: function(x * 2), X)
    assert torch.equal(out, X * 2)
    assert name in nodes(model)[0]


@pytest.mark.parametrize("function", [function for function, _ in MARKS])
def test_gradients_flow_through_a_mark(function):
    layers = nn.Linear(2, 2), nn.Linear(2, 2)
    layers[1].load_state_dict(layers[0].state_dict())
    for layer, mark in zip(layers, (lambda y: y, function), strict=True):
        model = module(
            lambda self, x, mark=mark: poptorch.identity_loss(mark(self.layer(x)) ** 2, "mean"), layer=layer
        )
        poptorch.trainingModel(model, None, torch.optim.SGD(model.parameters(), lr=0.1))(X)
    assert torch.equal(layers[0].weight, layers[1].weight)


def test_a_checkpoint_keeps_the_container():
    a, b = X, X + 1
    assert poptorch.recomputationCheckpoint(a, b) == (a, b)
    assert poptorch.recomputationCheckpoint([a, b]) == [a, b]
    assert poptorch.recomputationCheckpoint((a,)) == (a,)
    with pytest.raises(ValueError, match="All inputs must be tensors"):
        poptorch.recomputationCheckpoint(a, 1)


def test_marks_refuse_what_is_no_tensor():
    with pytest.raises(poptorch.Error):
        poptorch.nop(1)
    with pytest.raises(poptorch.Error, match="may only set available memory"):
        poptorch.set_available_memory([X], 0.1)
    with pytest.raises(poptorch.Error, match="may only set overlap"):
        poptorch.set_overlap_for_output((X, 3), poptorch.OverlapMode.NoOverlap)


def test_overlap_keeps_the_structure():
    given = {"a": X, "b": (X, [X])}
    found = poptorch.set_overlap_for_output(given, poptorch.OverlapMode.OverlapDeviceIterationLoop)
    assert found == given


def test_a_name_scope_is_the_prefix_of_node_names():
    def forward(x):
        with poptorch.NameScope("outer"), poptorch.NameScope("inner"):
            y = x * 2
        return y + 1

    model, out = compiled(forward, X)
    assert torch.equal(out, X * 2 + 1)
    assert [node.name for node in nodes(model)[1]] == ["outer_inner_mul", "add_tensor"]
    with pytest.raises(AssertionError):
        poptorch.NameScope(3)  # type: ignore[arg-type]


def test_attributes_nest_and_come_back():
    def forward(x):
        with poptorch.Attribute(__outline={"layer": "a"}):
            with poptorch.Attribute(__outline={"layer": "b", "more": 1}):
                y = x * 2
            return y + 1

    _, found = nodes(compiled(forward, X)[0])
    assert found[0].meta["attributes"] == {"__outline": {"layer": "b", "more": "1"}}
    assert found[1].meta["attributes"] == {"__outline": {"layer": "a"}}


def test_the_old_torch_operations_work_on_the_host_and_in_a_graph():
    ops = torch.ops.poptorch

    def forward(x):
        ops.push_name_scope("scope")
        ops.set_attribute("a", "k", "v")
        y = ops.internal_cast(x, "FLOAT16") + 1
        ops.clear_attribute("a", "k")
        ops.pop_name_scope()
        y = ops.nop(ops.set_matmul_serialization(y, "output_channels", 2, False))
        y = ops.ipu_print_tensor(ops.internal_cast(y, "FLOAT"), "")
        return ops.dynamic_slice(y, 0, torch.tensor([1]), 1, 1), ops.identity_loss(y, 1)

    for row, loss in (forward(X), poptorch.inferenceModel(forward)(X)):
        assert torch.equal(row, X[1:] + 1)
        assert loss == (X + 1).mean()


def test_the_old_block_operations_open_blocks():
    def forward(x):
        torch.ops.poptorch.begin_ipu_block(0, 0, 0)
        x = x + 1
        torch.ops.poptorch.end_ipu_block()
        torch.ops.poptorch.begin_ipu_block(1, 0, 0)
        return x * 2

    model, out = compiled(forward, X)
    assert torch.equal(out, (X + 1) * 2)
    assert [visit.name for visit in model._executable.plan.partition.signature.visits][1:] == ["0", "1"]


def test_what_a_mark_returns_can_be_changed_in_place():
    def forward(self, x):
        y = poptorch.nop(self.layer(x))
        y += 1
        y = torch.ops.poptorch.recomputation_checkpoint(y)
        y *= 2
        return poptorch.identity_loss(y, "mean")

    model = module(forward, layer=nn.Linear(2, 2))
    expected = model(X).detach()
    found = poptorch.trainingModel(model)(X)
    torch.testing.assert_close(found, expected)
