"""What a loop leaves on each rank: gradients and new weights by the model's names, which rank 0 receives one by one."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from popengine.errors import Error, did_you_mean

from .meeting import Ranks, ranks_text
from .plain import PlainUpdates, sample
from .verdicts import describe_difference, is_rounding

_WRAPPERS = {"module", "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"}  # in names
PARTS = ("gradient", "weight")


@dataclass(frozen=True)
class Updated:
    """What a loop returns to `compare` on a rank, if its modules are copies or have other names.

    >>> return poptorch.testing.Updated(loss, {"first.weight": stage.weight.grad}, {"first.weight": stage.weight})

    Args:
        loss:      the loss of this rank, or None
        gradients: by name of the model's parameter, which may have a wrapper's prefixes (`module.`); a DTensor is
            made whole
        weights:   the new values, by name
    """

    loss: Any = None
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    weights: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Sent:
    """A description of a tensor that a rank sends to rank 0."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    mesh: Sequence[int]  # ranks that have a shard, if it is a DTensor
    norm: float  # of this rank's shard

    @classmethod
    def of(cls, tensor: Any) -> "Sent":
        """Return the description of a tensor."""
        is_sharded = hasattr(tensor, "full_tensor")
        mesh, local = (
            (tensor.device_mesh.mesh.flatten().tolist(), tensor.to_local()) if is_sharded else ([], tensor)
        )
        return cls(
            tuple(tensor.shape),
            tensor.dtype,
            mesh,
            float(torch.linalg.vector_norm(local, dtype=torch.float64)),
        )


@dataclass(frozen=True)
class RankReport:
    """What a loop left on one rank, without the tensors."""

    losses: list[float]  # of all updates; of an executor, of all micro-batches
    sent: dict[str, dict[str, Sent]]  # of each parameter that the rank has: by "gradient", "weight"
    steps: int  # of one optimizer, in the last update
    early: list[str]  # parameters with other values before the first step


class Loop:
    """The loop under test on this rank, with its copies of the model and the optimizer.

    Args: is_alone: there is one rank, which has all parameters
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, update: Callable[..., Any], is_alone: bool
    ) -> None:
        self.model, self._optimizer = copy.deepcopy((model, optimizer))
        self._update, self._is_alone, self._before = update, is_alone, dict(model.named_parameters())
        self._parameters = dict(self.model.named_parameters())  # a loop may cut the model, or replace them
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        every = {name: self._names[id(p)] for name, p in self.model.named_parameters(remove_duplicate=False)}
        self._canonical = {_without_wrappers(name): known for name, known in every.items()} | every
        self._at_step: dict[
            Tensor, tuple[Tensor, int]
        ] = {}  # by parameter: gradient, and version of the gradient
        self._steps = Counter[int]()  # by optimizer
        self._losses, self._early = list[float](), list[str]()
        self.tensors: dict[str, dict[str, Tensor]] = {}

    @property
    def title(self) -> str:
        """Return the plan of an executor, else the name of the function."""
        return getattr(self._update, "title", None) or getattr(self._update, "__name__", "update")

    def run(self, batches: Sequence[Any]) -> RankReport:
        """Call the loop with the rows of each update, and return what the last one left."""
        returned = None
        for batch in batches:
            for parameter in [*self._parameters.values(), *self.model.parameters()]:
                parameter.grad = None
            self._at_step.clear()
            self._steps.clear()
            hook = register_optimizer_step_pre_hook(self._note_step)
            try:
                returned = self._update(self.model, self._optimizer, batch)
            finally:
                hook.remove()
            returned = returned if isinstance(returned, Updated) else Updated(returned)
            self._losses += _losses_of(returned.loss)
        assert returned is not None
        self.tensors = self._own_tensors()
        for part, tensors in zip(PARTS, (returned.gradients, returned.weights), strict=True):
            for name, tensor in tensors.items():
                self.tensors.setdefault(self._known(name), {})[part] = tensor.detach()
        sent = {name: {part: Sent.of(t) for part, t in parts.items()} for name, parts in self.tensors.items()}
        return RankReport(self._losses, sent, max(self._steps.values(), default=0), self._early)

    def _note_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note the gradients before a step of any optimizer: loops often set them to None after it."""
        self._steps[id(optimizer)] += 1
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            name = self._names.get(id(parameter), "")
            if (
                name
                and not self._losses
                and self._steps[id(optimizer)] == 1
                and self._has_changed(name, parameter)
            ):
                self._early.append(name)
            if parameter.grad is not None:
                self._at_step[parameter] = parameter.grad, parameter.grad._version

    def _own_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return the gradient and the new value of each parameter that the loop has used on this rank."""
        now = dict(self._parameters)
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            known = self._canonical.get(name, self._canonical.get(_without_wrappers(name)))
            if (
                known is not None and id(parameter) not in self._names
            ):  # FSDP and tensor parallel replace parameters
                now[known] = parameter
        tensors: dict[str, dict[str, Tensor]] = {}
        for name, parameter in now.items():
            gradient, version = self._at_step.get(parameter, (None, 0))
            if parameter.grad is not None and parameter.grad is not gradient:
                gradient, version = parameter.grad, parameter.grad._version
            if gradient is not None and gradient._version != version and not gradient.any():
                gradient = None  # set to zero in place, after the step
            is_elsewhere = parameter.numel() == 0 != self._before[name].numel()  # of FSDP1
            if (
                self._is_alone
                or gradient is not None
                or (self._has_changed(name, parameter) and not is_elsewhere)
            ):
                tensors[name] = {"weight": parameter.detach()}
                tensors[name] |= {} if gradient is None else {"gradient": gradient.detach()}
        return tensors

    def _has_changed(self, name: str, parameter: Tensor) -> bool:
        before = self._before[name]
        is_sharded = hasattr(parameter, "full_tensor") or parameter.shape != before.shape
        return is_sharded or not torch.equal(parameter.to(before), before)

    def _known(self, name: str) -> str:
        """Return the model's name for a name in an `Updated`."""
        known = self._canonical.get(name, self._canonical.get(_without_wrappers(name)))
        if known is None:
            hint = did_you_mean(name, self._canonical) + "\n  fix: use the names of model.named_parameters()"
            raise Error(f"compare: the model has no parameter {name!r}, which `Updated` names{hint}")
        return known


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _losses_of(returned: Any) -> list[float]:
    if isinstance(returned, list):  # an executor's, of each micro-batch
        return returned
    if (
        returned is None
        or isinstance(returned, int | float)
        or (isinstance(returned, Tensor) and returned.numel() == 1)
    ):
        return [] if returned is None else [float(torch.as_tensor(returned).detach())]
    raise Error(
        f"compare: the update returned {type(returned).__name__}\n"
        "  fix: return its loss (a tensor with one element, or a number), None, or poptorch.testing.Updated"
    )


