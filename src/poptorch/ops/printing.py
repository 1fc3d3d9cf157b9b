"""`ipu_print_tensor`: prints a tensor's values each time the graph computes it, and its gradient's."""

import sys

import torch
from torch import Tensor

from popengine.compile.recording.current_capture import current
from popengine.errors import Error

from .layout import FORMATS, Layout
from .library import mark


def ipu_print_tensor(
    tensor: Tensor,
    title: str = "",
    print_gradient: bool = True,
    summarise_threshold: int = 1000,
    edge_items: int = 3,
    max_line_width: int = 80,
    digits: int = 4,
    float_format: str = "auto",
    separator: str = ", ",
    open_bracket: str = "(",
    close_bracket: str = ")",
) -> Tensor:
    """The tensor itself, printed to stderr whenever a compiled model computes it.

    Use the result, or the operation may be removed. On plain PyTorch nothing is printed.

    Args:
        print_gradient: print its gradient too, in training, as `<title>_gradient`
        summarise_threshold: with more elements only those at the edges are shown (0: always all)
        edge_items: how many those are, at each edge
        max_line_width: longer rows are broken (0: never)
        digits: significant digits (0: as many as tell the number from others)
        float_format: "auto", "fixed", "scientific" or "none" (as Python prints it)
    Raises:
        KeyError: another float format
    """
    if not isinstance(tensor, Tensor):
        raise Error(f"ipu_print_tensor takes a tensor; found {type(tensor).__name__}")
    if float_format not in FORMATS:
        raise KeyError(f"float_format must be one of {', '.join(FORMATS)}; found {float_format!r}")
    if current() is None:
        return tensor
    return torch.ops.poptorch.ipu_print_tensor(
        tensor,
        title,
        print_gradient,
        summarise_threshold,
        edge_items,
        max_line_width,
        digits,
        float_format,
        separator,
        open_bracket,
        close_bracket,
    )


def _print(tensor: Tensor, title: str = "", print_gradient: bool = True, *layout: int | str) -> None:
    text = Layout(*layout).text(tensor.detach().cpu(), title)  # type: ignore[arg-type]
    sys.stderr.write(text + "\n")  # in one go: other ipus print too
    sys.stderr.flush()


def _gradient(gradient: Tensor, title: str = "", print_gradient: bool = True, *layout: int | str) -> Tensor:
    if not print_gradient:
        return gradient
    return torch.ops.poptorch.ipu_print_tensor(gradient, f"{title}_gradient", False, *layout)


mark(
    "ipu_print_tensor(Tensor input, str title='', bool print_gradient=True, int summarise_threshold=1000,"
    " int edge_items=3, int max_line_width=80, int digits=4, str float_format='auto', str separator=', ',"
    " str open_bracket='(', str close_bracket=')') -> Tensor",
    run=_print,
    gradient=_gradient,
)
