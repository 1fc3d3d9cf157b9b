"""Memory layout: convolutional parts in channels_last as a whole, everything else as it was."""

import pytest
import torch
from torch import nn

from popengine.compile.capture import capture
from popengine.compile.partition import partition
from popengine.compile.rewriting.memory_layout import has_convolutions, in_channels_last
from popengine.run.backends.eager import build
from popengine.settings import Strategy

aten = torch.ops.aten
ALONE = Strategy("sharded", "auto_increment")


class Images(nn.Module):
    """Two convolutions with a norm, a dropout and a pool between them, and a flattened end."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)
        self.second, self.last = nn.Conv2d(8, 4, 3), nn.Linear(4 * 4 * 4, 5)

    def forward(self, x, y):
        x = self.drop(torch.relu(self.norm(self.first(x))))
        x = torch.relu(self.second(nn.functional.max_pool2d(x, 2))).flatten(1)
        return x, nn.functional.cross_entropy(self.last(x), y)


def model_and_inputs(dropout=0.0):
    torch.manual_seed(0)
    model = Images()
    model.drop.p = dropout
    return model, [torch.randn(2, 3, 14, 14), torch.randint(0, 5, (2,))]


def captured(dropout=0.0):
    model, inputs = model_and_inputs(dropout)
    return capture(model, lambda given: model(*given), inputs, training=True)


def results_of(graph, look=lambda operation: operation, dropout=0.0):
    model, inputs = model_and_inputs(dropout)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {}
    for slot in graph.slots:
        given = inputs[int(slot.key)] if slot.role == "input" else state.get(slot.key)
        values[slot.name] = torch.ones(()) if given is None else given.detach()
    parts = partition(graph, ALONE)
    with torch.no_grad():
        for name, piece in parts.prepared.items():
            (values[name],) = build(piece)([values[read] for read in piece.reads])
        for piece in parts.pieces:
            given = [values[name] for name in piece.reads]
            made = build(piece, look)([*given, 7] if piece.draws else given)
            values.update(zip(piece.writes, made, strict=True))
    return {(result.kind, result.key): values[result.name] for result in graph.results}


def test_every_operand_of_a_convolution_is_in_channels_last_without_a_copy_between_two():
    seen, copies = [], []

    def look(operation):
        def call(*args, **kwargs):
            if operation in (aten.convolution.default, aten.convolution_backward.default):
                operands = args[: 2 if operation is aten.convolution.default else 3]
                seen.extend(value.is_contiguous(memory_format=torch.channels_last) for value in operands)
            if operation is aten._to_copy.default:
                copies.append(tuple(args[0].shape))
            return operation(*args, **kwargs)

        return call

    results_of(in_channels_last(captured()), look)
    assert seen == [True] * 10  # two forwards with two operands, two backwards with three
    assert copies == [(2, 3, 14, 14)]  # the images; copies of weights are made once a step, beside the pieces


def test_the_same_random_numbers_are_drawn():
    plain = results_of(captured(0.5), dropout=0.5)["output", "0"]
    found = results_of(in_channels_last(captured(0.5)), dropout=0.5)["output", "0"]
    assert (plain == 0).any()
    torch.testing.assert_close(found, plain, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("layer", "shape", "found"), [
    (nn.Conv2d(2, 2, 1), (1, 2, 3, 3), True),
    (nn.Conv3d(2, 2, 1), (1, 2, 3, 3, 3), True),
    (nn.Conv1d(2, 2, 1), (1, 2, 3), False),
    (nn.Linear(3, 2), (1, 3), False),
])  # fmt: skip
def test_layouts_are_a_matter_of_convolutions_over_images_and_volumes(layer, shape, found):
    graph = capture(layer, lambda given: [layer(*given)], [torch.zeros(shape)], training=False)
    assert has_convolutions(graph) is found
