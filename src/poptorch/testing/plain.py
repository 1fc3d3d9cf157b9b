"""Plain PyTorch's side of a comparison: weight updates, whether they are random, and gradients of some of the rows."""

import copy
import functools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from popengine.errors import Error
from popengine.settings import Counts

from ..nested_values import arguments_of, loss_field, tensors_of, with_tensors
from .verdicts import rounding_bound

NEAR = 0.02  # the largest error of a coefficient; what it predicts is tested more closely
SLACK = 4.0  # times the bound of rounding errors, for sums of several gradients
_SAMPLES = 1024  # elements of a gradient from which causes are derived

Rows = Tensor  # indices of rows of a batch, in dimension 0
Layout = Sequence[Sequence[Rows]]  # the rows of each micro-batch of each replica


@dataclass(frozen=True)
class Recipe:
    """How plain PyTorch makes an update.

    Args:
        max_norm: to which it clips the gradients
        unused:   parameters whose gradients are zeros: forward does not use them
        note:     how the recipe differs from what the user asked for
    """

    layout: Layout
    max_norm: float = math.inf
    unused: frozenset[str] = frozenset()
    note: str = ""


def rows_in(batch: Any) -> int:
    """Return the number of rows of a batch. Raises Error, if it differs between the tensors."""
    rows = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors_of(batch)}
    if len(rows) != 1:
        raise Error(
            f"compare: the tensors of the batch have {', '.join(map(str, sorted(rows))) or 'no'} rows\n"
            "  fix: pass a tensor, or a tuple, list or dictionary of tensors with equally many rows"
        )
    return rows.pop()


def layout_of(rows: int, counts: Counts) -> Layout:
    """Return the rows of each micro-batch of each replica. Raises Error, if the micro-batches don't divide the rows."""
    of_instance = counts.accumulation * counts.groups
    if rows % (of_instance * counts.instances):
        micro_batches = of_instance * counts.instances
        raise Error(f"compare: {rows} rows of an update are no multiple of {micro_batches} micro-batches")
    parts, replicas = torch.arange(rows).chunk(of_instance * counts.instances), range(counts.replicas)
    groups = [i * of_instance + counts.input_group_of(r) for i in range(counts.instances) for r in replicas]
    return [[parts[group + turn * counts.groups] for turn in range(counts.accumulation)] for group in groups]


def take(batch: Any, rows: Rows) -> Any:
    """Return a batch of some rows: copies, which begin at aligned addresses, on which PyTorch's kernels depend."""
    return with_tensors(batch, iter([tensor[rows] for tensor in tensors_of(batch)]))


def run_forward(model: nn.Module, batch: Any) -> tuple[int, Tensor]:
    """Return the loss that forward returns, and its index among the outputs: the field "loss", else the first scalar
    that needs a gradient."""
    args, kwargs = arguments_of(batch)
    outputs = model(*args, **kwargs)
    named = loss_field(outputs)
    for index, value in enumerate(tensors_of(outputs)):
        if value is named or (named is None and value.dim() == 0 and value.requires_grad):
            return index, value
    raise Error("compare: forward returns no loss (a scalar that needs a gradient)\n  fix: return the loss")


def random_module(model: nn.Module, batch: Any) -> str | None:
    """Return the module by which the loss of a batch depends on the seed, as text; None, if it doesn't."""
    losses, states, drawing = list[Tensor](), list[Tensor](), [f"the model ({type(model).__name__})"]

    def note(name: str, module: nn.Module, *_: Any) -> None:
        if not torch.equal(states.pop(), torch.get_rng_state()):
            drawing.append(f"{name or 'the model'} ({type(module).__name__})")

    python_state = random.getstate()
    with torch.random.fork_rng():
        for _ in range(2):
            twin = copy.deepcopy(model)
            for name, module in twin.named_modules():
                module.register_forward_pre_hook(lambda *_: states.append(torch.get_rng_state()))
                module.register_forward_hook(functools.partial(note, name))
            losses.append(run_forward(twin, batch)[1].detach().double())
    random.setstate(python_state)
    return None if torch.allclose(*losses, rtol=1e-5, atol=0.0, equal_nan=True) else drawing[:2][-1]


