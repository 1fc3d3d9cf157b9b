"""Compare outputs, and compare a weight update with plain PyTorch's: functions for tests of models."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn

from popengine.errors import Error
from popengine.settings import Counts
from popengine.texts import table_text

from .compiling.losses import loss_field
from .enums import OutputMode
from .executor.wrapping import arguments_of, trainingModel
from .nested_values import spec_of, tensors_of, with_tensors
from .ops.grouped_norm import sum_as_tree
from .options import Options

__all__ = ["Comparison", "allclose", "compare"]


def allclose(ref_outputs: Any, test_outputs: Any, rtol: float = 1e-5, atol: float = 1e-8) -> bool:
    """Return whether outputs have equal containers, constants, shapes, and close values. NaN equals NaN."""
    if spec_of(ref_outputs) != spec_of(test_outputs):
        return False
    for ref, test in zip(tensors_of(ref_outputs), tensors_of(test_outputs), strict=True):
        kind = torch.promote_types(ref.dtype, test.dtype)
        if ref.shape != test.shape or not torch.allclose(ref.to(kind), test.to(kind), rtol, atol, True):
            return False
    return True


@dataclass(frozen=True)
class Comparison:
    """Weight updates compared with plain PyTorch's; prints as a table.

    Args:
        title:      the plan, or the function `update`, that was compared with plain PyTorch
        conclusion: "all equal", "all gradients are equal", or how gradients differ, and a likely cause
        loss:       "equal", or a description of the difference; of all updates
        rows:       (name, gradient, new value) of each parameter, of the last update: "equal", "none" (in both) or a
            difference
    """

    title: str
    conclusion: str
    loss: str
    rows: tuple[tuple[str, str, str], ...]

    @property
    def equal(self) -> bool:
        """Return whether the loss, gradients and new weights are bitwise equal, or missing in both."""
        verdicts = {self.loss, *(verdict for _, *row in self.rows for verdict in row)}
        return verdicts <= {"equal", "none"}

    def __str__(self) -> str:
        table = [("", "gradient", "new weight"), *self.rows]
        return "\n".join([self.title, self.conclusion, f"loss: {self.loss}", table_text(table)])

    __repr__ = __str__


def compare(
    model: nn.Module,
    options: Options | None,
    batch: Any,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    update: Callable[[nn.Module, torch.optim.Optimizer, Any], Any] | None = None,
    updates: int = 1,
) -> Comparison:
    """*Pando*: Return a comparison of weight updates by an executor and by plain PyTorch.

    Each updates a copy of the model. Plain PyTorch runs the micro-batches one after another, adds their
    gradients and divides the sums by micro-batches × replicas. Random numbers differ: set dropout to 0.

    >>> print(poptorch.testing.compare(model, options, (images, labels), torch.optim.AdamW(model.parameters())))

    Args:
        batch:     a combined batch: a tensor, a tuple or list of arguments, or a dictionary of them
        optimizer: with the parameters of `model`; by default SGD with lr 0.01
        update:    makes the update instead of an executor: called with a copy of the model, a copy of the
            optimizer, and the rows of one update, returns the loss, and leaves gradients in `.grad`, which it
            finds None
        updates:   number of updates one after another, each with the rows of the next device iteration, or again of
            the first one. Two or more also compare the optimizer's state, by its effect
    Raises: Error, if the model can't be compiled, or returns no loss
    """
    options = Options() if options is None else options
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01) if optimizer is None else optimizer
    counts = options._counts()
    if options.exists("batch_dims"):
        raise Error(
            "compare: options.batchDims is not supported\n  fix: a model and inputs with rows in dimension 0"
        )
    parts = zip(*(t.chunk(counts.iterations) for t in tensors_of(batch)), strict=True)
    used = list(islice(cycle(with_tensors(batch, iter(part)) for part in parts), updates))
    plain, plain_optimizer = copy.deepcopy((model, optimizer))
    ours, our_optimizer = copy.deepcopy((model, optimizer))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as an ipu computes: more threads add in another order
    try:
        before = [parameter.grad for parameter in model.parameters()]
        plain_updates = [_update_plain(plain, plain_optimizer, rows, counts) for rows in used]
        loss_index, expected = plain_updates[0][0], torch.stack([losses for _, losses in plain_updates])
        _check_copied(model, before)
        if update is None:
            options = options.clone().deviceIterations(1)
            title, losses = _update_by_executor(ours, our_optimizer, options, used, loss_index)
        else:
            title, expected = update.__name__, torch.stack([losses.mean() for losses in expected])
            losses = torch.stack([_update_by_function(ours, our_optimizer, rows, update) for rows in used])
    finally:
        torch.set_num_threads(threads)
    loss = _compare_tensors(losses, expected)
    rows = tuple(
        (name, _compare_tensors(our.grad, weight.grad), _compare_tensors(our.detach(), weight.detach()))
        for (name, weight), our in zip(plain.named_parameters(), ours.parameters(), strict=True)
    )
    title += f"; {updates} updates" * (updates > 1)
    return Comparison(f"{title}; against plain PyTorch", _describe_gradients(loss, rows, counts), loss, rows)


def _check_copied(model: nn.Module, before: Sequence[Tensor | None]) -> None:
    """Raise Error if a copy of the model has written gradients of the model itself; restore these."""
    changed = []
    for (name, parameter), gradient in zip(model.named_parameters(), before, strict=True):
        if parameter.grad is not gradient:
            changed.append(name)
            parameter.grad = gradient
    if changed:
        raise Error(
            f"compare: a copy of the model computes with parameters of the model itself: {', '.join(changed)}\n"
            "  why: a lambda or another function keeps these layers, and copy.deepcopy copies no functions\n"
            "  fix: assign the layers to attributes of the module, and read them in forward by `self`"
        )


def _index_of_loss(outputs: Any) -> int:
    """Return the index of the loss among the outputs: the field "loss", else the first trained scalar."""
    named = loss_field(outputs)
    for index, value in enumerate(tensors_of(outputs)):
        if value is named or (named is None and value.dim() == 0 and value.requires_grad):
            return index
    raise Error("compare: forward returns no loss (a scalar that needs a gradient)\n  fix: return the loss")


def _update_plain(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, counts: Counts
) -> tuple[int, Tensor]:
    """Update a model in place by plain PyTorch, and leave the mean gradients in `.grad`: added over the
    micro-batches of a replica one after another, then over replicas in pairs. Return the index of the loss
    in the outputs, and the losses of all micro-batches."""
    loss_index, losses, parameters = 0, {}, list(model.parameters())
    sums: list[list[Any]] = []  # of each replica, the gradients of all parameters
    for replica in range(counts.replicas):
        optimizer.zero_grad(set_to_none=True)
        for turn in range(counts.accumulation):
            index = turn * counts.groups + counts.input_group_of(replica)
            # Copies, since an executor's tensors begin at aligned addresses, on which the kernel depends.
            parts = (t.chunk(counts.accumulation * counts.groups)[index].clone() for t in tensors_of(batch))
            args, kwargs = arguments_of(with_tensors(batch, parts))
            outputs = model(*args, **kwargs)
            loss_index = _index_of_loss(outputs)
            loss = tensors_of(outputs)[loss_index]
            loss.backward()
            losses[turn, replica] = loss.detach()
        sums.append([parameter.grad for parameter in parameters])
    for parameter, *of_replicas in zip(parameters, *sums, strict=True):
        if of_replicas[0] is not None:
            total = sum_as_tree(torch.stack(of_replicas))
            parameter.grad = total / (counts.accumulation * counts.replicas)
    optimizer.step()
    return loss_index, torch.stack([losses[turn] for turn in sorted(losses)])


def _update_by_function(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, update: Callable[..., Any]
) -> Tensor:
    optimizer.zero_grad(set_to_none=True)
    return torch.as_tensor(update(model, optimizer, batch)).detach().clone()


def _update_by_executor(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: Options,
    batches: Sequence[Any],
    loss_index: int,
) -> tuple[str, Tensor]:
    """Update a model in place by an executor, once for each batch; return its plan's title, and all losses. The
    gradients of the last update, left in `.grad`, are the momenta of SGD after an update of a copy of the model."""
    executor = trainingModel(model, options.clone().outputMode(OutputMode.All), optimizer)
    losses, other = [], model
    for batch in batches:
        other = copy.deepcopy(model)
        args, kwargs = arguments_of(batch)
        losses.append(tensors_of(executor(*args, **kwargs))[loss_index].flatten())
    title = executor.plan.title
    executor.destroy()
    sgd = torch.optim.SGD(other.parameters(), lr=0.0, momentum=0.5)
    executor = trainingModel(other, options, sgd)
    args, kwargs = arguments_of(batches[-1])
    executor(*args, **kwargs)
    executor.destroy()
    for parameter, same in zip(model.parameters(), other.parameters(), strict=True):
        parameter.grad = sgd.state.get(same, {}).get("momentum_buffer")
    return title, torch.stack(losses)


def _compare_tensors(found: Tensor | None, plain: Tensor | None) -> str:
    """Return as text how `found` differs from plain PyTorch's tensor; "equal"; or "none" if both are None."""
    if found is None or plain is None:
        return "none" if found is plain else "missing" if found is None else "plain has none"
    if torch.equal(found, plain):
        return "equal"
    here, there = found.double(), plain.double()
    error, largest = (here - there).abs(), float(there.abs().max())
    rounding = 64 * torch.finfo(plain.dtype).eps * largest
    if float(error.max()) <= rounding:
        return f"rounding, {float(error.max()) / largest:.0e}"
    factor = float((here * there).sum() / (there * there).sum()) if largest else 0.0
    if factor and float((here - factor * there).abs().max()) <= rounding * abs(factor):
        return _format_factor(factor)
    index = (~(error <= rounding)).nonzero()[0].tolist()
    values = f"{float(here[tuple(index)]):.4g}, plain {float(there[tuple(index)]):.4g}"
    return f"at {index}: {values}" if index else values


