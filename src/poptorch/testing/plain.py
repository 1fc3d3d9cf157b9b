"""Plain PyTorch's side of a comparison: weight updates, whether they are random, and gradients of some of the rows."""

import copy
import functools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from popengine.errors import Error
from popengine.settings import Counts

from ..nested_values import arguments_of, loss_field, tensors_of, with_tensors
from .verdicts import rounding_bound

NEAR = 0.02  # the largest error of a coefficient; what it predicts is tested more closely
SLACK = 4.0  # times the bound of rounding errors, for sums of several gradients

Rows = Tensor  # indices of rows of a batch, in dimension 0
Layout = Sequence[Sequence[Rows]]  # the rows of each micro-batch of each replica


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


def blocks_of_rows(rows: int, number: int) -> list[Rows]:
    """Return the rows as blocks of neighbours, about equally many in each."""
    return list(torch.arange(rows).tensor_split(number))


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
        for seed in range(2):
            torch.manual_seed(seed)
            twin = copy.deepcopy(model)
            for name, module in twin.named_modules():
                module.register_forward_pre_hook(lambda *_: states.append(torch.get_rng_state()))
                module.register_forward_hook(functools.partial(note, name))
            losses.append(run_forward(twin, batch)[1].detach().double())
    random.setstate(python_state)
    return None if torch.allclose(*losses, rtol=1e-5, atol=0.0, equal_nan=True) else drawing[:2][-1]


class PlainUpdates:
    """Plain PyTorch's weight updates of a copy of a model.

    Args:
        batches: the rows of each update
        layout:  the rows of each micro-batch of each replica
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Any], layout: Layout
    ) -> None:
        self._given, self._batches, self.layout = (model, optimizer), batches, layout
        self.max_norm = math.inf  # of the gradients
        self.note = ""  # how the updates differ from those that were asked for

    def run(self, number: int) -> None:
        """Make a number of updates, and leave the gradients of the last one in `.grad` of `model`."""
        self.model = nn.Module()  # frees the copy of an earlier run
        self.model, optimizer = copy.deepcopy(self._given)
        made = [self._update(optimizer, batch) for batch in self._batches[:number]]
        self.number, self.loss_index = number, made[0][0]
        self.losses = torch.stack([losses for _, losses in made])  # [updates, micro-batches, replicas]
        self.parameters = dict(self.model.named_parameters())
        gradients = [p.grad.abs().max() for p in self.parameters.values() if p.grad is not None]
        self.largest = float(torch.stack(gradients).max()) if gradients else 0.0  # of all gradients
        self.indices = {
            name: _sample_indices(p if p.grad is None else p.grad) for name, p in self.parameters.items()
        }

    def run_again(self, layout: Layout | None, max_norm: float, note: str) -> None:
        """Make the updates with other micro-batches, or with gradients clipped to another norm."""
        self.layout, self.max_norm, self.note = layout or self.layout, max_norm, note
        self.run(self.number)

    def bound(self, name: str) -> float:
        """Return the largest rounding error of a gradient. Sums of large values may cancel each other, so errors may be
        larger than a gradient that is small beside all others."""
        gradient = self.parameters[name].grad
        if gradient is None:
            return 0.0
        return rounding_bound(max(self.largest / 4, float(gradient.abs().max())), gradient.dtype)

    def probe(self) -> "Probe":
        """Return the gradients of rows of the last update."""
        start = PlainUpdates(*self._given, self._batches, self.layout)
        start.max_norm, start.model = self.max_norm, self._given[0]
        if self.number > 1:
            start.run(self.number - 1)
        return Probe(start.model, self._batches[self.number - 1], self.indices)

    def weigh_tokens(self) -> None:
        """Run all rows at once, if the loss is a mean over tokens and micro-batches have different numbers of them: the
        mean of the micro-batches' losses is another one. Call this after `run(1)`."""
        parts = [rows for micro_batches in self.layout for rows in micro_batches]
        args, kwargs = arguments_of(self._batches[0])
        with torch.no_grad():
            whole = tensors_of(copy.deepcopy(self._given[0])(*args, **kwargs))[self.loss_index]
        if (whole - self.losses.mean()).abs() > rounding_bound(float(whole.abs()), whole.dtype):
            every, names = torch.cat(parts).sort().values, list(self.parameters)
            bounds = torch.cat([torch.full((len(self.indices[name]),), self.bound(name)) for name in names])
            probe = self.probe()
            solved = fit(probe.columns(parts, names), probe.columns([every], names), bounds)
            if solved is not None and solved[1][0] and abs(solved[0].sum() - 1) < NEAR:
                self.run_again([[every]], math.inf, "all rows at once, since micro-batches differ in tokens")

    def _update(self, optimizer: torch.optim.Optimizer, batch: Any) -> tuple[int, Tensor]:
        """Update the model, and leave mean gradients in `.grad`: added over the micro-batches of a replica one after
        another, then over replicas in pairs; and clipped.

        Returns: the index of the loss in the outputs, and the losses [micro-batches, replicas]
        """
        index, parameters = 0, list(self.model.parameters())
        losses: list[list[Tensor]] = []
        sums: list[list[Any]] = []  # of each replica, the gradients of all parameters
        for micro_batches in self.layout:
            optimizer.zero_grad(set_to_none=True)
            losses.append([])
            for rows in micro_batches:
                index, loss = run_forward(self.model, take(batch, rows))
                loss.backward()
                losses[-1].append(loss.detach())
            sums.append([parameter.grad for parameter in parameters])
        for parameter, *of_replicas in zip(parameters, *sums, strict=True):
            if of_replicas[0] is not None:
                parameter.grad = _sum_in_pairs(of_replicas).div_(len(losses) * len(losses[0]))
        if self.max_norm < math.inf:
            nn.utils.clip_grad_norm_(parameters, self.max_norm)
        optimizer.step()
        return index, torch.stack([torch.stack(of_replica) for of_replica in losses], dim=1)


