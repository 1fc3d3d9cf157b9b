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
from itertools import chain

import torch
from torch import Tensor

from .. import ir
from ..errors import RunError
from ..settings import Settings
from ..torch_private import ALIGNMENT
from .call import ALONE, EngineCall
from .devices import join
from .gradients import IntraOpThreads, StepGradients, divide_, gradient_work
from .instances.all_reduce import AllReduce, leaf_nodes, tree_sum
from .instances.connections import Connections, Tag
from .mailbox import ProcessMailbox
from .optimizer_step import run_optimizer_step
from .random_draws import hash_integers
from .state import DeviceTensors, Unit

Work = Callable[[EngineCall, int], None]  # runs a row for a call, given the row's index


class Updates:
    """The functions that run the rows from "exchange" to "share": reduce gradients, update weights.

    The gradients of a parameter are summed on the device of its first replica, and `step()` runs once for all devices,
    whose `states` then copy the new weights where they have copies.
    """

    def __init__(
        self,
        plan: ir.Plan,
        settings: Settings,
        states: Sequence[DeviceTensors],
        group: Connections | None,
        mail: ProcessMailbox | None,
        threads_per_operation: int,
    ) -> None:
        self._threads = threads_per_operation
        self.settings, self.states, self._mail = settings, states, mail
        self.peers = mail or group or ALONE
        self._train_state = states[0].train_state
        # What sums gradients over the processes that have the same ipus.
        self._sums: AllReduce | None = None
        if group is not None:
            self._sums = AllReduce(group, Tag.SUMS, settings.counts.processes_of_part())
        self._gradient_work = gradient_work(settings)
        optimizer = settings.optimizer
        types = {} if optimizer is None else optimizer.state_types
        self._half_states = {name: dtype for name, dtype in types.items() if dtype != torch.float32}
        self._rows = plan.tasks
        slots = plan.partition.signature.slots
        self._slot_index = {slot.key: index for index, slot in enumerate(slots)}
        # By parameter and replica, the state of its device; and the parameters that this process updates.
        self._units = [unit for state in states if 0 in state.where.replicas for unit in state.units]
        self._state_of = {
            (unit.key, replica): state
            for state in states
            for unit in state.units
            for replica in state.where.replicas
        }
        ordered = sorted(states[0].all_units, key=lambda unit: (self._slot_index[unit.key], unit.replica))
        dtypes = (slots[self._slot_index[unit.key]].dtype for unit in ordered)
        # In float32 also for half precision, where a norm may be too large for the gradient's own dtype.
        norm_types = [torch.promote_types(dtype, torch.float32).to_real() for dtype in dtypes]
        self._norm_types = dict(zip(ordered, norm_types, strict=True))
        self.buckets: dict[int, list[Bucket]] = {}  # by row
        for row, task in enumerate(plan.tasks):
            here = [state for state in states if not plan.is_elsewhere(row, state.where.place)]
            if task.kind == "exchange" and here:
                self.buckets[row] = buckets_of(plan, task.piece, here)

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
        """Sum a row's buckets over all replicas, into `flats[0]`; reduce-scatter sharded buckets."""
        for bucket in self.buckets[row]:
            self._divide_means(bucket.flats)
            if self._sums is None:
                tree_sum(leaf_nodes([flat] for flat in bucket.flats))
            elif bucket.cuts is not None:
                self._sums.reduce_scatter(bucket.flats, bucket.cuts)
            else:
                self._sums.all_reduce(bucket.flats)

    def _divide_means(self, sums: Sequence[Tensor]) -> None:
        """Divide running means by the number of all replicas, so that their sum can't overflow."""
        if self.settings.reduction == "running":
            divide_(sums, self.settings.counts.global_replicas)

    def _sum_replicas(self) -> dict[Unit, Tensor]:
        """Return the gradients that this process updates, summed over their replicas, as a binary tree, into the first
        replica's."""
        units = [unit for unit in self._units if self.states[0].is_updated_here(unit.key)]
        if self.settings.counts.replicas > 1 and not self.buckets:  # else row "exchange" has summed them
            groups: dict[tuple[int, DeviceTensors], list[tuple[str, tuple[int, ...]]]] = {}
            for unit in units:
                members = self.settings.sharing_replicas(*unit)
                groups.setdefault((len(members), self._state_of[unit]), []).append((unit.key, members))
            for (count, state), pairs in groups.items():
                columns = [[state.sums[members[i]][key] for key, members in pairs] for i in range(count)]
                for column in columns if count > 1 else ():
                    self._divide_means(column)
                tree_sum(leaf_nodes(columns))
        return {unit: self._state_of[unit].sums[unit.replica][unit.key] for unit in units}

    def _prepare_gradients(self, call: EngineCall, gradients: Mapping[Unit, Tensor]) -> StepGradients:
        """Run the functions of the list on gradients, in place."""
        owner, instance = self._train_state.owner, self.settings.counts.instance
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
        """Sum values over all processes, in place, if each process has the gradients of only some parameters; return
        `values`."""
        if self._mail is not None:
            self._mail.sum(values)
        elif self._sums is not None and self._train_state.owner:
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
                self._run_step(call, self._gradients_by_name(gradients))

    def _commit(self, call: EngineCall, step: StepGradients) -> None:
        """Commit the step with all processes: from now on it runs to its end."""
        train_state = self._train_state
        if step.has_overflowed:
            call.overflows.append((train_state.random_state[1], step.loss_scale))
        # All processes have all sums, and none updates if one of them is interrupted or fails.
        try:
            self.peers.commit_together(call.commit.commit)
        except Exception:
            call.commit.release()
            raise
        if len(self.states) > 1:  # a device may still copy weights that `step()` overwrites
            join(state.device for state in self.states)
        if self.settings.automatic_loss_scaling:
            train_state.loss_factor.mul_(step.loss_factor)

    def _gradients_by_name(self, gradients: Mapping[Unit, Tensor]) -> dict[str, Tensor]:
        """Return the gradients of the optimizer's parameters by name: with replica groups a row for each. One that the
        program has replaced in the model has none."""
        held = self._train_state.parameters()
        by_name = {
            u.key: g for u, g in gradients.items() if self._state_of[u].has_bound(u.key, held.get(u.key))
        }
        for key in self.settings.replica_groups.keys() & by_name.keys():
            rows = self.settings.replica_groups[key].rows
            firsts = (self.settings.sharing_replicas(key, replica)[0] for replica in rows)
            by_name[key] = torch.stack([gradients[Unit(key, first)] for first in firsts])
        return by_name

    def _run_step(self, call: EngineCall, gradients: Mapping[str, Tensor]) -> None:
        """Run the optimizer's `step()`, and copy the new weights to devices that have copies. If it fails before it has
        written, release the commit: the weights are not lost."""
        train_state = self._train_state
        assert call.hyper is not None
        seeds: dict[str, int] = {}
        if self.settings.stochastic_rounding:
            of_step = hash_integers(*train_state.random_state)
            seeds = {name: hash_integers(of_step, self._slot_index[name]) for name in gradients}
        optimizer, parameters = train_state.optimizer, train_state.parameters()
        try:
            run_optimizer_step(optimizer, parameters, gradients, call.hyper, self._half_states, seeds)
        except RunError:
            if self.settings.counts.processes == 1:  # else peers have updated
                call.commit.release()
            raise
        for state in self.states:
            state.follow_parameters()

    def _broadcast_weights(self, *_: object) -> None:
        """Send the weights that this process has updated to all peers; receive those that peers updated."""
        assert self._sums is not None
        units = [unit for unit in self._units if unit.key in self._train_state.owner]
        weights = [self._state_of[unit].weight(unit) for unit in units]
        owners = [self._train_state.owner[unit.key] for unit in units]
        self._sums.broadcast_by_owners(weights, owners)

    def end_step(self) -> None:
        """Count a step, and drop its gradient sums, unless another plan ends it."""
        if self.settings.step_part.ends_step:
            self._train_state.count_step(self.settings.training)
            self.clear_step()

    def clear_step(self) -> None:
        """Drop the gradient sums of a step; those in buckets keep their memory."""
        if not self.buckets:
            for sums in chain.from_iterable(state.sums for state in self.states):
                sums.clear()


