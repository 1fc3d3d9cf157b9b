"""The end of a step: from gradient sums to new weights. The rows:

    exchange   all-reduce buckets of gradient sums over the replicas of all processes
    update     sum replicas, prepare the gradients (`gradients.py`), commit the step: it now runs to its end; run the
               optimizer's `step()` (`optimizer_step.py`)
    share      send updated weights to the other processes, if they shard the optimizer state

A bucket is the gradients of one piece that processes exchange together, as views of a flat tensor. All sums are in a
fixed order, so that every layout and run gives the same bits.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ir
from ..errors import RunError
from ..settings import Settings
from ..torch_private import ALIGNMENT
from .call import Commit, EngineCall
from .gradients import IntraOpThreads, StepGradients, divide_, gradient_work
from .instances.all_reduce import AllReduce, leaf_nodes, tree_sum
from .instances.connections import Connections, Tag
from .mailbox import Mailbox
from .optimizer_step import run_optimizer_step
from .random_draws import hash_integers
from .state import State, Unit

Work = Callable[[EngineCall, int], None]  # runs a row for a call, given the row's index


class PlaceGradients(NamedTuple):
    """What a place brings to the one run of `step()` in its process."""

    state: State
    commit: Commit
    gradients: dict[str, Tensor]  # by canonical name; of replica 0's places


class Updates:
    """The functions that run the rows from "exchange" to "share": reduce gradients, update weights."""

    def __init__(
        self,
        plan: ir.Plan,
        settings: Settings,
        state: State,
        group: Connections | None,
        mail: Mailbox | None,
        threads_per_operation: int,
    ) -> None:
        self._threads = threads_per_operation
        self.settings, self.state, self._group, self._mail = settings, state, group, mail
        # What sums gradients over replicas that other engines run: the processes that have the same ipus, or devices.
        self._sums: Any = mail if plan.shifts and settings.training else None
        if group is not None:
            self._sums = AllReduce(group, Tag.SUMS, settings.counts.processes_of_part())
        self._gradient_work = gradient_work(settings)
        optimizer = settings.optimizer
        types = {} if optimizer is None else optimizer.state_types
        self._half_states = {name: dtype for name, dtype in types.items() if dtype != torch.float32}
        self._rows, self._runs_step = plan.tasks, settings.runs_replica(0)
        slots = plan.partition.signature.slots
        self._slot_index = {slot.key: index for index, slot in enumerate(slots)}
        ordered = sorted(state.all_units, key=lambda unit: (self._slot_index[unit.key], unit.replica))
        dtypes = (slots[self._slot_index[unit.key]].dtype for unit in ordered)
        # In float32 also for half precision, where a norm may be too large for the gradient's own dtype.
        norm_types = [torch.promote_types(dtype, torch.float32).to_real() for dtype in dtypes]
        self._norm_types = dict(zip(ordered, norm_types, strict=True))
        self.buckets: dict[int, list[Bucket]] = {}  # by row
        if self._sums is not None:
            for row, task in enumerate(plan.tasks):
                if task.kind == "exchange" and not plan.is_elsewhere(row, settings.place):
                    self.buckets[row] = buckets_of(plan, task.piece, state)

    def bind(self, row: int) -> Work | None:
        """Return the function that runs a row; None: nothing is to be run."""
        functions: dict[ir.TaskKind, Work] = {
            "exchange": partial(self._exchange_buckets, row),
            "update": self._update_weights,
            "share": self._broadcast_weights,
        }
        return functions.get(self._rows[row].kind)

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

    def _sum_replicas(self) -> dict[Unit, Tensor]:
        """Return the gradients that this place updates, summed over their replicas, as a binary tree, into the first
        replica's."""
        settings, sums = self.settings, self.state.sums
        units = [unit for unit in self.state.units if self.state.is_updated_here(unit.key)]
        if self._sums is None and len(sums) > 1:  # else row "exchange" has summed them
            members = {unit: settings.sharing_replicas(*unit) for unit in units}
            for count in {len(own) for own in members.values()} - {1}:
                rows = [
                    [sums[r][unit.key] for r in own] for unit, own in members.items() if len(own) == count
                ]
                replicas = [list(column) for column in zip(*rows, strict=True)]
                for column in replicas:
                    self._divide_means(column)
                tree_sum(leaf_nodes(replicas))
        return {unit: sums[unit.replica][unit.key] for unit in units}

    def _prepare_gradients(self, call: EngineCall, gradients: Mapping[Unit, Tensor]) -> StepGradients:
        """Run the functions of the list on gradients, in place."""
        owner, instance = self.state.train_state.owner, self.settings.counts.instance
        is_alone = not (owner or self._mail)
        step = StepGradients(
            {u: torch.view_as_real(g) if g.is_complex() else g for u, g in gradients.items()},
            self._norm_types,
            call.results.loss_scale,
            self._threads,
            self._sum_over_processes,
            lambda unit: is_alone or owner.get(unit.key, 0) == instance,
        )
        for work in self._gradient_work:
            work(step)
        return step

    def _sum_over_processes(self, values: Tensor) -> Tensor:
        """Sum values over all processes, in place, if each has the gradients of some parameters; return `values`."""
        if self._mail is not None:
            self._mail.sum(values)
        elif self.state.train_state.owner:
            self._sums.all_reduce([values])
        return values

    # ---- the update ------------------------------------------------------------------------------------------

    def _update_weights(self, call: EngineCall, _: int) -> None:
        """Prepare the gradients, commit the step with all processes, and run the optimizer's `step()`."""
        with IntraOpThreads(call.threads):
            gradients = self._sum_replicas()
            step = self._prepare_gradients(call, gradients)
            self._commit(call, step)
            if step.is_applied:
                named = self._by_name(gradients) if self._runs_step else {}
                part, run = PlaceGradients(self.state, call.commit, named), partial(self._run_step, call)
                run([part]) if self._mail is None else self._mail.run_once(part, run)

    def _commit(self, call: EngineCall, step: StepGradients) -> None:
        """Commit the step with all processes: from now on it runs to its end."""
        train_state, peers = self.state.train_state, self._mail or self._group
        if step.has_overflowed:
            call.overflows.append((train_state.random_state[1], step.loss_scale))
        if peers is None:
            call.commit.commit()
        else:
            # All processes have all sums, and none updates if one of them is interrupted or fails.
            try:
                peers.commit_together(call.commit.commit)
            except Exception:
                call.commit.release()
                raise
        if self.settings.automatic_loss_scaling:
            train_state.loss_factor.mul_(step.loss_factor)

    def _by_name(self, gradients: Mapping[Unit, Tensor]) -> dict[str, Tensor]:
        """Return the gradients of the optimizer's parameters by name: with replica groups a row for each."""
        held = self.state.train_state.parameters()
        found = {unit.key: gradient for unit, gradient in gradients.items() if unit.key in held}
        for key in self.settings.replica_groups.keys() & found.keys():
            rows = self.settings.replica_groups[key].rows
            firsts = (self.settings.sharing_replicas(key, replica)[0] for replica in rows)
            found[key] = torch.stack([gradients[Unit(key, first)] for first in firsts])
        return found

    def _run_step(self, call: EngineCall, parts: Sequence[PlaceGradients]) -> None:
        """Run the optimizer's `step()` on the gradients of all places of this process, and copy the new weights to
        places that have copies. If it fails before it has written, release the commits: the weights are not lost."""
        train_state = self.state.train_state
        gradients = {name: value for part in parts for name, value in part.gradients.items()}
        assert call.hyper is not None
        seeds: dict[str, int] = {}
        if self.settings.stochastic_rounding:
            of_step = hash_integers(*train_state.random_state)
            seeds = {name: hash_integers(of_step, self._slot_index[name]) for name in gradients}
        optimizer, parameters = train_state.optimizer, train_state.parameters()
        try:
            run_optimizer_step(optimizer, parameters, gradients, call.hyper, self._half_states, seeds)
        except RunError:
            for part in parts if self.settings.counts.processes == 1 else ():  # else peers have updated
                part.commit.release()
            raise
        for part in parts:
            part.state.follow_parameters()

    def _broadcast_weights(self, *_: object) -> None:
        """Send the weights that this process has updated to all peers; receive those that peers updated."""
        units = [unit for unit in self.state.units if unit.key in self.state.train_state.owner]
        weights = [self.state.weight(unit) for unit in units]
        owners = [self.state.train_state.owner[unit.key] for unit in units]
        self._sums.broadcast_by_owners(weights, owners)

    def clear_step(self) -> None:
        """Drop the gradient sums of a step; those in buckets keep their memory."""
        if not self.buckets:
            for sums in self.state.sums:
                sums.clear()


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
