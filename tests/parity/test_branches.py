"""While it is captured a forward takes the branches that it takes in plain PyTorch: nothing tells it of a compiler."""

import pytest
import torch
from torch import nn
from torch.compiler import is_compiling

import poptorch
from small_models import module

ASKS = {
    "by name": is_compiling,
    "in torch": lambda: torch.compiler.is_compiling(),
    "of dynamo": lambda: torch.compiler.is_dynamo_compiling(),
    "of exports": lambda: torch.compiler.is_exporting(),
    "of traces": lambda: torch.jit.is_tracing(),
}


@pytest.mark.parametrize("asks", ASKS.values(), ids=ASKS)
def test_a_model_that_asks_for_a_compiler_computes_as_in_plain_pytorch(asks):
    # It was told of one, and computed something else without a word.
    def forward(x):
        return x * 2 if asks() else x * 3

    x = torch.ones(2)
    assert torch.equal(poptorch.inferenceModel(forward)(x), forward(x))
    assert torch.equal(forward(x), 3 * x)


def test_torchs_own_layers_branch_on_no_data_and_the_log_says_once_where(caplog):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval().requires_grad_(False)
    x, mask = torch.randn(2, 5, 8), torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 3:] = True

    caplog.set_level("INFO", "poptorch::python")
    found = poptorch.inferenceModel(
        module(lambda self, x, mask: self.model(x, src_key_padding_mask=mask), model=model).eval()
    )(x, mask)
    (said,) = (line for line in caplog.messages if "takes its branch for compilers" in line)
    assert "forward in transformer.py" in said and __file__ in said
    assert torch.allclose(found[~mask], model(x, src_key_padding_mask=mask)[~mask], atol=1e-6)


@pytest.mark.parametrize(
    ("a", "b", "offs"),
    [
        ((6, 8), (2, 8, 12), [2, 6]),
        ((8, 4), (4, 12), [2, 4]),
        ((2, 4, 8), (8, 12), [4, 12]),
        ((2, 4, 8), (2, 8, 12), None),
    ],
)
def test_grouped_products_have_the_shape_that_torch_gives_them(a, b, offs):
    a, b = torch.randn(a), torch.randn(b)
    given = [a, b, *([] if offs is None else [torch.tensor(offs, dtype=torch.int32)])]

    def forward(a, b, offs=None):
        return torch._grouped_mm(a, b, offs=offs)

    assert torch.allclose(poptorch.inferenceModel(forward)(*given), forward(*given))
