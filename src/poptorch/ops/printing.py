"""`ipu_print_tensor`: print a tensor's values each time the graph computes it, and its gradient's.

The layout is PopTorch's, not that of torch or numpy: each innermost row is a line, indented by its depth.

    title: {
     {0.25 1.5}
     {2.5 3.25}
    }
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from popengine.compile.recording.current_capture import current

from .library import check_tensors, mark

_FORMATS = ("auto", "fixed", "scientific", "none")
_LEFT_OUT = "..."


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
    Raises:
        KeyError: the float format is unknown
    """
    check_tensors("ipu_print_tensor takes a tensor", tensor)
    if float_format not in _FORMATS:
        raise KeyError(f"float_format must be one of {', '.join(_FORMATS)}; found {float_format!r}")
    if current() is None:
        return tensor
    size = (summarise_threshold, edge_items, max_line_width, digits)
    style = (float_format, separator, open_bracket, close_bracket)
    return torch.ops.poptorch.ipu_print_tensor(tensor, title, print_gradient, *size, *style)


def _print(tensor: Tensor, title: str = "", print_gradient: bool = True, *layout: int | str) -> None:
    text = _Layout(*layout).text(tensor.detach().cpu(), title)  # type: ignore[arg-type]
    sys.stderr.write(text + "\n")  # one write, as other threads print, too
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


@dataclass(frozen=True, slots=True)
class _Layout:
    """The layout of a printed tensor: arguments of `ipu_print_tensor`."""

    summarise_threshold: int = 1000
    edge_items: int = 3
    max_line_width: int = 80
    digits: int = 4
    float_format: str = "auto"
    separator: str = ", "
    open_bracket: str = "("
    close_bracket: str = ")"

    def text(self, tensor: Tensor, title: str) -> str:
        short = 0 < self.summarise_threshold < tensor.numel()
        head = f"{title}: " if title else ""
        write = self._writer(tensor)
        if tensor.dim() == 0:
            return head + write(tensor.item())
        lines = self._lines(tensor, 0, short, write)
        return head + "\n".join(lines)

    def _lines(self, part: Tensor, depth: int, short: bool, write: Callable[[object], str]) -> list[str]:
        indent = " " * depth
        shown = self._shown(len(part), short)
        if part.dim() == 1:
            values = [_LEFT_OUT if i is None else write(part[i].item()) for i in shown]
            return self._row(values, indent)
        lines = [indent + self.open_bracket]
        for i in shown:
            left_out = [f"{indent} {_LEFT_OUT}"]
            lines += left_out if i is None else self._lines(part[i], depth + 1, short, write)
        return [*lines, indent + self.close_bracket]

    def _shown(self, length: int, short: bool) -> list[int | None]:
        """Return the indices to print, with None in place of the indices that are left out."""
        edge = self.edge_items
        if not short or length <= 2 * edge:
            return list(range(length))
        return [*range(edge), None, *range(length - edge, length)]

    def _row(self, values: list[str], indent: str) -> list[str]:
        lines, line = [], indent + self.open_bracket
        for position, value in enumerate(values):
            last = position == len(values) - 1
            item = value + (self.close_bracket if last else self.separator)
            started = line.strip() not in ("", self.open_bracket)
            if started and 0 < self.max_line_width < len((line + item).rstrip()):
                lines.append(line)
                line = indent + "  "
            line += item
        return [*lines, line if values else line + self.close_bracket]

    def _writer(self, tensor: Tensor) -> Callable[[object], str]:
        if not tensor.is_floating_point():
            return lambda value: str(int(value)) if isinstance(value, (bool, int)) else str(value)
        digits, kind = self.digits, self.float_format
        if kind == "none" or digits == 0:
            return lambda value: _shortest(float(value), tensor)  # type: ignore[arg-type]
        if kind == "auto":
            return lambda value: f"{value:.{digits}g}"
        if kind == "scientific":
            return lambda value: f"{value:.{digits - 1}e}"
        finite = [abs(value) for value in tensor.flatten().tolist() if math.isfinite(value)]
        whole = len(str(int(max(finite, default=0))))
        return lambda value: f"{value:.{max(digits - whole, 0)}f}"


def _shortest(value: float, tensor: Tensor) -> str:
    """Return the number with the fewest digits that identify it in the tensor's dtype."""
    if not math.isfinite(value):
        return str(value)
    candidates = (f"{value:.{digits}g}" for digits in range(1, 18))
    same = (text for text in candidates if float(tensor.new_tensor(float(text))) == value)
    return next(same, repr(value))
