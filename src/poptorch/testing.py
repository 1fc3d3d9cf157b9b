"""For tests of models: compare outputs, and compare an update in a layout with plain PyTorch's."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from popengine.errors import Error
from popengine.settings import Counts

from .enums import OutputMode
from .executor.wrapping import trainingModel
from .nested_values import tensors_of, with_tensors
from .options import Options

__all__ = ["Comparison", "allclose", "compare"]


def allclose(ref_outputs: Any, test_outputs: Any, rtol: float = 1e-5, atol: float = 1e-8) -> bool:
    """Return whether two outputs have the same structure of tuples and lists, and close values."""
    if isinstance(ref_outputs, Tensor) and isinstance(test_outputs, Tensor):
        if ref_outputs.shape != test_outputs.shape:
            return False
        kind = torch.promote_types(ref_outputs.dtype, test_outputs.dtype)
        return torch.allclose(ref_outputs.to(kind), test_outputs.to(kind), rtol, atol, equal_nan=True)
    if type(ref_outputs) is not type(test_outputs):
        return False
    if isinstance(ref_outputs, (tuple, list)):
        return len(ref_outputs) == len(test_outputs) and all(
            allclose(ref, test, rtol, atol) for ref, test in zip(ref_outputs, test_outputs, strict=True)
        )
    return bool(ref_outputs == test_outputs)


@dataclass(frozen=True)
class Comparison:
    """One weight update compared with plain PyTorch's; prints as a table.

    Args:
        title:      what was compared
        conclusion: the likely cause of the differences
        loss:       "equal", or how the loss differs
        rows:       each parameter's name, and for its gradient and its new value "equal", "none" or how they differ
    """

    title: str
    conclusion: str
    loss: str
    rows: tuple[tuple[str, str, str], ...]

    @property
    def equal(self) -> bool:
        """Whether the loss, all gradients and all new weights are equal to the last bit."""
        verdicts = {self.loss, *(verdict for _, *row in self.rows for verdict in row)}
        return verdicts <= {"equal", "none"}

    def __str__(self) -> str:
        table = [("", "gradient", "new weight"), *self.rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in table]
        return "\n".join([self.title, self.conclusion, f"loss: {self.loss}", *lines])

    __repr__ = __str__


def compare(
    model: nn.Module,
    options: Options | None,
    batch: Any,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    update: Callable[[nn.Module, torch.optim.Optimizer, Any], Any] | None = None,
) -> Comparison:
    """Run one weight update in this layout and in plain PyTorch, each on a copy of the model, and compare. (Ours.)

    Plain PyTorch runs the micro-batches one after another, adds their gradients and divides them by the number of
    micro-batches and replicas. Random numbers are not the same: set dropout to 0.

    >>> print(poptorch.testing.compare(model, options, (images, labels), torch.optim.AdamW(model.parameters())))

    Args:
        batch:     a combined batch, as for a call: a tensor, a tuple or list of arguments, or a dictionary of them
        optimizer: for this model; by default SGD with lr 0.01
        update:    a loop of another library in place of the executor: called with a copy of the model, the optimizer of
                   the copy and the rows of one update; returns the loss, and leaves gradients in `.grad`
    Raises:
        Error: the model can't be compiled, or returns no loss
    """
    options = Options() if options is None else options
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01) if optimizer is None else optimizer
    counts = options._counts()
    used = with_tensors(batch, (t.chunk(counts.iterations)[0] for t in tensors_of(batch)))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as an ipu computes: more threads add in another order
    try:
        plain = _plain_update(*copy.deepcopy((model, optimizer)), used, counts)
        if update is None:
            title, found = _update_here(
                model, options.clone().deviceIterations(1), used, optimizer, plain.place
            )
        else:
            title, found = _update_elsewhere(update, *copy.deepcopy((model, optimizer)), used)
    finally:
        torch.set_num_threads(threads)
    loss = _verdict(found.losses, plain.losses if update is None else plain.losses.mean())
    rows = tuple(
        (n, _verdict(found.gradients.get(n), plain.gradients.get(n)), _verdict(found.weights[n], weight))
        for n, weight in plain.weights.items()
    )
    return Comparison(f"{title}; against plain PyTorch", _conclusion(loss, rows, counts), loss, rows)


class _UpdateResult(NamedTuple):
    """What an update computes: the loss of each micro-batch, gradients and new weights by name."""

    losses: Tensor
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    place: int = 0  # of the loss among the tensors that forward returns


def _plain_update(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, counts: Counts
) -> _UpdateResult:
    """Run an update in plain PyTorch. The micro-batches of a replica are added in turn, then replicas in pairs."""
    micro_batches = counts.accumulation * counts.groups
    losses: list[Tensor] = [torch.empty(0)] * micro_batches
    sums: list[dict[str, Tensor]] = []
    place = 0
    for replica in range(counts.replicas):
        optimizer.zero_grad(set_to_none=True)
        for index in range(replica * counts.groups // counts.replicas, micro_batches, counts.groups):
            # Copies, since an executor's tensors begin at aligned addresses, on which the kernel depends.
            rows = with_tensors(batch, (t.chunk(micro_batches)[index].clone() for t in tensors_of(batch)))
            outputs = tensors_of(_called(model, rows))
            scalars = [i for i, value in enumerate(outputs) if value.dim() == 0 and value.requires_grad]
            if not scalars:
                raise Error(
                    "compare: forward returns no loss, a tensor without dimensions that needs a gradient"
                )
            place = scalars[0]
            outputs[place].backward()
            losses[index] = outputs[place].detach()
        sums.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    while len(sums) > 1:
        pairs = zip(sums[::2], sums[1::2], strict=False)
        sums = [{n: a[n] + b[n] for n in a} for a, b in pairs] + sums[len(sums) // 2 * 2 :]
    for name, parameter in model.named_parameters():
        parameter.grad = sums[0][name] / (counts.accumulation * counts.replicas) if name in sums[0] else None
    optimizer.step()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return _UpdateResult(torch.stack(losses), gradients, _weights(model), place)


def _called(model: Callable[..., Any], batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return model(batch)
    return model(**batch) if isinstance(batch, Mapping) else model(*batch)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _update_here(
    model: nn.Module, options: Options, batch: Any, optimizer: torch.optim.Optimizer, place: int
) -> tuple[str, _UpdateResult]:
    """Run an update by an executor, and another one by SGD, whose first momentum is the gradient."""
    twin, twins_optimizer = copy.deepcopy((model, optimizer))
    executor = trainingModel(twin, options.clone().outputMode(OutputMode.All), twins_optimizer)
    losses = tensors_of(_called(executor, batch))[place].reshape(-1)
    title = executor.plan.title
    executor.destroy()
    twin_for_gradients = copy.deepcopy(model)
    sgd = torch.optim.SGD(twin_for_gradients.parameters(), lr=0.0, momentum=0.5)
    executor = trainingModel(twin_for_gradients, options, sgd)
    _called(executor, batch)
    executor.destroy()
    states = {n: sgd.state.get(p, {}) for n, p in twin_for_gradients.named_parameters()}
    gradients = {n: state["momentum_buffer"] for n, state in states.items() if "momentum_buffer" in state}
    return title, _UpdateResult(losses, gradients, _weights(twin))


def _update_elsewhere(
    update: Callable[..., Any], model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any
) -> tuple[str, _UpdateResult]:
    """Run an update by a function of the user's, which returns one loss."""
    loss = torch.as_tensor(update(model, optimizer, batch)).detach()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return update.__name__, _UpdateResult(loss, gradients, _weights(model))