def _sum_in_pairs(values: list[Tensor]) -> Tensor:
    """Return the sum, added as a binary tree, as over the replicas of an executor."""
    while len(values) > 1:
        left, right = values[::2], values[1::2]
        values = [a + b for a, b in zip(left, right, strict=False)] + left[len(right) :]
    return values[0]


class Probe:
    """Samples of plain PyTorch's gradients of some rows.

    Args:
        model:   the model before the update; a copy of it computes
        indices: of each parameter, the indices of the sample in the flattened gradient
    """

    def __init__(self, model: nn.Module, batch: Any, indices: Mapping[str, Tensor]) -> None:
        self._model, self._batch, self._indices, self.rows = (
            copy.deepcopy(model),
            batch,
            indices,
            rows_in(batch),
        )
        self._parameters = dict(self._model.named_parameters())
        self._known: dict[tuple[int, ...], dict[str, Tensor]] = {}  # by rows

    def columns(self, parts: Sequence[Rows], names: Sequence[str]) -> Tensor:
        """Return the gradients of parts of the batch: [elements of these parameters' samples, parts]."""
        return torch.stack(
            [torch.cat([self._gradients(rows)[name] for name in names]) for rows in parts], dim=1
        )

    def _gradients(self, rows: Rows) -> dict[str, Tensor]:
        key = tuple(rows.tolist())
        if key not in self._known:
            self._model.zero_grad()
            run_forward(self._model, take(self._batch, rows))[1].backward()
            pairs = self._parameters.items()
            self._known[key] = {name: sample(p.grad, self._indices[name]) for name, p in pairs}
        return self._known[key]

    def gradients_of_uses(self, name: str, layout: Layout) -> list[Tensor]:
        """Return the sample of a parameter's mean gradient by each of its uses in forward."""
        sums: dict[int, Tensor] = {}
        parts = [rows for micro_batches in layout for rows in micro_batches]
        for rows in parts:
            loss = run_forward(self._model, take(self._batch, rows))[1]
            for number, (node, index) in enumerate(_uses(self._parameters[name], loss)):

                def note(gradients: Sequence[Any], _: Any, number: int = number, index: int = index) -> None:
                    value = sample(gradients[index], self._indices[name]) / len(parts)
                    sums[number] = sums[number] + value if number in sums else value

                node.register_hook(note)
            loss.backward()
        return list(sums.values())


def _uses(parameter: Tensor, loss: Tensor) -> Iterator[tuple[Any, int]]:
    """Yield (node, index of its input) of autograd's graph for each use of a parameter."""
    stack, seen = list[Any]([loss.grad_fn]), {loss.grad_fn}
    while stack:
        node = stack.pop()
        for index, (before, _) in enumerate(node.next_functions):
            if getattr(before, "variable", None) is parameter:
                yield node, index
            elif before is not None and before not in seen:
                seen.add(before)
                stack.append(before)


def sample(values: Tensor | None, indices: Tensor) -> Tensor:
    """Return some elements of a flattened tensor, in float64; zeros if there is none."""
    if values is None:
        return torch.zeros(len(indices), dtype=torch.float64)
    return values.detach().reshape(-1)[indices].double().cpu()


def _sample_indices(gradient: Tensor, number: int = 1024) -> Tensor:
    """Return the indices of elements of a flattened gradient: the largest ones, and others at equal distances."""
    flat = gradient.detach().reshape(-1).abs()
    if flat.numel() <= 2 * number:
        return torch.arange(flat.numel())
    steps = torch.arange(number) * flat.numel() // number
    return torch.cat([flat.topk(number).indices.cpu(), steps]).unique()


def fit(columns: Tensor, values: Tensor, bounds: Tensor) -> tuple[Tensor, list[bool]] | None:
    """Return the weights of the columns whose sums are nearest to `values`, and whether each sum is as near as rounding
    errors permit. None if the weights are ambiguous.

    Args: columns: [elements, parts]; values: [elements, sums]; bounds: [elements]
    """
    sizes = columns.norm(dim=0)
    used = sizes > 1e-6 * sizes.max()
    scaled = columns[:, used] / sizes[used]
    if not used.any() or len(scaled) < 2 * scaled.shape[1]:
        return None
    singular = torch.linalg.svdvals(scaled)
    if singular[-1] < 1e-4 * singular[0]:
        return None
    weights = torch.zeros(columns.shape[1], values.shape[1], dtype=values.dtype)
    weights[used] = torch.linalg.lstsq(scaled, values).solution / sizes[used, None]
    errors = (columns @ weights - values).abs() <= SLACK * bounds[:, None]
    return weights, errors.all(dim=0).tolist()
