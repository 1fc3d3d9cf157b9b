"""Attention, recurrent layers and dropout on an accelerator: one operation, for which a device has kernels."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional

import poptorch
from late_device import late_devices
from popengine.operations import FUSED_CALLS

CAUSAL = torch.ones(6, 6).tril().bool()


class Attention(nn.Module):
    def __init__(self, heads=2, dtype=None, **options):
        super().__init__()
        self.inputs, self.last = nn.Linear(8, 8 + 8 * heads), nn.Linear(8, 4)
        self.heads, self.dtype, self.options = heads, dtype, options
        if options.get("attn_mask") == "trained":
            self.options["attn_mask"] = self.mask = nn.Parameter(torch.zeros(6, 6))

    def forward(self, x, labels):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype is not None):
            query, rest = self.inputs(x).split([8, 8 * self.heads], -1)
            key, value = rest.chunk(2, -1)
            cut = [part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in (query, key, value)]
            mixed = functional.scaled_dot_product_attention(*cut, **self.options)
            output = self.last(mixed.transpose(1, 2).flatten(2).mean(1)).float()
        return output, functional.cross_entropy(output, labels)


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.layer = getattr(nn, kind)(8, 5, batch_first=True, **options)
        self.last = nn.LazyLinear(4)
        self.last(self.layer(torch.zeros(2, 6, 8))[0])

    def forward(self, x, labels):
        output = self.last(self.layer(x)[0]).mean(1)
        return output, functional.cross_entropy(output, labels)


def trained(device, make=Attention, **options):
    """The results of two calls, the weights after them, and the fused operations in the plan."""
    torch.manual_seed(0)
    model, chosen = make(**options), poptorch.Options().device(device).deviceIterations(2)
    chosen.Training.gradientAccumulation(2)
    chosen.randomSeed(1)
    trainer = poptorch.trainingModel(model, chosen, poptorch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(1)
    x, labels = torch.randn(16, 6, 8), torch.randint(0, 4, (16,))
    results = [*trainer(x, labels), *trainer(x, labels)]
    trainer.copyWeightsToHost()
    lines = [line.call for piece in trainer._plans.executable.plan.partition.pieces for line in piece.lines]
    weights = [value.detach().clone() for value in model.parameters()]
    trainer.destroy()
    return results, weights, [call for call in lines if call in FUSED_CALLS or "dropout" in call]


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True, "scale": 0.3},
    "mask": {"attn_mask": CAUSAL},
    "grouped queries": {"heads": 1, "enable_gqa": True},
    "autocast": {"dtype": torch.bfloat16},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_attention_is_one_operation_with_the_bits_of_torchs_fused_kernels(name, monkeypatch):
    with late_devices(monkeypatch) as late:
        *found, calls = trained("cuda", **OPTIONS[name])
        assert calls == ["popengine.attention.default", "popengine.attention_backward.default"]
        assert late[0].replays == 3
    # For a CPU, products of half types are computed in float32.
    near = {"rtol": 0.02, "atol": 0.01} if name == "autocast" else {"rtol": 0, "atol": 0}
    for ours, theirs in zip(found, trained("cpu", **OPTIONS[name])[:2], strict=True):
        torch.testing.assert_close(ours, theirs, **near)


def test_attention_with_dropout_or_a_trained_mask_is_products_and_a_softmax(monkeypatch):
    with late_devices(monkeypatch):
        for options in ({"dropout_p": 0.5}, {"attn_mask": "trained"}):
            *_, calls = trained("cuda", **options)
            assert calls == []


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("LSTM", {}),
        ("LSTM", {"num_layers": 2, "bidirectional": True, "dropout": 0.0}),
        ("LSTM", {"proj_size": 3, "bias": False}),
        ("GRU", {"num_layers": 2}),
        ("RNN", {"nonlinearity": "relu"}),
    ],
    ids=str,
)
def test_a_recurrent_layer_is_one_operation_and_trains_as_on_the_cpu(kind, options, monkeypatch):
    with late_devices(monkeypatch) as late:
        *found, calls = trained("cuda", Recurrent, kind=kind, **options)
        name = {"RNN": "rnn_relu"}.get(kind, kind.lower())
        assert calls == [f"popengine.{name}.default", f"popengine.{name}_backward.default"]
        assert late[0].replays == 3
    torch.testing.assert_close(found, [*trained("cpu", Recurrent, kind=kind, **options)[:2]])


@pytest.mark.filterwarnings("error:RNN module weights")  # cuDNN's, when it copies them
def test_weights_of_a_recurrent_layer_are_one_block_that_moves_back_to_its_place(monkeypatch):
    with nullcontext() if torch.cuda.is_available() else late_devices(monkeypatch):
        model = Recurrent("LSTM", num_layers=2)
        options = poptorch.Options().device("cuda")
        trainer = poptorch.trainingModel(model, options, poptorch.optim.SGD(model.parameters(), lr=0.1))
        weights, blocks = [*model.layer.parameters()], []
        for _ in range(4):
            trainer(torch.randn(1, 6, 8), torch.zeros(1, dtype=torch.long))
            assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
            assert weights[0].storage_offset() == 0  # as cuDNN wants it
            blocks.append([weight.data_ptr() for weight in weights])
            trainer.copyWeightsToHost()
            model.load_state_dict({key: value * 0.9 for key, value in model.state_dict().items()})
        assert blocks == [blocks[0]] * 4
        trainer.destroy()


class Dropout(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 4), nn.Dropout(**options))

    def forward(self, x, labels):
        output = self.layers(x).mean(1)
        return output, functional.cross_entropy(output, labels)


def test_dropout_is_one_operation_with_the_bits_of_the_cpu(monkeypatch):
    with late_devices(monkeypatch) as late:
        *found, calls = trained("cuda", Dropout)
        assert calls == ["aten.native_dropout.default", "aten.native_dropout_backward.default"]
        assert late[0].replays == 3
    for ours, theirs in zip(found, trained("cpu", Dropout)[:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{"inplace": True}, {"p": 0.0}, {"p": 1.0}], ids=str)
def test_dropout_in_place_or_of_none_or_all_elements_is_torchs(options, monkeypatch):
    with late_devices(monkeypatch):
        *found, calls = trained("cuda", Dropout, **options)
        assert calls == []
    torch.testing.assert_close(found, [*trained("cpu", Dropout, **options)[:2]])


def test_dropout_between_recurrent_layers_is_recorded_as_operations_of_each_time_step(monkeypatch):
    with late_devices(monkeypatch):
        results, _, calls = trained("cuda", Recurrent, kind="GRU", num_layers=2, dropout=0.5)
        assert calls == [] and all(value.isfinite().all() for value in results)
