"""allclose compares structure and values; compare finds the faults of an update, and their factor."""

import functools

import pytest
import torch
from torch import nn

import poptorch
from poptorch.testing import allclose, compare
from small_models import module

ONE, OTHER = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.1])
MICRO_BATCHES = 4


def test_structure_and_values_must_match():
    assert allclose(ONE, ONE + 1e-7)
    assert allclose((ONE, [OTHER]), (ONE, [OTHER]))
    assert not allclose(ONE, OTHER)
    assert not allclose((ONE, ONE), [ONE, ONE])
    assert not allclose((ONE,), (ONE, ONE))
    assert not allclose(ONE, torch.ones(3))
    assert allclose({"a": ONE, "b": 2}, {"b": 2, "a": ONE + 1e-7})
    assert not allclose({"a": ONE}, {"b": ONE}) and not allclose({"a": ONE}, {"a": OTHER})


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.unused, self.last = nn.Linear(4, 8), nn.Linear(1, 1), nn.Linear(8, 2)

    def forward(self, x, y):
        output = self.last(self.first(x).tanh())
        return output, nn.functional.mse_loss(output, y)


def options(replicas=1):
    found = poptorch.Options().showCompilationProgressBar(False).replicationFactor(replicas)
    found.Training.gradientAccumulation(MICRO_BATCHES)
    return found


def batch(rows):
    torch.manual_seed(1)
    return torch.randn(rows, 4), torch.randn(rows, 2)


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_an_update_in_a_layout_is_equal_and_changes_nothing(kind, replicas):
    net = poptorch.annotate(Net(), {"first": 0, "last": 1})
    found = compare(net, options(replicas), batch(24), kind(net.parameters(), lr=0.1))
    assert found.equal and found.conclusion == "all equal"
    assert "1f1b: 2 stages on 2 ipus" in found.title
    assert [name for name, *_ in found.rows] == [name for name, _ in Net().named_parameters()]
    assert all(map(torch.equal, net.state_dict().values(), Net().state_dict().values()))


def test_only_the_rows_of_the_first_update_are_used():
    assert compare(Net(), options().deviceIterations(2), batch(16)).equal


def test_a_batch_may_be_a_dictionary():
    x, y = batch(8)
    assert compare(Net(), options(), {"y": y, "x": x}).equal


def test_the_loss_is_the_output_of_that_name():
    class Named(Net):
        def forward(self, x, y):
            output, loss = super().forward(x, y)
            return {"size": output.abs().mean(), "loss": loss}

    assert compare(Named(), options(), batch(8)).equal


def test_sums_in_place_of_means_are_named():
    summing = options(3)
    summing.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    found = compare(Net(), summing, batch(24))
    assert not found.equal and found.loss == "equal"
    cause = "accumulation is not scaled, over 4 micro-batches and not averaged over 3 replicas"
    assert found.conclusion == f"gradients are 12 times plain: {cause}"


def in_micro_batches(model, optimizer, batch, factor=1.0, skipped=0):
    loss = torch.zeros(())
    for x, y in list(zip(*(t.split(2) for t in batch), strict=True))[skipped:]:
        part = model(x.clone(), y.clone())[1] / MICRO_BATCHES
        part.backward()
        loss += part.detach()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= factor
    optimizer.step()
    return loss


def test_a_loop_that_scales_twice_is_named_and_printed():
    found = compare(
        Net(),
        options(),
        batch(8),
        update=lambda *given: in_micro_batches(*given, factor=1 / MICRO_BATCHES),
    )
    lines = str(found).splitlines()
    assert lines[1] == "gradients are 1/4 of plain: accumulation is scaled twice, over 4 micro-batches"
    assert lines[2:4] == ["loss: equal", " " * 15 + "gradient      new weight"]
    assert lines[4].startswith("first.weight   1/4 of plain  at [0, 0]: ")


def test_a_loop_that_leaves_rows_out_differs_and_one_that_does_not_is_equal():
    found = compare(Net(), options(), batch(8), update=lambda *given: in_micro_batches(*given, skipped=1))
    assert found.conclusion == "gradients are of rows 2 to 7 of 8 only: rows are left out"
    assert compare(Net(), options(), batch(8), update=in_micro_batches).equal


@pytest.mark.parametrize("kind", [torch.optim.AdamW, functools.partial(torch.optim.SGD, momentum=0.9)])
def test_several_updates_are_equal_in_a_layout_with_several_device_iterations(kind):
    net = Net()
    found = compare(net, options().deviceIterations(2), batch(16), kind(net.parameters(), lr=0.1), updates=3)
    assert found.equal and "; 3 updates; against plain PyTorch" in found.title


def test_a_loop_that_loses_the_momentum_differs_from_the_second_update_on():
    def forgetful(model, optimizer, batch):
        optimizer.state.clear()
        return in_micro_batches(model, optimizer, batch)

    def found(updates):
        net = Net()
        momentum = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        return compare(net, options(), batch(8), momentum, update=forgetful, updates=updates)

    assert found(1).equal
    conclusion = found(2).conclusion
    assert conclusion.startswith(
        "all gradients are equal; 4 new weights differ, first first.weight: at [0, 0]"
    )


def test_a_loop_that_takes_the_batch_as_one_differs_by_rounding():
    def whole(model, optimizer, batch):
        loss = model(*batch)[1]
        loss.backward()
        optimizer.step()
        return loss

    found = compare(Net(), options(), batch(8), update=whole)
    assert {gradient[:8] for _, gradient, _ in found.rows} <= {"none", "equal", "rounding"}


def test_a_model_without_a_loss_is_an_error():
    with pytest.raises(poptorch.Error, match="forward returns no loss"):
        compare(nn.Linear(4, 4), options(), torch.randn(8, 4))


def test_a_model_whose_function_keeps_its_layers_is_refused_and_keeps_its_gradients():
    layer = torch.nn.Linear(3, 2)

    layer.bias.grad = before = torch.ones(2)
    with pytest.raises(
        poptorch.Error, match=r"parameters of the model itself: layer.weight\n  why: a lambda"
    ):
        poptorch.testing.compare(
            module(lambda self, x: self.run(x), layer=layer, run=lambda x: layer(x).square().mean()),
            None,
            torch.randn(4, 3),
        )
    assert layer.weight.grad is None and layer.bias.grad is before


def test_a_comparison_refuses_inputs_with_rows_in_another_dimension():
    opts = poptorch.Options().batchDims({"x": 1})
    with pytest.raises(poptorch.Error, match="batchDims is not supported"):
        poptorch.testing.compare(torch.nn.Linear(2, 2), opts, torch.randn(4, 2))


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *(("options", (1, 2)), ("optimizer", 0.1), ("update", "loop"), ("updates", 0)),
        *(("micro_batches", -1), ("micro_batches", 2.0), ("model", torch.ones(1)), ("batch", None)),
    ],
)
def test_an_argument_of_another_type_is_named(argument, value):
    arguments = {"model": Net(), "options": None, "batch": batch(8), argument: value}
    words = "no rows" if argument == "batch" else f"compare: {argument} takes"
    with pytest.raises(poptorch.Error, match=words):
        compare(**arguments)