class Evidence:
    """What rank 0 has seen of one parameter, of which it keeps samples."""

    def __init__(self, plain: PlainUpdates, name: str, initial: Tensor) -> None:
        now, self._index, self._largest = plain.parameters[name], plain.indices[name], plain.largest
        self._plain: dict[str, Tensor | None] = {"gradient": now.grad, "weight": now.detach()}
        self.plain, self.weight, self.initial = (sample(t, self._index) for t in (now.grad, now, initial))
        self.bound = plain.bound(name)  # of rounding errors of the gradient
        self._step = float((now.detach() - initial.detach()).abs().max())
        self.is_trained = now.grad is not None or self._step > 0
        self.found: dict[str, dict[int, Tensor]] = {part: {} for part in PARTS}  # samples, by rank
        self.verdicts: dict[str, dict[int, str]] = {part: {} for part in PARTS}
        self.norms: dict[int, float] = {}  # of whole gradients

    def add(self, part: str, ranks: Sequence[int], value: Tensor) -> None:
        """Add a tensor of some ranks."""
        plain, gradient, allowed = self._plain[part], self._plain["gradient"], None
        if (
            part == "weight" and gradient is not None
        ):  # Adam's steps are as large where gradients are rounding errors
            allowed = (2 * self.bound / gradient.abs()).clamp(max=2.0) * self._step
        verdict = describe_difference(value, plain, self._largest / 4 if part == "gradient" else 0.0, allowed)
        for rank in ranks:
            self.verdicts[part][rank] = verdict
            if plain is not None and value.shape == plain.shape:
                self.found[part][rank] = sample(value, self._index)
                self.norms |= {rank: float(value.norm())} if part == "gradient" else {}

    def add_missing(self, part: str, ranks: Sequence[int]) -> None:
        """Note that ranks should have sent a tensor, if they have not."""
        for rank in ranks:
            self.verdicts[part].setdefault(rank, describe_difference(None, self._plain[part]))

    def forget_gradient(self, rank: int) -> None:
        """Ignore a gradient that the rank did not use: no optimizer stepped there, and yet its new weight is right."""
        if is_rounding(self.verdicts["weight"].get(rank, "missing")) and len(self.verdicts["gradient"]) > 1:
            for of_ranks in (self.verdicts["gradient"], self.found["gradient"], self.norms):
                of_ranks.pop(rank, None)

    def text(self, part: str) -> str:
        """Return the verdicts on the ranks that have the parameter: one text, if they agree."""
        verdicts = self.verdicts[part]
        if not verdicts:
            return (
                "missing on all ranks" if self.is_trained else {"gradient": "none", "weight": "equal"}[part]
            )
        if all(map(is_rounding, verdicts.values())):
            return max(verdicts.values(), key=lambda verdict: float(verdict.partition(", ")[2] or 0))
        ranks: dict[str, list[int]] = {}
        for rank, verdict in sorted(verdicts.items()):
            ranks.setdefault(verdict, []).append(rank)
        several = [f"{ranks_text(of_verdict)}: {verdict}" for verdict, of_verdict in ranks.items()]
        return "; ".join(several) if len(several) > 1 else next(iter(ranks))

    def wrong(self, part: str) -> list[int]:
        """Return the ranks whose tensor differs by more than rounding."""
        return [
            r
            for r, verdict in self.verdicts[part].items()
            if not is_rounding(verdict) and verdict != "missing"
        ]