def _format_factor(factor: float) -> str:
    """Return a factor between gradients as text: "1/4 of plain", "12 times plain", "0.7 times plain"."""
    ratio = Fraction(factor).limit_denominator(1 << 16)
    if ratio.denominator > 1 and ratio.numerator == 1:
        return f"{ratio} of plain"
    return f"{ratio if ratio.denominator == 1 else format(factor, '.4g')} times plain"


def _describe_gradients(loss: str, rows: Sequence[tuple[str, str, str]], counts: Counts) -> str:
    """Return, in words, whether gradients are equal, a common factor with a likely cause, or the first
    difference."""
    rows = [row for row in rows if row[1] != "none"]
    differing = [(name, gradient) for name, gradient, _ in rows if gradient != "equal"]
    if not differing:
        others = {loss, *(weight for *_, weight in rows)}
        return "all equal" if others == {"equal"} else "all gradients are equal"
    name, verdict = differing[0]
    if "plain" not in verdict or any(gradient != verdict for _, gradient, _ in rows):
        return f"{len(differing)} of {len(rows)} gradients differ, first {name}: {verdict}"
    accumulation, replicas = counts.accumulation, counts.replicas
    causes = {
        accumulation * replicas: "micro-batches and replicas are summed, not averaged",
        1 / (accumulation * replicas): "the mean over micro-batches and replicas is taken twice",
        replicas: "replicas are summed, not averaged",
        1 / replicas: "the mean over replicas is taken twice",
        accumulation: "micro-batches are summed, not averaged",
        1 / accumulation: "accumulation is scaled twice",
    }
    cause = {_format_factor(factor): f": {cause}" for factor, cause in causes.items()}.get(verdict, "")
    return f"gradients are {verdict}{cause}"
