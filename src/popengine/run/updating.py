"""The end of a step: from gradient sums to gradients to weight updates. The rows:

    exchange   all-reduce buckets of gradient sums over the replicas of all processes
    norm       if the first update needs them: the norm of each gradient, and whether it is finite
    begin      compute the loss scale and the clipping factor; commit the step: it now runs to its end
    measure    if the rule needs norms (LAMB, LARS): compute the steps, and the norms of steps and weights
    trust      compute the trust ratios from these norms
    update     chunk by chunk: add up replicas, divide, clip, apply the rule
    share      send updated weights to the other processes, if they shard the optimizer state
    end        finish the step

A bucket is the gradients of one piece that processes exchange together, as views of a flat tensor.

All sums are in a fixed order, so that every layout and run gives the same bits. A new operation between the
averaging of gradients and their clipping belongs in `_reduce_and_measure_gradients` (of a whole gradient) or
`_prepare_gradients` (element by element). Random numbers: a draw of a piece has the key (seed, step,
micro-batch, replica) and its number in the model; stochastic rounding has the key (seed, step) and the number
of the parameter's slot. Another draw has to use the key (seed, step) and numbers from `len(slots)` on.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from .. import ir
from ..errors import RunError
from ..settings import Settings
from ..torch_private import ALIGNMENT
from ..update.group_update import Chunk, ParameterUpdate, UpdateStep, cut_into_chunks
from ..update.optimizer_rules import OWN_STEP
from .call import EngineCall
from .instances.all_reduce import AllReduce, leaf_nodes, tree_sum
from .instances.connections import Connections, Tag
from .mailbox import Mailbox
from .random_draws import hash_integers
from .state import State, Unit
from .train_state import has_same_bits

# Automatic loss scaling keeps half precision gradients large, but within their range: the loss scale doubles if
# at most `_SHARE` of the gradients' elements are large, and otherwise halves.
_LARGE = 0.125 * torch.finfo(torch.float16).max  # an element above it, before the division by the loss scale
_SHARE = 1e-7
_GRADIENT = attrgetter("gradient")
Work = Callable[[EngineCall, int], None]  # runs a row for a call, given the row's index
_StepKey = tuple[int, int]  # (ipu, parameter group) of the parameters of an UpdateStep


class Updates:
    """The functions that run the rows from "exchange" to "share": reduce gradients, update weights."""

    def __init__(
        self,
        plan: ir.Plan,
        settings: Settings,
        state: State,
        group: Connections | None,
        mail: Mailbox | None,
    ) -> None:
        self.plan, self.settings, self.state, self._group, self._mail = plan, settings, state, group, mail
        # What sums gradients over replicas that other engines run: the processes that have the same ipus, or devices.
        self._sums: Any = mail if plan.shifts and settings.training else None
        if group is not None:
            self._sums = AllReduce(group, Tag.SUMS, settings.counts.processes_of_part())
        self._optimizer: Any = settings.optimizer  # None in inference, which has no rows of updates
        self._needs_whole_gradients = settings.needs_whole_gradients
        self._members = {unit: settings.sharing_replicas(*unit) for unit in state.units}
        step, counts = settings.part, settings.counts
        # Factors by which the sums of gradients are divided for a mean.
        count = step.before + step.weight * counts.accumulation
        self._divisors = (count, counts.global_replicas) if settings.reduction == "mean" else (1, 1)
        self._slot_index = {slot.key: index for index, slot in enumerate(plan.partition.signature.slots)}
        self.buckets: dict[int, list[Bucket]] = {}  # by row
        if self._sums is not None:
            for row, task in enumerate(plan.tasks):
                if task.kind == "exchange" and not plan.is_elsewhere(row, settings.place):
                    self.buckets[row] = buckets_of(plan, task.piece, state)
        self._units: dict[_StepKey, list[Unit]] = {}
        self._chunks: dict[int, list[tuple[_StepKey, Chunk]]] = {}  # by ipu
        for unit in (unit for unit in state.units if unit in state.optimizer):
            step_key = state.ipu_of[unit.key], self._optimizer.group_of[unit.key]
            self._units.setdefault(step_key, []).append(unit)
        self._has_own_step = bool(self._units) and self._optimizer.kind == OWN_STEP
        if self._has_own_step:  # the first ipu updates all parameters
            self._units = {min(self._units): [unit for units in self._units.values() for unit in units]}
        for step_key, units in sorted(self._units.items()):
            # The gradients will have the weights' layouts.
            updates = [ParameterUpdate(state.weight(u), state.weight(u), state.optimizer[u]) for u in units]
            whole = [[(number, 0, 0) for number in range(len(units))]]
            chunks = whole if self._has_own_step else cut_into_chunks(updates)
            self._chunks.setdefault(step_key[0], []).extend((step_key, chunk) for chunk in chunks)
        # Values of the running step:
        self._norms: dict[Unit, Tensor] = {}  # of the gradients that this process measures
        self._counts: list[tuple[int, Tensor]] = []  # elements of a gradient; large, finite ones: [2]
        self._steps: dict[_StepKey, UpdateStep] = {}  # empty: a gradient overflowed, and no weight changes
        self._clipping_factor: Tensor | None = None  # of clipping by norm

    def bind(self, row: int) -> Work | None:
        """Return the function that runs a row; None: nothing is to be run."""
        kind, ipu = self.plan.tasks[row].kind, self.plan.tasks[row].ipu
        functions: dict[ir.TaskKind, Work] = {
            "exchange": partial(self._exchange_buckets, row),
            "norm": self._reduce_and_measure_gradients,
            "begin": self._begin_updates,
            "measure": partial(self._measure_norms_of_chunk, ipu),
            "trust": self._compute_trust_ratios,
            "update": partial(self._update_chunk, ipu),
            "share": self._broadcast_weights,
        }
        return functions.get(kind)

    def index_count(self, row: int) -> int:
        """Return how many indices a row has: one for each parameter or chunk of its ipu, or a single one."""
        task = self.plan.tasks[row]
        if task.index == "parameter":
            count = len(self.state.units)
            return min(count, 1) if self.state.has_queue else count
        return len(self._chunks.get(task.ipu, ())) if task.index == "chunk" else 1

    # ---- gradients -------------------------------------------------------------------------------------------

    def _exchange_buckets(self, row: int, *_: object) -> None:
        """All-reduce a row's buckets over all processes, into `flats[0]`; reduce-scatter sharded buckets."""
        for bucket in self.buckets[row]:
            self._divide_means(bucket.flats)
            if bucket.cuts is not None:
                self._sums.reduce_scatter(bucket.flats, bucket.cuts)
            else:
                self._sums.all_reduce(bucket.flats)

    def _divide_means(self, sums: Sequence[Tensor]) -> None:
        """Divide running means by the number of all replicas, so that their sum can't overflow."""
        if self.settings.reduction == "running":
            divide_(sums, self.settings.counts.global_replicas)

    def _reduce(self, call: EngineCall, parts: Sequence[ParameterUpdate]) -> None:
        """Add `part.others` to `part.gradient` of each part, in place, as a binary tree over replicas; divide the
        gradients by the loss scale, for means also by the number of micro-batches."""
        numbers = {len(part.others) for part in parts} - {0} if len(self.state.sums) > 1 else ()
        for others in numbers:
            rows = [(part.gradient, *part.others) for part in parts if len(part.others) == others]
            replicas = [list(sums) for sums in zip(*rows, strict=True)]
            for sums in replicas:
                self._divide_means(sums)
            tree_sum(leaf_nodes(replicas))
        divisor = call.results.loss_scale * self._divisors[0] * self._divisors[1]
        divide_([*map(_GRADIENT, parts)], divisor)

    def _reduce_and_measure_gradients(self, call: EngineCall, index: int) -> None:
        """Reduce the gradient of unit number `index`, in place; store its norm or counts of its elements. On an
        accelerator of all units, with few kernels. A complex gradient is real here, with a last dimension of 2
        (`ParameterUpdate`)."""
        numbers = slice(None) if self.state.has_queue else slice(index, index + 1)
        units = [unit for unit in self.state.units[numbers] if self.state.is_updated_here(unit.key)]
        gradients = {unit: self._parameter_update(unit) for unit in units}
        self._reduce(call, [*gradients.values()])
        # Each gradient counts once: if processes sum norms and counts, one of them counts unsharded parameters.
        owner, kept = self.state.train_state.owner, dict[torch.dtype, dict[Unit, Tensor]]()
        for unit, update in gradients.items():
            if not (owner or self._mail) or owner.get(unit.key, 0) == self.settings.counts.instance:
                # In float32 also for half precision, where the norm may be too large for the gradient's own dtype.
                dtype = torch.promote_types(update.gradient.dtype, torch.float32)
                kept.setdefault(dtype, {})[unit] = update.gradient
        for dtype, own in kept.items():
            for gradient in own.values() if self.settings.automatic_loss_scaling else ():
                is_large = gradient.abs() > _LARGE / call.results.loss_scale
                found = torch.stack([is_large.sum(), gradient.isfinite().sum()])
                self._counts.append((gradient.numel(), found))
            if self._optimizer.max_grad_norm < math.inf:
                self._norms.update(
                    zip(own, torch._foreach_norm([*own.values()], 2, dtype=dtype), strict=True)
                )

    def _parameter_update(self, unit: Unit, is_reduced: bool = False) -> ParameterUpdate:
        """Return the tensors of a unit's update. The gradient is the sum of the unit's first replica; the other
        replicas' sums are `others`, unless row "exchange" or "norm" has added them."""
        others: tuple[Tensor, ...] = ()
        if not is_reduced and self._sums is None and len(members := self._members[unit]) > 1:
            others = tuple(self.state.sums[replica][unit.key] for replica in members[1:])
        gradient, state = self.state.sums[unit.replica][unit.key], self.state.optimizer.get(unit, {})
        seed = self._rounding_seed(unit) if self.settings.stochastic_rounding else None
        return ParameterUpdate(self.state.weight(unit), gradient, state, others, seed)

    # ---- the updates -----------------------------------------------------------------------------------------

    def _begin_updates(self, call: EngineCall, _: int) -> None:
        """Compute the clipping factor and next loss factor, make the update of each ipu and group (for an own
        `step()` of all parameters), commit the step with all processes. With automatic loss scaling no weight changes
        if a gradient is not finite."""
        bound = self._optimizer.max_grad_norm
        if bound < math.inf:
            # torch's own epsilon. A factor of 1 changes no bits, so the host need not wait for the norm.
            self._clipping_factor = torch.clamp(bound / (self._total_norm() + 1e-6), max=1.0)
        if not self.settings.automatic_loss_scaling or self._adapt_loss_scale():
            assert call.hyper is not None
            for step_key, units in self._units.items():
                updates = [*map(self._parameter_update, units, repeat(self._needs_whole_gradients))]
                self._steps[step_key] = UpdateStep(self._optimizer, call.hyper.groups[step_key[1]], updates)
        peers = self._mail or self._group
        if peers is None:
            call.commit.commit()
        else:
            # All processes have all sums, and none updates if one of them is interrupted or fails.
            try:
                peers.commit_together(call.commit.commit)
            except Exception:
                call.commit.release()
                raise
        for step in self._steps.values():
            step.increment_counts()

    def _prepare_gradients(
        self, call: EngineCall, parts: Sequence[ParameterUpdate]
    ) -> Sequence[ParameterUpdate]:
        """Reduce gradients (unless row "norm" did) and clip them, in place; return `parts`. Record in the call whether
        the loss scale made gradients overflow, for a warning."""
        optimizer = self._optimizer
        if not self._needs_whole_gradients:
            self._reduce(call, parts)
        gradients = [*map(_GRADIENT, parts)]
        # The loss scale may make gradients overflow. (No check on an accelerator: the host would wait.)
        scale = call.results.loss_scale
        if scale != 1 and self.state.device.type == "cpu" and not self.settings.automatic_loss_scaling:
            bounds = (bound for gradient in gradients if gradient.numel() for bound in gradient.aminmax())
            if not all(map(math.isfinite, bounds)):
                call.overflows.append((self.state.train_state.random_state[1], scale))
        if self._clipping_factor is not None:
            torch._foreach_mul_(gradients, self._clipping_factor)
        if optimizer.max_grad_value < math.inf:
            torch._foreach_clamp_min_(gradients, -optimizer.max_grad_value)
            torch._foreach_clamp_max_(gradients, optimizer.max_grad_value)
        return parts

    def _total_norm(self) -> Tensor:
        """Return the norm of all gradients as torch.nn.utils.get_total_norm does, in the parameters' order."""
        ordered = sorted(self.state.all_units, key=lambda unit: (self._slot_index[unit.key], unit.replica))
        # Gradients that a peer measures count 0 here: with sharded state, and with ipus elsewhere, the norms are summed
        # over processes. (A norm of norms of parts would have other bits.)
        slots = self.plan.partition.signature.slots
        dtypes = (slots[self._slot_index[unit.key]].dtype for unit in ordered)
        types = [torch.promote_types(dtype, torch.float32).to_real() for dtype in dtypes]
        found = [
            self._norms[unit]
            if unit in self._norms
            else torch.zeros((), dtype=dtype, device=self.state.device)
            for unit, dtype in zip(ordered, types, strict=True)
        ]
        return torch.linalg.vector_norm(self._sum_over_owners(torch.stack(found)))

    def _sum_over_owners(self, values: Tensor) -> Tensor:
        """Sum values over all processes, in place, if each has the gradients of some parameters; return `values`."""
        if self._mail is not None:
            self._mail.sum(values)
        elif self.state.train_state.owner:
            self._sums.all_reduce([values])
        return values

    def _adapt_loss_scale(self) -> bool:
        """Set the loss factor of the next step; return whether all gradients of this step are finite."""
        total = sum(count for count, _ in self._counts)
        # The host waits once for an accelerator.
        found = [counts for _, counts in self._counts]
        large, finite = torch.stack(found).sum(0).tolist() if found else (0, 0)
        seen = self._sum_over_owners(torch.tensor([total, large, total - finite]))
        elements, large, not_finite = seen.tolist()
        self.state.train_state.loss_factor.mul_(2 if not not_finite and large <= _SHARE * elements else 0.5)
        return not not_finite

    def _rounding_seed(self, unit: Unit) -> int | None:
        """Return the seed of a parameter's stochastic rounding in this step; None: float32 is not rounded."""
        if self.state.weight(unit).dtype == torch.float32:
            return None
        return hash_integers(hash_integers(*self.state.train_state.random_state), self._slot_index[unit.key])

    def _measure_norms_of_chunk(self, ipu: int, call: EngineCall, index: int) -> None:
        step_key, chunk = self._chunks[ipu][index]
        if step := self._steps.get(step_key):
            step.measure_norms(self._prepare_gradients(call, step.views(chunk)))

    def _compute_trust_ratios(self, *_: object) -> None:
        for step in self._steps.values():
            step.compute_trust_ratios()

    def _update_chunk(self, ipu: int, call: EngineCall, index: int) -> None:
        step_key, chunk = self._chunks[ipu][index]
        if step := self._steps.get(step_key):
            views = step.views(chunk)
            if step.trust_ratios is None:
                views = self._prepare_gradients(call, views)
            if self._has_own_step:
                self._run_own_step(call, self._units[step_key], views)
            else:
                step.apply(views)

    def _run_own_step(
        self, call: EngineCall, units: Sequence[Unit], updates: Sequence[ParameterUpdate]
    ) -> None:
        """Run the optimizer's own `step()`, which may give parameters other memory. If it fails before it has written,
        the weights are not lost: then raise RunError."""
        train_state = self.state.train_state
        weights = [train_state.parameters()[unit.key].detach() for unit in units]
        with torch.inference_mode(False):  # else new states and weights could not be written outside of it
            gradients = {
                unit.key: (torch.view_as_complex(g) if w.is_complex() else g).to(w.dtype, copy=True)
                for unit, g, w in zip(units, (x.gradient for x in updates), weights, strict=True)
            }
            # A write to `parameter.data` leaves no other trace than the bits.
            before, marks = [weight.clone() for weight in weights], train_state.marks_of_optimizer()
            try:
                train_state.run_own_step(gradients)
            except Exception as error:
                is_same = (
                    all(map(has_same_bits, before, weights)) and marks == train_state.marks_of_optimizer()
                )
                if self._sums is not None or not is_same:  # peers may have updated
                    raise
                call.commit.release()
                raise RunError(
                    f"the optimizer's step() failed: {type(error).__name__}: {error}\n"
                    "  the weights are those after the last finished update; the executor can be called again"
                ) from error
            self.state.bind(call.hyper)

    def _broadcast_weights(self, *_: object) -> None:
        """Send the weights that this process has updated to all peers; receive those that peers updated."""
        units = [unit for unit in self.state.units if unit.key in self.state.train_state.owner]
        weights = [self.state.weight(unit) for unit in units]
        owners = [self.state.train_state.owner[unit.key] for unit in units]
        self._sums.broadcast_by_owners(weights, owners)

    def clear_step(self) -> None:
        """Drop the gradient sums (those in buckets keep their memory), norms and counts of a step."""
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