def _verdict(found: Tensor | None, plain: Tensor | None) -> str:
    """Return "equal", or in a few words how a tensor differs from plain PyTorch's."""
    if found is None or plain is None:
        return "none" if found is plain else "missing" if found is None else "plain has none"
    if torch.equal(found, plain):
        return "equal"
    here, there = found.double(), plain.double()
    error, largest = (here - there).abs(), float(there.abs().max())
    rounding = 64 * torch.finfo(plain.dtype).eps
    if float(error.max()) <= rounding * largest:
        return f"rounding, {float(error.max()) / largest:.0e}"
    factor = float((here * there).sum() / (there * there).sum()) if largest else 0.0
    if factor and float((here - factor * there).abs().max()) <= rounding * abs(factor) * largest:
        return _times(factor)
    place = (~(error <= rounding * largest)).nonzero()[0].tolist()
    at = f"at {place}: " if place else ""
    return f"{at}{float(here[tuple(place)]):.4g}, plain {float(there[tuple(place)]):.4g}"


def _times(factor: float) -> str:
    ratio = Fraction(factor).limit_denominator(1 << 16)
    if ratio.denominator > 1 and ratio.numerator == 1:
        return f"{ratio} of plain"
    return f"{ratio if ratio.denominator == 1 else format(factor, '.4g')} times plain"


def _conclusion(loss: str, rows: Sequence[tuple[str, str, str]], counts: Counts) -> str:
    """Return the likely cause of the differences."""
    rows = [row for row in rows if row[1] != "none"]
    differing = [(name, gradient) for name, gradient, _ in rows if gradient != "equal"]
    verdicts = {gradient for _, gradient in differing}
    if len(verdicts) == 1 and len(differing) == len(rows) and "plain" in (verdict := min(verdicts)):
        accumulation, replicas = counts.accumulation, counts.replicas
        causes = {
            accumulation * replicas: "micro-batches and replicas are summed, not averaged",
            1 / (accumulation * replicas): "the mean over micro-batches and replicas is taken twice",
            replicas: "replicas are summed, not averaged",
            1 / replicas: "the mean over replicas is taken twice",
            accumulation: "micro-batches are summed, not averaged",
            1 / accumulation: "accumulation is scaled twice",
        }
        cause = {_times(factor): cause for factor, cause in causes.items()}.get(verdict)
        return f"gradients are {verdict}" + (f": {cause}" if cause else "")
    if not differing:
        return (
            "all equal"
            if {loss, *(weight for *_, weight in rows)} == {"equal"}
            else "all gradients are equal"
        )
    first = f"{differing[0][0]}: {differing[0][1]}"
    return f"{len(differing)} of {len(rows)} gradients differ, first {first}"