def collect(
    ranks: Ranks,
    group: Any,
    reports: Sequence[RankReport],
    loop: Loop,
    plain: PlainUpdates | None,
    before: nn.Module,
) -> dict[str, Evidence]:
    """Send what the loop left to rank 0, one tensor after another, and compare there. All ranks call this.

    Args:
        plain:  on rank 0, plain PyTorch's updates
        before: the model before them
    Returns: on rank 0, what it has seen of each parameter; elsewhere {}
    """
    every, expected = dict[str, Evidence](), _expected_names(reports)
    for name, initial in before.named_parameters():
        if plain:
            every[name] = Evidence(plain, name, initial)
        for part in PARTS:
            sent = {rank: report.sent.get(name, {}).get(part) for rank, report in enumerate(reports)}
            for holders, value in _receive(
                ranks, group, sent, loop.tensors.get(name, {}).get(part), initial.shape
            ):
                every[name].add(part, holders, value)
            if plain:
                every[name].add_missing(part, [rank for rank, names in enumerate(expected) if name in names])
        for rank, report in enumerate(reports):
            if plain and not report.steps and any(peer.steps for peer in reports):
                every[name].forget_gradient(rank)
    return every


def _expected_names(reports: Sequence[RankReport]) -> list[set[str]]:
    """Return the parameters that each rank should have: those that it has; and if they are most of those that another
    rank has, all of these. Stages of a pipeline have different ones."""
    names = [set(report.sent) for report in reports]
    return [own.union(*(peer for peer in names if own < peer and 2 * len(own) > len(peer))) for own in names]


def _receive(
    ranks: Ranks, group: Any, sent: Mapping[int, Sent | None], own: Any, shape: torch.Size
) -> Iterator[tuple[list[int], Tensor]]:
    """Yield, on rank 0, (ranks, tensor): one tensor from each rank that has one, and from several if they have flat
    pieces of it (FSDP1). All ranks iterate; those of a DTensor's mesh make it whole, if all of them have a shard."""
    me, pieces = ranks.rank, dict[int, Tensor]()
    whole = {rank: what for rank, what in sent.items() if what and all(sent[peer] for peer in what.mesh)}
    if me in whole:
        own = (own.full_tensor() if whole[me].mesh else own).detach().cpu().contiguous()
    for rank, what in whole.items():
        tensor = own if rank == me else torch.empty(what.shape, dtype=what.dtype)
        if me == rank != 0:
            group.send([tensor], 0, 0).wait()
        elif me == 0 != rank:
            group.recv([tensor], rank, 0).wait()
        if me != 0:
            continue
        if tensor.dim() != 1 or tensor.shape == shape:
            yield [rank], tensor
            continue
        pieces[rank] = tensor
        if sum(piece.numel() for piece in pieces.values()) == shape.numel():
            yield list(pieces), torch.cat([*pieces.values()]).view(shape)
            pieces = {}
    for rank, piece in pieces.items():
        yield [rank], piece
