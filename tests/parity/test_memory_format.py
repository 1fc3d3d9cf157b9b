"""`Options.memoryFormat`: what is asked for, what is chosen, and that it is kept."""

import os
import subprocess
import sys

import parity_models
import parity_runs
import pytest
import torch
from torch import nn

import poptorch
from small_models import module


def executor(memory_format, strategy=None, **more):
    options = parity_runs.options(strategy, **more)
    options.memoryFormat(memory_format)
    model = parity_runs.made(parity_models.Digits)
    if strategy is not None:
        parity_models.annotated(model)
    return poptorch.trainingModel(model, options, poptorch.optim.SGD(model.parameters(), lr=0.1))


def losses(trainer, calls=2):
    torch.manual_seed(1)
    rows = [parity_models.Digits.data(parity_runs.ACCUMULATION * parity_runs.ROWS) for _ in range(calls)]
    return torch.cat([trainer(*call)[1] for call in rows])


def test_auto_says_which_layout_it_chose(caplog):
    caplog.set_level("INFO", "poptorch::python")
    trainer = executor("auto")
    losses(trainer)
    assert trainer.memory_format == "channels_last"
    assert "memoryFormat auto: channels_last is used" in caplog.text


@pytest.mark.parametrize(
    ("layers", "layout"),
    [
        ([nn.Conv2d(3, 8, 3), nn.MaxPool2d(2)], "channels_last"),
        ([nn.Conv2d(3, 8, 3), nn.AvgPool2d(2)], "channels_last"),
        ([nn.Conv2d(3, 8, 3), nn.Upsample(scale_factor=2)], "channels_last"),
        ([nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1)], "preserve"),
        ([nn.MaxPool2d(2), nn.Conv2d(3, 8, 3)], "preserve"),  # of fewer channels than a vector holds
        ([nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1)], "preserve"),  # a mean
        ([nn.MaxPool2d(2)], "preserve"),
    ],
)
def test_auto_is_channels_last_where_images_of_eight_channels_or_more_are_pooled_or_resized(layers, layout):
    """A rule on the model, so that all processes and runs choose the same: they did not while a clock decided."""
    predictor = poptorch.inferenceModel(
        nn.Sequential(*layers), poptorch.Options().memoryFormat("auto").showCompilationProgressBar(False)
    )
    predictor(torch.ones(1, 3, 8, 8))
    assert predictor.memory_format == layout


def test_gradients_are_anchored_in_channels_last():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.Flatten(), nn.CrossEntropyLoss())
    options = parity_runs.options(accumulation=1).memoryFormat("channels_last")
    options.anchorTensor("gradient", "Gradient___layers.0.weight")

    user = module(lambda self, x, labels: model[3](self.layers(x), labels), layers=model[:3])
    trainer = poptorch.trainingModel(user, options, torch.optim.SGD(user.parameters(), lr=0.0))
    batch = torch.randn(4, 3, 8, 8), torch.randint(0, 72, (4,))
    trainer(*batch)
    user(*(part.clone() for part in batch)).backward()
    torch.testing.assert_close(trainer.getAnchoredTensor("gradient"), user.layers[0].weight.grad)


STRIDED = """
import poptorch, torch
from torch import nn

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.shortcuts = nn.ModuleList(nn.Conv2d(4, width, 1, stride=2) for width in (1, 3, 8, 16))
        self.last = nn.Conv2d(1, 8, 1, stride=2)

    def forward(self, x):
        x = self.first(x)
        loss = sum(shortcut(x).square().mean() for shortcut in self.shortcuts)
        return poptorch.identity_loss(loss + self.last(x.sum(1, keepdim=True)).square().mean(), "none")

torch.manual_seed(0)
x, found = torch.randn(200, 1, 8, 8), {}
for layout in ("preserve", "channels_last"):
    torch.manual_seed(1)
    model = Network()
    options = poptorch.Options().memoryFormat(layout).deviceIterations(50).showCompilationProgressBar(False)
    trainer = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in range(3):
        trainer(x)
    found[layout] = torch.cat([value.flatten() for value in model.state_dict().values()])
assert trainer.memory_format == "channels_last"
assert torch.allclose(*found.values(), rtol=0, atol=1e-5)
"""


def test_strided_convolutions_of_one_pixel_and_few_channels_train_on_processors_without_avx512():
    """In channels_last, oneDNN's kernel for their backward writes outside its memory there: Python died of it."""
    avx2 = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    ended = subprocess.run(
        [sys.executable, "-c", STRIDED], env=avx2, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr


def test_the_default_keeps_the_bits_of_plain_pytorch():
    trainer = executor("preserve")
    assert not poptorch.Options().exists("memory_format")
    assert trainer.options.memory_format == "preserve"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = parity_runs.plain(parity_models.Digits, lambda p: torch.optim.SGD(p, lr=0.1), updates=2)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(losses(trainer), expected.losses)


@pytest.mark.parametrize("layout", ["two stages", "sharded"])
def test_layouts_of_stages_agree_to_the_last_bit_in_channels_last(layout):
    strategy = parity_runs.LAYOUTS[layout]()
    assert torch.equal(losses(executor("channels_last", strategy)), losses(executor("channels_last")))


def test_before_compilation_there_is_no_layout_and_only_three_can_be_asked_for():
    with pytest.raises(poptorch.Error):
        _ = executor("auto").memory_format
    with pytest.raises(AssertionError, match="memoryFormat takes one of 'preserve', 'channels_last', 'auto'"):
        poptorch.Options().memoryFormat("NHWC")  # type: ignore[arg-type]
