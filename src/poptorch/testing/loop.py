"""The loop under test on a rank, and how the gradients and new weights that it leaves differ from plain PyTorch's."""

import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from popengine.errors import Error, did_you_mean

from ..nested_values import tensors_of
from .plain import PlainUpdates, sample
from .verdicts import HALF, describe_difference, rounding_bound

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
class RankReport:
    """What a loop left on one rank, without the tensors.

    Args:
        losses: of all updates; of an executor, of all micro-batches
        sent:   of each parameter that the rank has, by "gradient" and "weight": the ranks that have a shard of a
            DTensor, or the number of elements of a flat piece (FSDP1)
        steps:  of one optimizer, in the last update
        early:  parameters with other values before the first step than the model's
        half:   the coarser dtype that modules computed in
        norm:   of all gradients (or shards)
    """

    losses: list[float]
    sent: dict[str, dict[str, list[int] | int]]
    steps: int
    early: list[str]
    half: torch.dtype | None
    norm: float

    @property
    def is_sharded(self) -> bool:
        """Return whether the rank has shards of gradients."""
        return any(parts.get("gradient") for parts in self.sent.values())


def half_of(reports: Iterable[RankReport]) -> torch.dtype | None:
    """Return the coarser dtype that modules of a rank computed in."""
    return next((report.half for report in reports if report.half), None)


@dataclass(frozen=True)
class Difference:
    """How a gradient or new weight of a rank differs from plain PyTorch's.

    Args: sample: some elements; None if the shapes differ
    """

    verdict: str
    sample: Tensor | None


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
        self._canonical = {_without_wrappers(name): canonical for name, canonical in every.items()} | every
        self._at_step = dict[Tensor, Tensor]()  # gradients, by parameter
        self._steps = Counter[int]()  # by optimizer
        self._losses, self._early, self._half = list[float](), list[str](), set[torch.dtype]()
        self._tensors: dict[str, dict[str, Any]] = {}

    @property
    def title(self) -> str:
        """Return the plan of an executor, else the name of the function."""
        return getattr(self._update, "title", None) or getattr(self._update, "__name__", "update")

    def run(self, batches: Sequence[Any]) -> RankReport:
        """Call the loop with the rows of each update, and return what the last one left."""
        updated = Updated()
        for batch in batches:
            for parameter in [*self._parameters.values(), *self.model.parameters()]:
                parameter.grad = None
            self._at_step.clear()
            self._steps.clear()
            hook = register_module_forward_hook(self._note_dtype)
            with register_optimizer_step_pre_hook(self._note_step), hook:
                returned = self._update(self.model, self._optimizer, batch)
            updated = returned if isinstance(returned, Updated) else Updated(returned)
            self._losses += _losses_of(updated.loss)
        self._tensors = self._own_tensors()
        for parameter in [*self._parameters.values(), *self.model.parameters()]:
            parameter.grad = None  # frees memory, if there are copies
        for part, tensors in zip(PARTS, (updated.gradients, updated.weights), strict=True):
            for name, tensor in tensors.items():
                if (canonical := self._canonical_name(name)) is None:
                    hint = did_you_mean(name, self._canonical)
                    raise Error(
                        f"compare: the model has no parameter {name!r}, which `Updated` names{hint}\n"
                        "  fix: use the names of model.named_parameters()"
                    )
                self._tensors.setdefault(canonical, {})[part] = tensor.detach()
        sent, gradients = dict[str, dict[str, list[int] | int]](), list[Tensor]()
        for name, parts in self._tensors.items():
            sent[name] = {part: _shards_of(tensor, self._before[name]) for part, tensor in parts.items()}
            gradients += [_local(parts["gradient"])] if "gradient" in parts else []
        norm = float(nn.utils.get_total_norm(gradients)) if gradients else 0.0
        half = next((dtype for dtype in HALF if dtype in self._half), None)
        return RankReport(self._losses, sent, max(self._steps.values(), default=0), self._early, half, norm)

    def _note_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note the gradients before a step of any optimizer: loops often set them to None or 0 after it."""
        self._steps[id(optimizer)] += 1
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            name = self._names.get(id(parameter), "")
            is_first = not self._losses and self._steps[id(optimizer)] == 1
            if name and is_first and self._has_changed(name, parameter):
                self._early.append(name)
            if parameter.grad is not None:
                self._at_step[parameter] = parameter.grad.detach().clone()

    def _note_dtype(self, _: nn.Module, __: Any, output: Any) -> None:
        self._half.update(tensor.dtype for tensor in tensors_of(output))

    def _own_tensors(self) -> dict[str, dict[str, Any]]:
        """Return the gradient and the new value of each parameter that the loop has used on this rank."""
        now = dict(self._parameters)
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if (canonical := self._canonical_name(name)) and id(parameter) not in self._names:
                now[canonical] = parameter  # FSDP and tensor parallel replace parameters
        tensors: dict[str, dict[str, Any]] = {}
        for name, parameter in now.items():
            gradient = self._at_step.get(parameter, parameter.grad)
            is_elsewhere = parameter.numel() == 0 != self._before[name].numel()  # of FSDP1
            has_changed = not is_elsewhere and self._has_changed(name, parameter)
            if self._is_alone or gradient is not None or has_changed:
                tensors[name] = {"weight": parameter.detach()}
                tensors[name] |= {} if gradient is None else {"gradient": gradient.detach()}
        return tensors

    def _has_changed(self, name: str, parameter: Tensor) -> bool:
        before = self._before[name]
        is_sharded = hasattr(parameter, "full_tensor") or parameter.shape != before.shape
        return is_sharded or not torch.equal(parameter.to(before), before)

    def _canonical_name(self, name: str) -> str | None:
        """Return the model's name for a wrapper's name of a parameter."""
        return self._canonical.get(name, self._canonical.get(_without_wrappers(name)))

    def differences(
        self,
        reports: Sequence[RankReport],
        group: Any,
        facts: tuple[set[str], float],
        plain: PlainUpdates | None,
    ) -> dict[str, dict[str, Difference]]:
        """Return how this rank's tensors differ from plain PyTorch's, which rank 0 broadcasts one after another.

        Args:
            group: of all ranks; None for a single one
            facts: the parameters with a gradient in plain PyTorch, and the largest element of all gradients
            plain: plain PyTorch's updates, on rank 0
        """
        differences: dict[str, dict[str, Difference]] = {}
        (trained, largest), half = facts, half_of(reports)
        for name, before in self._before.items():
            gradient, of_name, step = None, half, 0.0
            for part in PARTS:
                expected: Any = torch.empty(before.shape, dtype=before.dtype)
                if plain and (part == "weight" or name in trained):
                    now: Any = plain.parameters[name]
                    expected = (now if part == "weight" else now.grad).detach().contiguous()
                if part == "gradient" and name not in trained:
                    expected = None
                elif group:
                    group.broadcast(expected, 0).wait()
                whole, allowed, scale = self._whole(name, part, reports, group), None, 0.0
                if part == "gradient":
                    gradient, of_name, scale = expected, half or _coarser_dtype(whole, expected), largest / 4
                elif gradient is not None and expected is not None:
                    bound = rounding_bound(
                        max(largest / 4, float(gradient.abs().max())), of_name or gradient.dtype
                    )
                    step = float((expected - before.detach()).abs().max())
                    allowed = functools.partial(_noise_of_step, bound, step)
                if whole is not None:
                    verdict = describe_difference(whole, expected, scale, allowed, gradient, of_name)
                    is_like = expected is not None and whole.shape == expected.shape
                    value = sample(whole, gradient) if is_like else None
                    differences.setdefault(name, {})[part] = Difference(verdict, value)
        return differences

    def _whole(self, name: str, part: str, reports: Sequence[RankReport], group: Any) -> Tensor | None:
        """Return this rank's tensor, or the one that its shard is a part of, if all ranks of its mesh have a shard."""
        value: Any = self._tensors.get(name, {}).get(part)
        rank = group.rank() if group else 0
        sent = [report.sent.get(name, {}).get(part) for report in reports]
        if isinstance(mesh := sent[rank], list):
            value = value.full_tensor() if all(sent[peer] is not None for peer in mesh) else _local(value)
        shape, pieces, holders = self._before[name].shape, list[Tensor](), list[int]()
        for peer, size in enumerate(sent):
            if not isinstance(size, int) or not size or group is None:
                continue
            pieces.append(value.contiguous() if peer == rank else self._before[name].new_empty(size).detach())
            holders.append(peer)
            group.broadcast(pieces[-1], peer).wait()
            if sum(map(len, pieces)) == shape.numel():
                value = torch.cat(pieces).view(shape) if rank in holders else value
                pieces, holders = [], []
        return value


