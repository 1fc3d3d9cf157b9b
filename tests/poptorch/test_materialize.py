"""Models that are made on the device "meta" get the first values of ordinary ones at their first call."""

import pytest
import torch
from torch import nn

import poptorch


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.norm, self.head = nn.BatchNorm1d(16), nn.Linear(16, 50)
        self.head.weight = self.embed.weight

    def forward(self, x, label):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(self.norm(x.mean(1))), label)


def made(device, kind=Stack):
    torch.manual_seed(0)
    with torch.device(device):
        return kind()


BATCH = torch.arange(20).view(4, 5), torch.arange(4)


def wrapped(model):
    options = poptorch.Options().showCompilationProgressBar(False)
    return poptorch.trainingModel(model, options, torch.optim.AdamW(model.parameters(), lr=0.01))


def test_a_model_made_on_meta_trains_with_the_bits_of_an_ordinary_one():
    ordinary, model = made("cpu"), made("meta")
    torch.manual_seed(0)
    poptorch.materialize(model)
    parameters = list(model.parameters())
    torch.manual_seed(5)  # what is drawn later does not matter
    before = torch.get_rng_state()
    losses = [wrapped(each)(*BATCH) for each in (ordinary, model)]
    assert losses[0] == losses[1]
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert torch.equal(before, torch.get_rng_state())
    for name, value in ordinary.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    assert model.head.weight is model.embed.weight


def test_a_function_sets_the_weights_of_each_layer():
    def init(layer):
        for value in [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]:
            value.fill_(0.5 if value.is_floating_point() else 0)

    model = poptorch.materialize(
        made("meta", lambda: nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))), init
    )
    poptorch.inferenceModel(model.eval())(torch.ones(4, 4))
    assert torch.equal(model[0].weight, torch.full((2, 4), 0.5))


def test_weights_that_nothing_sets_are_an_error_and_stay_without_values():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.register_buffer("mask", torch.ones(4).bool())

        def forward(self, x):
            return (self.first(x) * self.mask).sum()

    model = made("meta", Table)
    with pytest.raises(
        poptorch.Error, match=r"first.weight, first.bias, mask [^$]*poptorch.materialize\(model\)"
    ):
        wrapped(model)(torch.ones(4, 4))
    poptorch.materialize(model)
    for _ in range(2):
        with pytest.raises(
            poptorch.Error, match=r"mask of the model, which is made on the meta[^$]*in Table\n"
        ):
            wrapped(model)(torch.ones(4, 4))
    assert model.mask.is_meta
    model.mask = torch.ones(4).bool()
    assert wrapped(model)(torch.ones(4, 4)).isfinite()


def test_a_checkpoint_replaces_the_weights_without_a_copy(tmp_path):
    torch.save(made("cpu").state_dict(), tmp_path / "weights.pt")
    model, ordinary = made("meta"), made("cpu")
    model.load_state_dict(torch.load(tmp_path / "weights.pt", mmap=True), assign=True)
    model.head.weight = model.embed.weight
    assert wrapped(model)(*BATCH) == wrapped(ordinary)(*BATCH)
