"""What forward computes from constants alone has a value while it is captured, and Python may ask for it."""

from functools import partial

import numpy
import pytest
import torch
from parity_runs import assert_trains_as_plain_pytorch
from torch import nn
from torch.nn import functional

import poptorch
from small_models import module

X = torch.arange(12.0).reshape(4, 3)


def compiled(forward, *inputs):
    return poptorch.inferenceModel(forward)(*inputs)


def causal(size: int):
    return torch.triu(torch.full((size, size), float("-inf")), diagonal=1)


def changed_in_place():
    mask = torch.zeros(3)
    mask[0] = 1
    mask[1:].add_(torch.tensor([2.0, 3.0])[0])
    return mask


KNOWN = {
    "item": lambda x: x * torch.arange(4).sum().item(),
    "bool": lambda x: x + 1 if (torch.ones(3) == 1).all() else x,
    "tolist": lambda x: x[torch.arange(3).flip(0).tolist()],
    "numpy": lambda x: x * float(numpy.cumsum(torch.arange(4).numpy())[-1]),
    "a mask": lambda x: x[torch.arange(4) % 2 == 0],
    "a mask behind a slice": lambda x: x[:, torch.tensor([True, False, True])],
    "masked_select": lambda x: torch.masked_select(x, torch.eye(4, 3) > 0),
    "nonzero": lambda x: x[torch.tensor([0, 1, 0, 1]).nonzero().squeeze(1)],
    "where": lambda x: x[torch.where(torch.eye(4, 3) > 0)],
    "equal": lambda x: x + torch.equal(torch.ones(2), torch.ones(2)),
    "one_hot": lambda x: x @ functional.one_hot(torch.arange(3)).float(),
    "bincount": lambda x: x * torch.bincount(torch.tensor([0, 2, 2])),
    "unique": lambda x: x * len(torch.unique(torch.tensor([1, 1, 2]))),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.tensor([2, 0, 1, 1]), 0),
    "a slice up to a value": lambda x: x[: torch.arange(4).max() - 1],
    "written in place": lambda x: x[:, changed_in_place() > 1],
    "a value of numpy": lambda x: x * torch.from_numpy(numpy.arange(3.0, dtype="f")).sum().item(),
    "a mask written to": lambda x: (x + 0).index_put((torch.arange(4) > 1,), torch.tensor(5.0)),
    "a shape": lambda x: x * torch.tensor(x.shape).prod().item(),
    "a loop": lambda x: sum((x * int(i) for i in torch.arange(3)), x),
}


@pytest.mark.parametrize("name", KNOWN)
def test_python_may_ask_for_a_value_that_comes_from_constants(name):
    forward = KNOWN[name]
    assert torch.equal(compiled(forward, X), forward(X))


def test_gradients_flow_through_a_mask_that_is_known():
    def forward(self, x):
        kept = (x * self.weight[:, None])[torch.arange(4) % 2 == 1]
        chosen = torch.masked_select(kept, torch.tensor([True, False, True]))
        return poptorch.identity_loss((kept**2).sum() + chosen.sum(), "none")

    def make():
        return module(forward, weight=nn.Parameter(torch.arange(4.0)))

    assert_trains_as_plain_pytorch(make, partial(torch.optim.SGD, lr=0.01), X, accumulation=1)


def test_a_constant_of_the_model_is_known_and_stays_as_it_is():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.sizes = torch.tensor([1, 3])

        def forward(self, x):
            copy = self.sizes.clone()
            copy.add_(1)
            sizes = (copy - 1).tolist()
            assert sizes == self.sizes.numpy().tolist()
            return [part * 2 for part in x.split(sizes)]

    model = Constant()
    first, second = poptorch.inferenceModel(model)(X)
    assert torch.equal(torch.cat([first, second]), X * 2)
    assert first.shape == (1, 3)
    assert model.sizes.tolist() == [1, 3]


