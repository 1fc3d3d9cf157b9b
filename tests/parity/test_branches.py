"""While it is captured a forward takes the branches that it takes in plain PyTorch: nothing tells it of a compiler."""

import copy

import pytest
import torch
from parity_runs import options
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


def language_model(name):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 31}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}
    if name == "mamba":
        return transformers.MambaForCausalLM(transformers.MambaConfig(**sizes, state_size=4))
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads, num_local_experts=2))


@pytest.mark.parametrize("name", ["mamba", "mixtral"])
def test_a_language_model_takes_the_algorithm_of_plain_pytorch(name):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.model = language_model(name)

        def forward(self, words):
            return self.model(input_ids=words, labels=words).loss

    user = Model()
    plain = copy.deepcopy(user)
    words = torch.randint(31, (2, 8))
    optimizer = torch.optim.SGD(user.parameters(), lr=0.1)
    loss = poptorch.trainingModel(user, options(accumulation=1), optimizer)(words)
    expected = plain(words)
    expected.backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert torch.equal(loss, expected.detach())
    for key, value in plain.state_dict().items():
        assert torch.equal(user.state_dict()[key], value), key


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
