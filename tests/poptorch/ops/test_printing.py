"""ipu_print_tensor: what it prints, and when."""

from textwrap import dedent

import pytest
import torch
from torch import nn

import poptorch
from small_models import module

X = torch.tensor([[0.25, 1.5], [2.5, 3.25]])


def printed(capfd, tensor, title="", **layout):
    """What a compiled model prints of its input."""
    model = poptorch.inferenceModel(
        lambda x: poptorch.ipu_print_tensor(x, title, **layout),
        poptorch.Options().showCompilationProgressBar(False),
    )
    model.compile(tensor)
    capfd.readouterr()
    model(tensor)
    return capfd.readouterr().err.removesuffix("\n")


def test_a_row_is_a_line_indented_by_its_depth(capfd):
    layout = {"separator": " ", "open_bracket": "{", "close_bracket": "}", "digits": 8}
    assert printed(capfd, X, "title", **layout) == dedent("""\
        title: {
         {0.25 1.5}
         {2.5 3.25}
        }""")
    assert printed(capfd, torch.arange(8).reshape(2, 2, 2), "t") == dedent("""\
        t: (
         (
          (0, 1)
          (2, 3)
         )
         (
          (4, 5)
          (6, 7)
         )
        )""")


@pytest.mark.parametrize(
    ("float_format", "digits", "expected"),
    [
        ("auto", 8, "(1.4962566)"),
        ("fixed", 8, "(1.4962566)"),
        ("scientific", 8, "(1.4962566e+00)"),
        ("auto", 4, "(1.496)"),
        ("fixed", 4, "(1.496)"),
        ("none", 4, "(1.4962566)"),
        ("auto", 0, "(1.4962566)"),
    ],
)
def test_digits_are_significant_ones(capfd, float_format, digits, expected):
    value = torch.tensor([1.4962566])
    assert printed(capfd, value, float_format=float_format, digits=digits) == expected


def test_long_rows_break_and_large_tensors_are_shortened(capfd):
    row = torch.arange(10)
    assert printed(capfd, row, max_line_width=12, separator=",") == "(0,1,2,3,4,\n  5,6,7,8,9)"
    assert printed(capfd, row, max_line_width=0, summarise_threshold=0).count("\n") == 0
    assert printed(capfd, row, summarise_threshold=9, edge_items=2) == "(0, 1, ..., 8, 9)"
    table = printed(capfd, torch.arange(12).reshape(4, 3), summarise_threshold=9, edge_items=1)
    assert table == "(\n (0, ..., 2)\n ...\n (9, ..., 11)\n)"


def test_values_are_printed_at_every_execution_and_their_gradients_too(capfd):
    model = module(
        lambda self, x: poptorch.identity_loss(poptorch.ipu_print_tensor(self.weight * x, "y"), "sum"),
        weight=nn.Parameter(X.clone()),
    )
    trainer = poptorch.trainingModel(model, optimizer=poptorch.optim.SGD(model.parameters(), lr=0.1))
    trainer(torch.ones(2, 2))
    found = capfd.readouterr().err
    assert "y: (\n (0.25, 1.5)\n (2.5, 3.25)\n)" in found
    assert "y_gradient: (\n (1, 1)\n (1, 1)\n)" in found
    model(torch.ones(2, 2))
    assert capfd.readouterr().err == ""


def test_the_gradient_can_be_left_out_and_formats_are_checked(capfd):
    def forward(self):
        y = poptorch.ipu_print_tensor(self.weight * 1, "y", print_gradient=False, float_format="scientific")
        return poptorch.identity_loss(y, "sum")

    poptorch.trainingModel(module(forward, weight=nn.Parameter(X.clone())))()
    found = capfd.readouterr().err
    assert "2.500e-01" in found
    assert "gradient" not in found
    with pytest.raises(KeyError, match="fancy"):
        poptorch.ipu_print_tensor(X, float_format="fancy")