class PlainUpdates:
    """Plain PyTorch's weight updates of a copy of a model. Args: batches: the rows of each update"""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Any], recipe: Recipe
    ) -> None:
        self._given, self._batches, self.rows = (model, optimizer), batches, rows_in(batches[0])
        self.run(recipe, 1)

    def run(self, recipe: Recipe, number: int) -> None:
        """Make a number of updates of a new copy, and leave the gradients of the last one in `.grad`."""
        self.recipe, self.number, self.parameters = recipe, number, dict[str, Tensor]()  # frees the old copy
        self._samples: dict[tuple[int, ...], Mapping[str, Tensor]] = {}  # samples of gradients, by rows
        model, optimizer = copy.deepcopy(self._given)
        self.parameters = dict(model.named_parameters())
        made = [self._update(model, optimizer, batch) for batch in self._batches[:number]]
        self.loss_index, self.losses = made[0][0], torch.stack([losses for _, losses in made])
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        self.largest = max((float(gradient.abs().max()) for gradient in gradients), default=0.0)
        self.norm = float(nn.utils.get_total_norm(gradients)) if gradients else 0.0

    def weigh_tokens(self) -> None:
        """Run all rows at once, if the loss is a mean over tokens and micro-batches have different numbers of them: the
        mean of the micro-batches' losses is another one. Call this after one update."""
        parts = [rows for micro_batches in self.recipe.layout for rows in micro_batches]
        every = torch.cat(parts).sort().values
        args, kwargs = arguments_of(take(self._batches[0], every))
        with torch.no_grad():
            whole = tensors_of(copy.deepcopy(self._given[0])(*args, **kwargs))[self.loss_index]
        if (whole - self.losses.mean()).abs() > rounding_bound(float(whole.abs()), whole.dtype):
            names = list(self.parameters)
            sums, columns = self.columns([every], names), self.columns(parts, names)
            if sums is None or columns is None:
                return
            bounds = torch.full((len(sums),), rounding_bound(self.largest, whole.dtype))
            solved = fit(columns, sums, bounds)
            if solved is not None and abs(solved.sum() - 1) < NEAR:
                note = "all rows at once, since micro-batches differ in tokens"
                self.run(replace(self.recipe, layout=[[every]], note=note), 1)

    def _update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> tuple[int, Tensor]:
        """Update the model, and leave mean gradients in `.grad`: added over the micro-batches of a replica one after
        another, then over replicas in pairs; and clipped.

        Returns: the index of the loss in the outputs, and the losses [micro-batches, replicas]
        """
        # Imported late: `import poptorch.testing` does not load the engine.
        from popengine.run.instances.all_reduce import leaf_nodes, tree_sum

        index, losses = 0, list[list[Tensor]]()
        sums: list[list[Any]] = []  # of each replica, the gradients of all parameters
        for micro_batches in self.recipe.layout:
            optimizer.zero_grad(set_to_none=True)
            losses.append([])
            for rows in micro_batches:
                index, loss = run_forward(model, take(batch, rows))
                loss.backward()
                losses[-1].append(loss.detach())
            sums.append([parameter.grad for parameter in self.parameters.values()])
        for (name, parameter), *of_replicas in zip(self.parameters.items(), *sums, strict=True):
            if of_replicas[0] is not None:
                (total,) = tree_sum(leaf_nodes([gradient] for gradient in of_replicas))
                parameter.grad = total.div_(len(losses) * len(losses[0]))
            elif name in self.recipe.unused:
                parameter.grad = torch.zeros_like(parameter)
        if self.recipe.max_norm < math.inf:
            nn.utils.clip_grad_norm_(self.parameters.values(), self.recipe.max_norm)
        optimizer.step()
        return index, torch.stack([torch.stack(of_replica) for of_replica in losses], dim=1)

    def sample(self, name: str) -> Tensor:
        """Return the sample of a gradient."""
        gradient = self.parameters[name].grad
        return sample(gradient, gradient)

    def bound(self, name: str, half: torch.dtype | None) -> float:
        """Return the largest rounding error of a gradient, if a loop computed in the dtype `half`. Sums of large values
        may cancel each other, so errors may be larger than a gradient that is small beside all others."""
        parameter = self.parameters[name]
        largest = 0.0 if parameter.grad is None else float(parameter.grad.abs().max())
        return rounding_bound(max(self.largest / 4, largest), half or parameter.dtype)

    def parts(self, number: int) -> list[Rows]:
        """Return the rows in order, in a number of about equal parts."""
        return list(torch.arange(self.rows).tensor_split(number))

    def columns(self, parts: Sequence[Rows], names: Sequence[str]) -> Tensor | None:
        """Return the gradients of parts of the first batch: [elements of these parameters' samples, parts]; None if the
        model can't compute with so few rows."""
        for rows in parts:
            if (key := tuple(rows.tolist())) not in self._samples:
                model = copy.deepcopy(self._given[0])
                model.zero_grad()
                try:
                    run_forward(model, take(self._batches[0], rows))[1].backward()
                except (RuntimeError, ValueError):  # such as batch norm over one row
                    return None
                pairs = zip(model.named_parameters(), self.parameters.values(), strict=True)
                self._samples[key] = {name: sample(p.grad, plain.grad) for (name, p), plain in pairs}
        columns = [[self._samples[tuple(rows.tolist())][name] for name in names] for rows in parts]
        return torch.stack([torch.cat(column) for column in columns], dim=1)


def sample(values: Tensor | None, gradient: Tensor | None) -> Tensor:
    """Return all elements, or those of 1,024 equal segments where plain PyTorch's gradient is largest; zeros for None.
    In float64."""
    if values is None:
        return torch.zeros(0 if gradient is None else min(gradient.numel(), _SAMPLES), dtype=torch.float64)
    flat = (values if gradient is None else gradient).detach().reshape(-1)
    size = max(len(flat) // _SAMPLES, 1)
    segments = flat[: size * _SAMPLES].split(size)
    indices = [turn * size + int(segment.abs().argmax()) for turn, segment in enumerate(segments)]
    return values.detach().reshape(-1)[indices].double()


def fit(columns: Tensor, values: Tensor, bounds: Tensor) -> Tensor | None:
    """Return the weights [parts, sums] of the columns with which their sums are `values`, up to rounding errors; None
    if there are none, or they are ambiguous.

    Args: columns: [elements, parts]; values: [elements, sums]; bounds: [elements]
    """
    sizes = columns.norm(dim=0)
    used = sizes > 1e-6 * sizes.max()
    scaled = columns[:, used] / sizes[used]
    if not used.any() or len(scaled) < 2 * scaled.shape[1] or torch.linalg.cond(scaled) > 1e4:
        return None
    weights = torch.zeros(columns.shape[1], values.shape[1], dtype=values.dtype)
    weights[used] = torch.linalg.lstsq(scaled, values).solution / sizes[used, None]
    is_right = ((columns @ weights - values).abs() <= SLACK * bounds[:, None]).all()
    return weights if is_right else None