# ---- buckets -------------------------------------------------------------------------------------------------


class Bucket:
    """Gradients of one piece and one dtype, of parameters (`keys`) that the local replicas `members` share.

    `flats`, 1-d, are the gradient sums of those that this engine runs, of which `state.sums` become views; they are
    summed into `flats[0]`. `cuts`: where the shard of each process begins, and the end; None: not sharded.
    """

    def __init__(
        self, units: Sequence[Unit], members: Sequence[int], dtype: torch.dtype, state: State
    ) -> None:
        is_sharded, step = units[0].key in state.train_state.owner, max(1, ALIGNMENT // dtype.itemsize)
        cuts, starts = [0], dict[Unit, int]()
        for owner in range(state.settings.counts.instances) if is_sharded else [None]:
            end = cuts[-1]
            for unit in (unit for unit in units if state.train_state.owner.get(unit.key) == owner):
                starts[unit] = end
                end += -(-state.weight(unit).numel() // step) * step
            cuts.append(end)
        self.keys, self.cuts = tuple(unit.key for unit in starts), cuts if is_sharded else None
        own = [replica for replica in members if state.settings.runs_replica(replica)]
        self.flats = [torch.zeros(cuts[-1], dtype=dtype, device=state.device) for _ in own]
        # `Updates` reads the sum, which is in `flats[0]`, as that of the first member.
        for replica, flat in zip((members[0], *own), (self.flats[0], *self.flats), strict=True):
            for unit, start in starts.items():
                weight = state.weight(unit)
                state.sums[replica][unit.key] = flat.as_strided(weight.shape, weight.stride(), start)


def buckets_of(plan: ir.Plan, piece: int, state: State) -> list[Bucket]:
    """Return the buckets for the gradients of piece number `piece`; set `state.sums` to views of them."""
    settings, writes = state.settings, plan.partition.pieces[piece].writes
    results = plan.partition.signature.results
    keys = {result.key for result in results if result.kind == "gradient" and result.name in writes}
    kinds: dict[tuple[tuple[int, ...], torch.dtype, bool], list[Unit]] = {}
    for unit in (unit for unit in state.units if unit.key in keys):
        assert settings.optimizer is not None
        dtype = settings.optimizer.sum_dtype(state.weight(unit).dtype)
        kind = settings.sharing_replicas(unit.key, unit.replica), dtype, unit.key in state.train_state.owner
        kinds.setdefault(kind, []).append(unit)
    return [Bucket(units, members, dtype, state) for (members, dtype, _), units in kinds.items()]
