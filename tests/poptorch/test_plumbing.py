"""Names that programs import: errors of the core, the original's insides, automatic casts."""

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
    with pytest.raises(poptorch.Error, match="fp16"):
        poptorch.autocasting.Policy(fp16=["linear"])
