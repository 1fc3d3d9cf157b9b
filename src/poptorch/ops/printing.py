"""`ipu_print_tensor`: print a tensor's values each time the graph computes it, and its gradient's.

The layout is PopTorch's, not that of torch or numpy: each innermost row is a line, indented by its depth.

    title: {
     {0.25 1.5}
     {2.5 3.25}
    }
"""

import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from popengine.compile.recording.current_capture import current

from ..checks import checked
from .library import check_tensors, register_mark


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
    """Return the tensor unchanged, and print its values to stderr whenever a compiled model computes it.

    Use the returned tensor, or the operation may be removed. In plain PyTorch nothing is printed.

    Args:
        print_gradient: in training, print the gradient too, as `<title>_gradient`
        summarise_threshold: number of elements above which only the edges are printed (0: print all)
        edge_items: elements at each edge of a dimension
        max_line_width: characters after which rows are broken (0: never)
        digits: significant digits (0: as many as identify the number)
        float_format: "auto", "fixed", "scientific" or "none" (as Python prints it)
    Raises: KeyError, if the float format is unknown
    """
    check_tensors("ipu_print_tensor takes a tensor", tensor)
    checked("float_format", float_format, ("auto", "fixed", "scientific", "none"), KeyError)
    if current() is None:
        return tensor
    settings = summarise_threshold, edge_items, max_line_width, digits, float_format, separator
    settings += open_bracket, close_bracket
    return torch.ops.poptorch.ipu_print_tensor(tensor, title, print_gradient, *settings)


def _print_tensor(tensor: Tensor, title: str = "", print_gradient: bool = True, *settings: Any) -> None:
    head = f"{title}: " if title else ""
    layout = _PrintLayout(tensor.detach().cpu(), *settings)
    lines = layout.format_tensor(layout.tensor, "", layout.element_formatter())
    sys.stderr.write(head + "\n".join(lines) + "\n")  # one write, as other threads print, too
    sys.stderr.flush()


def _print_gradient(gradient: Tensor, title: str = "", print_gradient: bool = True, *settings: Any) -> Tensor:
    if not print_gradient:
        return gradient
    return torch.ops.poptorch.ipu_print_tensor(gradient, f"{title}_gradient", False, *settings)


register_mark(
    f"ipu_print_tensor{torch.library.infer_schema(ipu_print_tensor, mutates_args=())}",
    run=_print_tensor,
    gradient=_print_gradient,
)


@dataclass(frozen=True, slots=True)
class _PrintLayout:
    """A tensor to print, and the arguments of `ipu_print_tensor` for its layout."""

    tensor: Tensor
    summarise_threshold: int = 1000
    edge_items: int = 3
    max_line_width: int = 80
    digits: int = 4
    float_format: str = "auto"
    separator: str = ", "
    open_bracket: str = "("
    close_bracket: str = ")"

    def format_tensor(self, part: Tensor, indent: str, write: Callable[[Any], str]) -> list[str]:
        """Return the tensor or a part of it as lines of text; `write` returns an element as text."""
        if part.dim() == 0:
            return [write(part.item())]
        shown: list[int | None] = list(range(len(part)))  # None: "..." in place of all but the edges
        edge = self.edge_items
        if 0 < self.summarise_threshold < self.tensor.numel() and len(part) > 2 * edge:
            shown[edge : len(part) - edge] = [None]
        if part.dim() == 1:
            return self._format_row(["..." if i is None else write(part[i].item()) for i in shown], indent)
        deeper = f"{indent} "
        inner = [[deeper + "..."] if i is None else self.format_tensor(part[i], deeper, write) for i in shown]
        return [indent + self.open_bracket, *itertools.chain(*inner), indent + self.close_bracket]

    def _format_row(self, values: list[str], indent: str) -> list[str]:
        """Return an innermost row as lines of text, broken after separators to fit into `max_line_width`."""
        lines, line = [], indent + self.open_bracket
        for position, value in enumerate(values):
            item = value + (self.close_bracket if position == len(values) - 1 else self.separator)
            has_items = line.strip() not in ("", self.open_bracket)
            if has_items and 0 < self.max_line_width < len((line + item).rstrip()):
                lines.append(line)
                line = indent + "  "
            line += item
        return [*lines, line if values else line + self.close_bracket]

    def element_formatter(self) -> Callable[[Any], str]:
        """Return a function that returns an element of the tensor as text, by `digits` and `float_format`."""
        tensor, digits, notation = self.tensor, self.digits, self.float_format
        if not tensor.is_floating_point():
            return lambda value: str(int(value)) if isinstance(value, bool) else str(value)
        if notation == "none" or digits == 0:
            return lambda value: _shortest_text(value, tensor)
        if notation == "fixed":
            finite = [abs(value) for value in tensor.flatten().tolist() if math.isfinite(value)]
            digits = max(digits - len(str(int(max(finite, default=0)))), 0)
        style = {"auto": f".{digits}g", "scientific": f".{digits - 1}e", "fixed": f".{digits}f"}[notation]
        return lambda value: format(value, style)


def _shortest_text(value: float, tensor: Tensor) -> str:
    """Return a number as text, with the fewest digits that identify it in the tensor's dtype."""
    if not math.isfinite(value):
        return str(value)
    candidates = (f"{value:.{digits}g}" for digits in range(1, 18))
    same = (text for text in candidates if float(tensor.new_tensor(float(text))) == value)
    return next(same, repr(value))
