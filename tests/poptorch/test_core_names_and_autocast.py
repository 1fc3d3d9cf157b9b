"""Names that programs import: errors of the core, the original's insides, automatic casts."""

import copy

import pytest
import torch
from torch import nn

import poptorch


def test_the_core_has_the_same_errors():
    assert poptorch.poptorch_core.Error is poptorch.Error
    error = poptorch.createPoptorchError("it failed")
    assert isinstance(error, poptorch.Error)
    assert str(error) == "'poptorch_py_error': it failed"


@pytest.mark.parametrize(
    "name", ["accessAttributes", "getIpuTensorId", "poptorchAtExit", "importPoptorchMetadataFromFile"]
)
def test_the_insides_can_be_imported_and_refuse_to_be_called(name):
    function = getattr(poptorch, name)
    arguments = [] if name == "poptorchAtExit" else ["x"]
    with pytest.raises(poptorch.Error, match=f"poptorch.{name}"):
        function(*arguments)
    assert poptorch.attributes_lists == []


def test_autocast_runs_products_in_half_inside_a_compiled_model():
    layer = nn.Linear(4, 3)

    def forward(x):
        with poptorch.autocast():
            y = layer(x)
            with poptorch.autocast(enabled=False):
                z = layer(x)
        return y, z, poptorch.autocast()(layer)(x), layer(x)

    x = torch.randn(2, 4)
    found = poptorch.inferenceModel(forward)(x)
    half, single = torch.float16, torch.float32
    assert [value.dtype for value in found] == [half, single, half, single]
    assert {value.dtype for value in forward(x)} == {single}


def test_rules_of_ones_own_are_refused():
    with pytest.raises(poptorch.Error, match=r"rules of your own are not supported.*(?s:.)*fix:"):
        poptorch.autocasting.Policy(fp16=["linear"])


def test_autocast_off_inside_autocast_casts_nothing():
    def forward(x):
        with poptorch.autocast():
            with poptorch.autocast(False):
                off = x @ x
            return off, x @ x

    off, on = poptorch.inferenceModel(forward)(torch.randn(2, 2))
    assert (off.dtype, on.dtype) == (torch.float32, torch.float16)


def test_autocast_may_be_an_attribute_that_is_entered_again_and_copied():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.cast = nn.Linear(2, 2), poptorch.autocast()

        def forward(self, x):
            with self.cast, self.cast:
                return self.layer(x)

    for model in (Model(), copy.deepcopy(Model())):
        for _ in range(2):
            assert poptorch.inferenceModel(model)(torch.randn(2, 2)).dtype == torch.float16


def test_autocast_does_nothing_where_the_options_say_so():
    options = poptorch.Options()
    options.Precision.autocastEnabled(False)
    model = poptorch.inferenceModel(poptorch.autocast()(torch.nn.Linear(2, 2)), options)
    assert model(torch.randn(1, 2)).dtype == torch.float32