UNKNOWN = {
    "item": lambda self, x: x.sum().item(),
    "tolist": lambda self, x: x.tolist(),
    "if": lambda self, x: bool(x.sum() > 0),
    "mask": lambda self, x: x[x > 0],
    "nonzero": lambda self, x: x.nonzero(),
    "unique": lambda self, x: torch.unique(x),
    "one_hot": lambda self, x: functional.one_hot(x.long()),
    "a buffer": lambda self, x: x * self.scale.item(),
    "a weight": lambda self, x: x if self.weight > 0 else -x,
    "random numbers": lambda self, x: x * torch.rand(()).item(),
    "a constant that an input was written into": lambda self, x: x * torch.zeros(4, 3).copy_(x).sum().item(),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_value_that_depends_on_data_is_refused_with_its_line(name):
    model = module(UNKNOWN[name], weight=nn.Parameter(torch.ones(1)), scale=torch.ones(1))
    with pytest.raises(poptorch.Error, match="reads a value out of a tensor") as caught:
        poptorch.inferenceModel(model)(X)
    assert f"{__file__}:{UNKNOWN[name].__code__.co_firstlineno}" in str(caught.value)
    assert "poptorch.cond" in str(caught.value)


def test_bincount_of_data_needs_minlength_and_fails_for_more():
    words = torch.tensor([3, 0, 3, 1])
    model = poptorch.inferenceModel(lambda w: torch.bincount(w, minlength=5))
    assert model(words).tolist() == torch.bincount(words, minlength=5).tolist()
    with pytest.raises(poptorch.Error):
        model(torch.tensor([0, 0, 0, 9]))
    weighted = poptorch.inferenceModel(lambda w, by: w.bincount(by, minlength=4))
    by = torch.tensor([0.5, 1.0, 2.0, 3.0])
    assert torch.equal(weighted(words, by), torch.bincount(words, by, 4))
    with pytest.raises(poptorch.Error, match="reads a value"):
        compiled(lambda w: torch.bincount(w), words)


@pytest.mark.parametrize("source", ["made in forward", "a constant", "a buffer", "an input"])
@pytest.mark.parametrize("training", [True, False])
def test_a_transformer_takes_masks(source, training):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)
            self.mask = None
            if source == "a buffer":
                self.register_buffer("kept", causal(5))
            elif source == "a constant":
                self.kept = causal(5)

        def forward(self, x, mask=None):
            if mask is None:
                made = nn.Transformer.generate_square_subsequent_mask(5)
                mask = self.kept if hasattr(self, "kept") else made
            return poptorch.identity_loss(self.encoder(x, mask), "mean")

    torch.manual_seed(0)
    model = Model().train(training)
    given = (torch.randn(5, 5, 8), causal(5)) if source == "an input" else (torch.randn(3, 5, 8),)
    expected = model(*given).detach()
    wrapped = poptorch.trainingModel(model) if training else poptorch.inferenceModel(model)
    torch.testing.assert_close(wrapped(*given), expected)


@pytest.mark.parametrize("training", [True, False])
def test_an_encoder_and_decoder_with_padding_masks_train(training):
    def forward(self, x, y, padding):
        mask = self.net.generate_square_subsequent_mask(y.shape[1])
        out = self.net(x, y, tgt_mask=mask, src_key_padding_mask=padding, memory_key_padding_mask=padding)
        return poptorch.identity_loss(out, "mean")

    torch.manual_seed(0)
    model = module(forward, net=nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)).train(training)
    padding = torch.tensor([[False] * 4 + [True], [False] * 5])
    given = torch.randn(2, 5, 8), torch.randn(2, 3, 8), padding
    expected = model(*given).detach()
    wrapped = poptorch.trainingModel(model) if training else poptorch.inferenceModel(model)
    torch.testing.assert_close(wrapped(*given), expected)


def test_capture_works_under_anomaly_detection():
    model = nn.Sequential(nn.Linear(3, 3))

    with torch.autograd.set_detect_anomaly(True):
        poptorch.trainingModel(
            module(lambda self, x: poptorch.identity_loss(self.layer(x), "mean"), layer=model)
        )(X)
        assert torch.is_anomaly_enabled()


C = torch.complex(X, X + 1).conj()  # its imaginary part has the lazy sign


@pytest.mark.parametrize(
    ("forward", "given"),
    [
        (lambda c: torch.view_as_real(c.resolve_conj()) * 2, C),
        (lambda x: x.resolve_neg().view(-1) * 2, C.imag),
        (lambda x: torch.view_as_real(C.resolve_conj())[..., 1] * x, X),
        (lambda x: x * torch.view_as_real(C.resolve_conj())[..., 1].sum().item(), X),
    ],
    ids=["an input", "an input's part", "a constant", "a known value"],
)
def test_a_lazy_conjugation_or_sign_is_carried_out(forward, given):
    assert torch.equal(poptorch.inferenceModel(forward)(given), forward(given))


SPARSE = torch.eye(3).to_sparse().coalesce()
FROM_SPARSE = {
    "dimensions": lambda x: x * SPARSE.sparse_dim() + SPARSE.indices().shape[1],
    "indices": lambda x: x[:, SPARSE.indices()[0]] * SPARSE.values(),
    "a value": lambda x: x * SPARSE.coalesce().values().sum().item(),
    "a dense one": lambda x: x @ SPARSE.to_dense(),
    "a sum": lambda x: x @ (SPARSE + SPARSE).to_dense(),
    "of lists": lambda x: x + torch.sparse_coo_tensor([[0, 1], [0, 1]], [2.0, 3.0], (4, 3)).to_dense(),
    "made in forward": lambda x: (
        x + torch.sparse_coo_tensor(torch.eye(2).long(), torch.ones(2), (4, 3)).to_dense()
    ),
    "by rows": lambda x: x @ SPARSE.to_sparse_csr().to_dense(),
}


@pytest.mark.parametrize("name", FROM_SPARSE)
def test_what_a_sparse_constant_holds_is_known(name):
    forward = FROM_SPARSE[name]
    assert torch.equal(compiled(forward, X), forward(X))


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x @ SPARSE,
        lambda x: x + SPARSE.mul_(2).to_dense(),
        module(lambda self, x: self.sparse @ x, sparse=SPARSE),
    ],
)
def test_a_sparse_tensor_in_a_graph_is_refused_with_the_dense_one_to_write(forward):
    with pytest.raises(poptorch.Error, match="sparse") as caught:
        compiled(forward, X)
    assert "to_dense()" in str(caught.value)
    assert torch.equal(SPARSE.to_dense(), torch.eye(3))