def _noise_of_step(bound: float, step: float, gradient: Tensor) -> Tensor:
    """Return the noise of steps by rounding errors of gradients: Adam's are as large where gradients are only noise."""
    return (2 * bound / gradient.abs()).clamp(max=2.0) * step


def _shards_of(tensor: Any, whole: Tensor) -> list[int] | int:
    if hasattr(tensor, "full_tensor"):
        return tensor.device_mesh.mesh.flatten().tolist()
    return tensor.numel() if tensor.dim() == 1 and tensor.shape != whole.shape else 0


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _coarser_dtype(actual: Tensor | None, plain: Tensor | None) -> torch.dtype | None:
    """Return the coarser dtype of which all values of a gradient are, if plain PyTorch's are not."""
    if actual is None or plain is None or actual.numel() < 2:
        return None
    for dtype in HALF:
        if all(torch.equal(part.to(dtype).to(part.dtype), part) for part in actual.flatten().split(1 << 20)):
            return None if torch.equal(plain.to(dtype).to(plain.dtype), plain) else dtype
    return None


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _losses_of(returned: Any) -> list[float]:
    if isinstance(returned, list):  # an executor's, of each micro-batch
        return returned
    if returned is None:
        return []
    if isinstance(returned, int | float) or (isinstance(returned, Tensor) and returned.numel() == 1):
        return [float(torch.as_tensor(returned).detach())]
    raise Error(
        f"compare: the update returned {type(returned).__name__}\n"
        "  fix: return its loss (a tensor with one element, or a number), None, or poptorch.testing.Updated"
    )
