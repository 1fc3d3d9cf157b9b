"""MultiConv: validated and recorded, results as without it."""

import pytest
import torch
from torch import nn

import poptorch

X = torch.randn(1, 2, 5, 5)


class Model(nn.Module):
    def __init__(self, scope, nested=False, empty=False):
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 3, 3), nn.Conv2d(2, 3, 3)
        self.scope, self.nested, self.empty = scope, nested, empty

    def forward(self, x):
        with self.scope:
            if self.nested:
                with poptorch.MultiConv():
                    pass
            a, b = (x, x) if self.empty else (self.a(x), self.b(x))
        return a + b


def test_results_are_those_of_separate_convolutions_and_the_group_is_recorded():
    scope = poptorch.MultiConv().availableMemoryProportions([0.1, 0.2]).partialsTypes(torch.half)
    scope.planType(poptorch.MultiConvPlanType.Parallel).perConvReservedTiles(120).cycleBackOff(0.3)
    scope.enableConvDithering(True).enableConvDithering(None)
    module = Model(scope)
    model = poptorch.inferenceModel(module)
    torch.testing.assert_close(model(X), module(X))
    groups = [n.meta["group"] for n in model._executable.graph.code.nodes if "group" in n.meta]
    assert len(groups) == 2
    assert groups[0] is groups[1]
    assert groups[0].properties["available_memory_proportions"] == (0.1, 0.2)
    assert "conv_dithering" not in groups[0].properties


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Model(poptorch.MultiConv(), nested=True), "Nested poptorch.MultiConv is not supported"),
        (Model(poptorch.MultiConv(), empty=True), "Unexpected end_multi_conv"),
        (Model(poptorch.MultiConv().availableMemoryProportions([0.1])), "has 1 values"),
    ],
)
def test_misuse_is_an_error_at_compile_time(module, words):
    with pytest.raises(poptorch.Error, match=words):
        poptorch.inferenceModel(module)(X)


def test_properties_of_a_wrong_type_are_refused():
    multi = poptorch.MultiConv()
    with pytest.raises(AssertionError, match="Invalid available memory proportion!"):
        multi.availableMemoryProportions("0.1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Invalid partials types"):
        multi.partialsTypes("half")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dithering"):
        multi.enableConvDithering([True, 1])  # type: ignore[list-item]
    with pytest.raises(AssertionError, match="Invalid plan type!"):
        multi.planType("parallel")  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        multi.perConvReservedTiles(0.5)  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        multi.cycleBackOff(1)
