"""Half and float in one model: weights follow their input, everything else promotes as in PyTorch."""

import pytest
import torch
from torch import nn

import poptorch
from small_models import module

HALF, FLOAT = torch.float16, torch.float32
LAYERS = [
    (lambda: nn.Linear(4, 3), (2, 4)),
    (lambda: nn.Bilinear(4, 4, 3), (2, 4)),
    (lambda: nn.Conv1d(2, 3, 3), (2, 2, 5)),
    (lambda: nn.Conv2d(2, 3, 3), (1, 2, 5, 5)),
    (lambda: nn.ConvTranspose2d(2, 3, 3), (1, 2, 5, 5)),
    (lambda: nn.LayerNorm(4), (2, 4)),
    (lambda: nn.GroupNorm(1, 2), (2, 2, 4)),
    (lambda: nn.BatchNorm1d(4), (3, 4)),
    (lambda: nn.PReLU(4), (3, 4)),
    (lambda: nn.GRUCell(4, 3), (2, 4)),
]


@pytest.mark.parametrize(("make", "shape"), LAYERS)
@pytest.mark.parametrize(("of_input", "of_weights"), [(HALF, FLOAT), (FLOAT, HALF)])
def test_the_output_has_the_type_of_the_input(make, shape, of_input, of_weights):
    layer = make()
    x = torch.randn(shape)
    inputs = (x, x) if isinstance(layer, nn.Bilinear) else (x,)
    expected = layer.train()(*inputs) if isinstance(layer, nn.BatchNorm1d) else layer(*inputs)
    model = poptorch.inferenceModel(layer.to(of_weights))
    found = model(*(value.to(of_input) for value in inputs))
    assert found.dtype == of_input
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)


def test_products_follow_their_first_operand():
    def forward(a, b, bias):
        return a @ b, torch.matmul(b, a), torch.addmm(bias, a, b), torch.bmm(a[None], b[None])

    a, b = torch.randn(3, 3, dtype=HALF), torch.randn(3, 3)
    found = poptorch.inferenceModel(forward)(a, b, b)
    assert [value.dtype for value in found] == [HALF, FLOAT, HALF, HALF]


@pytest.mark.parametrize(
    "product",
    [
        lambda a, b: torch.einsum("ij,jk->ik", a, b),
        lambda a, b: torch.einsum("ij,jk->ik", [a, b]),
        lambda a, b: torch.tensordot(a, b, 1),
        lambda a, b: torch.inner(a, b.T),
    ],
)
def test_products_over_named_dimensions_do_so_too(product):
    a, b = torch.randn(3, 3), torch.randn(3, 3)
    for of_a, of_b in [(HALF, FLOAT), (FLOAT, HALF)]:
        found = poptorch.inferenceModel(product)(a.to(of_a), b.to(of_b))
        assert found.dtype == of_a
        torch.testing.assert_close(found.float(), a @ b, rtol=1e-2, atol=1e-2)


def test_attention_follows_its_query():
    layer = nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.randn(2, 3, 4, dtype=HALF)
    assert poptorch.inferenceModel(lambda x: layer(x, x, x)[0])(x).dtype == HALF


def test_other_operations_promote():
    def forward(a, b):
        return a + b, a * 2, torch.cat([a, b])

    a, b = torch.ones(2, dtype=HALF), torch.ones(2)
    found = poptorch.inferenceModel(forward)(a, b)
    assert [value.dtype for value in found] == [FLOAT, HALF, FLOAT]


def test_master_weights_keep_their_type_in_training():
    model = module(
        lambda self, x: poptorch.identity_loss(self.layer(self.norm(x)).float() ** 2, "mean"),
        norm=nn.BatchNorm1d(4),
        layer=nn.Linear(4, 2),
    )
    before = model.layer.weight.detach().clone()
    trainer = poptorch.trainingModel(model, optimizer=poptorch.optim.SGD(model.parameters(), lr=0.1))
    trainer(torch.randn(8, 4, dtype=HALF))
    assert model.layer.weight.dtype == FLOAT
    assert not torch.equal(model.layer.weight, before)
    assert model.norm.running_mean.dtype == FLOAT
    assert model.norm.num_batches_tracked == 1


def test_one_hot_needs_its_number_of_classes():
    with pytest.raises(poptorch.Error, match="num classes must be specified"):
        poptorch.inferenceModel(lambda x: nn.functional.one_hot(x))(torch.tensor([1, 2]))
    found = poptorch.inferenceModel(lambda x: nn.functional.one_hot(x, 3))(torch.tensor([1, 2]))
    assert found.tolist() == [[0, 1, 0], [0, 0, 1]]
