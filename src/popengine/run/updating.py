"""The end of a step: from gradient sums to gradients to weight updates. The rows:

    exchange   all-reduce a bucket of gradient sums over the replicas of all processes
    norm       if the first update needs them: the norm of each gradient, and whether it is finite
    begin      compute the loss scale and the clipping factor; commit the step: it now runs to its end
    measure    if the rule needs norms (LAMB, LARS): compute the steps, and the norms of steps and weights
    trust      compute the trust ratios from these norms
    update     chunk by chunk: add up replicas, divide, clip, apply the rule
    share      send updated weights to the other processes, if they shard the optimizer state
    end        finish the step

All sums are in a fixed order, so that every layout and run gives the same bits. A new operation between the
averaging of gradients and their clipping belongs in `_reduce_and_measure` (of a whole gradient) or `_prepare`
(element by element). Random numbers: a draw of a piece has the key (seed, step, micro-batch, replica) and its
number in the model; stochastic rounding has the key (seed, step) and the number of the parameter's slot.
Another draw has to use the key (seed, step) and numbers from `len(slots)` on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from .. import ir
from ..settings import Optimizer, Settings
from ..update.chunks import Chunk, Part
from ..update.gradients import all_finite, clamp_, clipping_factor, count, next_factor, norm, scale_
from ..update.group_update import UpdateStep
from .buckets import Bucket, buckets_of
from .call import EngineCall
from .instances.all_reduce import AllReduce, leaves, tree_sum
from .instances.process_group import FIRST_TAG, ProcessGroup
from .random_draws import mix
from .state import State, Unit

Work = Callable[[int], None]


class Updates:
    """The updates of all weights of this process.

    Args:
        group: the processes that train together; None: this process trains alone
    """

    def __init__(self, plan: ir.Plan, settings: Settings, state: State, group: ProcessGroup | None) -> None:
        self.plan, self.settings, self.state, self._group = plan, settings, state, group
        self.call: EngineCall
        self._slot_index = {slot.key: place for place, slot in enumerate(plan.partition.signature.slots)}
        self.buckets: dict[int, list[Bucket]] = {}  # by row
        if group is not None:
            self._processes = AllReduce(group, FIRST_TAG)
            for row, task in enumerate(plan.tasks):
                if task.kind == "exchange":
                    self.buckets[row] = buckets_of(plan, task.piece, state)
        # By (ipu, parameter group): its units. By ipu: its chunks, each with its (ipu, parameter group).
        self._groups: dict[tuple[int, int], list[Unit]] = {}
        self._chunks: dict[int, list[tuple[tuple[int, int], Chunk]]] = {}
        for unit in (unit for unit in state.units if unit in state.optimizer):
            place = state.ipu_of[unit.key], self._optimizer.group_of[unit.key]
            self._groups.setdefault(place, []).append(unit)
        for place, units in sorted(self._groups.items()):
            parts = [self._part(unit, [state.weight(unit)]) for unit in units]
            chunks = UpdateStep(self._optimizer, {}, parts).chunks
            self._chunks.setdefault(place[0], []).extend((place, chunk) for chunk in chunks)
        # Values of the running step:
        self._norms: dict[Unit, Tensor] = {}
        self._counts: list[Tensor] = []
        # By (ipu, parameter group); empty: a gradient overflowed, and no weight changes.
        self._steps: dict[tuple[int, int], UpdateStep] = {}
        self._clipping_factor: Tensor | None = None  # of clipping by norm
        self.is_writing = False  # from `begin` to `end`

    @property
    def _optimizer(self) -> Optimizer:
        assert self.settings.optimizer is not None
        return self.settings.optimizer

    def bind(self, row: int) -> Work | None:
        """Return the function of a row; None: the row does nothing."""
        kind, ipu = self.plan.tasks[row].kind, self.plan.tasks[row].ipu
        functions: dict[ir.TaskKind, Work] = {
            "exchange": partial(self._exchange, row),
            "norm": self._reduce_and_measure,
            "begin": self._begin,
            "measure": partial(self._measure, ipu),
            "trust": self._trust,
            "update": partial(self._update, ipu),
            "share": self._share,
        }
        return functions.get(kind)

    def size(self, row: int) -> int:
        """Return the number of indices of a row: of parameters, of chunks, or 1."""
        task = self.plan.tasks[row]
        if task.index == "parameter":
            return len(self.state.units)
        return len(self._chunks.get(task.ipu, ())) if task.index == "chunk" else 1

    # ---- gradients -------------------------------------------------------------------------------------------

    @property
    def _loss_scale(self) -> float:
        return self.call.results.loss_scale

    def _divisor(self) -> float:
        """Return the loss scale; times the micro-batches of all replicas, if the reduction is "mean"."""
        if self.settings.reduction == "mean":
            part, counts = self.settings.part, self.settings.counts
            micro_batches = part.before + part.weight * counts.accumulation
            return self._loss_scale * micro_batches * counts.global_replicas
        return self._loss_scale

    def _exchange(self, row: int, _: int) -> None:
        """All-reduce (if sharded: reduce-scatter) a row's buckets over processes, into `flats[0]`."""
        for bucket in self.buckets[row]:
            self._divide_means(bucket.flats)
            if bucket.cuts is None:
                self._processes.all_reduce(bucket.flats)
            else:
                self._processes.reduce_scatter(bucket.flats, bucket.cuts)

    def _divide_means(self, sums: Sequence[Tensor]) -> None:
        """Divide running means by the number of all replicas, against overflow; leave sums unchanged."""
        if self.settings.reduction == "running":
            divide_(sums, self.settings.counts.global_replicas)

    def _reduce(self, parts: Sequence[Part]) -> None:
        """Add `others` to the parts' gradients as a binary tree, in place; divide them by `_divisor`."""
        for others in {len(part.others) for part in parts} - {0}:
            rows = [(part.gradient, *part.others) for part in parts if len(part.others) == others]
            replicas = [list(sums) for sums in zip(*rows, strict=True)]
            for sums in replicas:
                self._divide_means(sums)
            tree_sum(leaves(replicas))
        divide_([part.gradient for part in parts], self._divisor())

    def _reduce_and_measure(self, index: int) -> None:
        """Reduce and divide a gradient, in place; store its norm (for clipping) and `count` (for the loss
        scale), if needed. No effect if a peer owns the parameter's optimizer state."""
        unit = self.state.units[index]
        if not self.state.is_kept_here(unit.key):
            return
        part = self._part(unit, self._sums(unit))
        self._reduce([part])
        if self.settings.automatic_loss_scaling and self._is_counted_here(unit):
            self._counts.append(count(part.gradient, self._loss_scale))
        if self._optimizer.max_grad_norm < math.inf:
            self._norms[unit] = norm(part.gradient)

    def _sums(self, unit: Unit) -> list[Tensor]:
        """Return the gradient sums of the replicas in this process that share the unit's parameter.

        If several processes train together, only the first: the row "exchange" has added all others to it.
        """
        members = self.settings.members(unit.key, unit.replica) if self._group is None else (unit.replica,)
        return [self.state.sums[replica][unit.key] for replica in members]

    def _part(self, unit: Unit, sums: Sequence[Tensor], seed: int | None = None) -> Part:
        """Return the part for a unit's update; the gradient is the total of `sums`."""
        state = self.state.optimizer.get(unit, {})
        return Part(self.state.weight(unit), sums[0], state, tuple(sums[1:]), seed)

    # ---- the updates -----------------------------------------------------------------------------------------

    def _begin(self, _: int) -> None:
        """Compute the clipping factor and loss scale, allocate all large tensors, then commit the step.

        Waits for all processes, acquires `weights_lock` until `end`, and adds 1 to the step counts. No weight
        is updated if the loss scale is automatic and a gradient is not finite."""
        optimizer, hyper = self._optimizer, self.call.hyper
        assert hyper is not None
        added = 1 if self.settings.measures_gradients else None  # only the first of the sums is left
        if optimizer.max_grad_norm < math.inf:
            self._clipping_factor = clipping_factor(self._total_norm(), optimizer.max_grad_norm)
        if not self.settings.automatic_loss_scaling or self._adapt_loss_scale():
            for place, units in self._groups.items():
                parts = [self._part(unit, self._sums(unit)[:added], self._seed(unit)) for unit in units]
                self._steps[place] = UpdateStep(optimizer, hyper.groups[place[1]], parts)
        if self._group is None:
            self.call.commit()
        else:
            # All processes have all sums, and none updates if one of them is interrupted or fails.
            self._group.commit_together(self.call.commit)
        self.state.weights_lock.acquire()
        self.is_writing = True
        for step in self._steps.values():
            step.begin()

    def _prepare(self, parts: Sequence[Part]) -> Sequence[Part]:
        """Reduce (unless "norm" did), divide and clip the parts' gradients, in place; return the parts."""
        optimizer = self._optimizer
        if not self.settings.measures_gradients:
            self._reduce(parts)
        gradients = [part.gradient for part in parts]
        # The loss scale may make gradients overflow. (No check on an accelerator: the host would wait.)
        is_scaled = self._loss_scale != 1 and self.state.device.type == "cpu"
        if is_scaled and not self.settings.automatic_loss_scaling and not all_finite(gradients):
            self.call.overflows.append((self.state.random_state[1], self._loss_scale))
        if self._clipping_factor is not None:
            scale_(gradients, self._clipping_factor)
        if optimizer.max_grad_value < math.inf:
            clamp_(gradients, optimizer.max_grad_value)
        return parts

    def _total_norm(self) -> Tensor:
        """Return the norm of all gradients, as torch.nn.utils.get_total_norm does: the norm of their norms,
        stacked in the order of the model's parameters."""
        ordered = sorted(self.state.units, key=lambda unit: (self._slot_index[unit.key], unit.replica))
        found = [
            self._norms[unit]
            if self._is_counted_here(unit)
            else torch.zeros((), dtype=torch.promote_types(self._sums(unit)[0].dtype, torch.float32))
            for unit in ordered
        ]
        return torch.linalg.vector_norm(self._all_reduce_if_sharded(torch.stack(found)))

    def _is_counted_here(self, unit: Unit) -> bool:
        """Return whether this process adds a gradient to totals (False if a peer adds it)."""
        owner = self.state.owner
        return not owner or owner.get(unit.key, 0) == self.settings.counts.instance

    def _all_reduce_if_sharded(self, values: Tensor) -> Tensor:
        """All-reduce values in place over processes, if the optimizer state is sharded; return the values."""
        if self.state.owner:
            self._processes.all_reduce([values])
        return values

    def _adapt_loss_scale(self) -> bool:
        """Set the next step's loss factor from the counts of all gradients; return whether all are finite."""
        seen = self._all_reduce_if_sharded(sum(self._counts, torch.zeros(3, dtype=torch.int64)))
        elements, large, not_finite = seen.tolist()
        self.state.loss_factor = next_factor(self.state.loss_factor, elements, large, not_finite)
        return not not_finite

    def _seed(self, unit: Unit) -> int | None:
        """Return the seed of stochastic rounding, from step and parameter; None: no stochastic rounding."""
        if not self.settings.stochastic_rounding or self.state.weight(unit).dtype == torch.float32:
            return None
        return mix(mix(*self.state.random_state), self._slot_index[unit.key])

    def _measure(self, ipu: int, index: int) -> None:
        place, chunk = self._chunks[ipu][index]
        if place in self._steps:
            step = self._steps[place]
            step.measure(self._prepare(step.views(chunk)))

    def _trust(self, _: int) -> None:
        for step in self._steps.values():
            step.trust()

    def _update(self, ipu: int, index: int) -> None:
        place, chunk = self._chunks[ipu][index]
        if place in self._steps:
            step = self._steps[place]
            views = step.views(chunk)
            step.apply(views if step.layers is not None else self._prepare(views))

    def _share(self, _: int) -> None:
        """Broadcast the updated weights from their owners to all processes, in place."""
        units = [unit for unit in self.state.units if unit.key in self.state.owner]
        weights = [self.state.weight(unit) for unit in units]
        self._processes.broadcast_by_owners(weights, [self.state.owner[unit.key] for unit in units])

    def end(self) -> None:
        """Finish the step: end it in the state, drop its gradients, and release the lock on the weights."""
        self.state.end_step()
        self.forget()
        self.is_writing = False
        self.state.weights_lock.release()

    def forget(self) -> None:
        """Drop the gradients and norms of a step. Gradient sums in buckets keep their memory."""
        for values in (self._norms, self._counts, self._steps):
            values.clear()
        self._clipping_factor = None
        if not self.buckets:
            for sums in self.state.sums:
                sums.clear()


def divide_(sums: Sequence[Tensor], divisor: float) -> None:
    """Divide the sums in place; a divisor of 1 leaves them unchanged."""
    if divisor != 1 and sums:
        torch._foreach_div_(list(sums), divisor)