# ---- buckets -------------------------------------------------------------------------------------------------


class Bucket:
    """Gradients of one piece and one dtype, of parameters (`keys`) that some local replicas share.

    `flats`, 1-d, are the gradient sums of these replicas, each on its device, of which `DeviceTensors.sums` become
    views; they are summed into `flats[0]`. `cuts`: where the shard of each process begins, and the end; None: not
    sharded.
    """

    def __init__(
        self, units: Sequence[Unit], members: Mapping[int, DeviceTensors], dtype: torch.dtype
    ) -> None:
        first = next(iter(members.values()))
        owners, step = first.train_state.owner, max(1, ALIGNMENT // dtype.itemsize)
        is_sharded, cuts, starts = units[0].key in owners, [0], dict[Unit, int]()
        for owner in range(first.settings.counts.instances) if is_sharded else [None]:
            end = cuts[-1]
            for unit in (unit for unit in units if owners.get(unit.key) == owner):
                starts[unit] = end
                end += -(-first.weight(unit).numel() // step) * step
            cuts.append(end)
        self.keys, self.cuts = tuple(unit.key for unit in starts), cuts if is_sharded else None
        self.flats = [torch.zeros(cuts[-1], dtype=dtype, device=state.device) for state in members.values()]
        for (replica, state), flat in zip(members.items(), self.flats, strict=True):
            for unit, start in starts.items():
                weight = first.weight(unit)
                state.sums[replica][unit.key] = flat.as_strided(weight.shape, weight.stride(), start)


def buckets_of(plan: ir.Plan, piece: int, states: Sequence[DeviceTensors]) -> list[Bucket]:
    """Return the buckets for the gradients of piece number `piece`, of the devices that have one place's ipus; set
    `DeviceTensors.sums` to views of them."""
    settings, writes = states[0].settings, plan.partition.pieces[piece].writes
    results = plan.partition.signature.results
    keys = {result.key for result in results if result.kind == "gradient" and result.name in writes}
    groups: dict[tuple[tuple[int, ...], torch.dtype, bool], list[Unit]] = {}
    for unit in (unit for unit in states[0].units if unit.key in keys):
        assert settings.optimizer is not None
        dtype = settings.optimizer.sum_dtype(states[0].weight(unit).dtype)
        is_sharded = unit.key in states[0].train_state.owner
        groups.setdefault((settings.sharing_replicas(*unit), dtype, is_sharded), []).append(unit)
    state_of = {replica: state for state in states for replica in state.where.replicas}
    return [
        Bucket(units, {replica: state_of[replica] for replica in members}, dtype)
        for (members, dtype, _), units in groups.items()
    ]
