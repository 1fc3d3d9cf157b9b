"""Runs a plan: one call takes a combined batch, runs all device iterations, and returns the results.

A step is finished completely or not at all: after an error or an interrupt the weights, buffers and optimizer state are
those of the last finished step.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from ..errors import Error
from ..ir import Plan
from ..places import check_order
from ..profile import KeptBytes
from ..settings import Hyper, Settings
from . import devices
from .backends.eager import Code, build
from .call import ALONE, EngineCall, Results
from .devices import with_aligned_micro_batches
from .instances.all_reduce import AllReduce, leaf_nodes, tree_sum
from .instances.connections import Tag
from .instances.consistency import Fingerprint, fingerprint_of_plan, hash_weights, rates_as_texts
from .instances.process_group import group_of_size
from .mailbox import ProcessMailbox
from .ready_queue import ReadyQueue
from .recorder import Recorder
from .row_functions import RowFunctions, Transfers
from .state import DeviceTensors, all_devices
from .train_state import TrainState, write
from .updating import Updates

logger = logging.getLogger("popengine")

_OVERFLOW = (
    "gradients of step %d hold an infinity or a NaN, and so will the weights: the loss scale is %g\n"
    "  fix: a smaller loss_scaling; or options.Training.setAutomaticLossScaling(True), which leaves such updates out\n"
    "  where it is made: options.Precision.enableFloatingPointExceptions(True) names the operation"
)


class Engine:
    """A loaded plan, and the threads that run its calls, for each device of this process. Engines of an executor share
    their `train_state`."""

    def __init__(
        self,
        plan: Plan,
        settings: Settings,
        train_state: TrainState,
        find_constants: Callable[[], Mapping[str, Tensor]] = dict,
        mail: ProcessMailbox | None = None,
    ) -> None:
        self.plan, self.settings, self.train_state = plan, settings, train_state
        if plan.places:
            check_order(plan)
        counts, on_devices = settings.counts, all_devices(plan, settings)
        cores = [devices.core_count(where.device.type) for where in on_devices]
        per_operation = [threads_per_operation(plan, settings, count) for count in cores]
        several = settings.training and counts.instances > 1
        self._group = group_of_size(counts.processes) if several or counts.parts > 1 else None
        self._hash_of_plan: Mapping[str, str] = {}
        if self._group is not None:
            if self._group.rank != counts.process:
                raise Error(
                    f"the options are those of instance {counts.process}, and this is instance {self._group.rank}\n"
                    "  fix: let each instance load the file that it has saved; or use popdist.Checkpoint, which any"
                    " number of instances can restore"
                )
            what = f"compilation{' for other inputs' if train_state.engines else ''}"
            weights = {} if train_state.engines else train_state.find_weights()
            seed, _ = train_state.random_state
            compared = fingerprint_of_plan(plan, settings, weights, seed)
            if plan.places:  # the bits of a replica depend on it
                name = "threads per operation, which torch.set_num_threads() decides"
                compared = {**compared, "options": {**compared["options"], name: str(per_operation[0])}}
            self._group.barrier(what, self._with_changes(compared))
            # Compared at each call: for other values that forward reads there are other plans.
            self._hash_of_plan = compared["plan"]
        if mail is None and self._group is not None and plan.places:
            mail = ProcessMailbox(self._group, plan, settings)
        devices.keep_freed_memory(is_part=counts.parts > 1)
        # Threads refer to the state and not to the engine: they end when nothing else refers to the engine.
        states = [DeviceTensors(plan, settings, train_state, where, find_constants) for where in on_devices]
        self.state = states[0]  # of the first device
        if self._group is not None:
            if not train_state.engines:
                train_state.confirm(self.state.bound_parameters())
            if (train_state.owner or counts.parts > 1) and train_state.shared is None:
                train_state.shared = self._group, counts, self._group.publish_state(train_state)
            train_state.confirm_changes()
        train_state.engines += 1
        self._has_warned = False  # of overflowing gradients
        summing = self._group if several else None  # sums gradients
        updates, sent = Updates(plan, settings, states, summing, mail, max(per_operation)), Transfers()
        self.workers = [
            RowFunctions(state, self._load_pieces(state), updates, summing, mail, sent) for state in states
        ]
        counts_of_cores = [count // threads for count, threads in zip(cores, per_operation, strict=True)]
        self.queue = ReadyQueue(self.workers, counts_of_cores, per_operation)
        self._wake_peers = (mail or self._group or ALONE).abort
        self._close = weakref.finalize(self, self.queue.close)

    def _load_pieces(self, state: DeviceTensors) -> Sequence[Code]:
        if self.settings.is_eager:
            return [build(piece, device=state.device) for piece in self.plan.partition.pieces]
        from .backends import inductor  # slow to import

        return inductor.load_pieces(self.plan.partition, state.device)

    def close(self) -> None:
        """End the threads. Peers can read this process's state as long as anything refers to it, and until the next
        barrier."""
        train_state = self.train_state
        train_state.engines -= 1
        if train_state.shared is not None and not train_state.engines:
            train_state.shared[0].keep_state(train_state)
        self._close()

    # ---- running -----------------------------------------------------------------------------------------

    def run(self, inputs: Sequence[Tensor], hyper: Hyper | None, recorder: Recorder | None = None) -> Results:
        """Run one call, all device iterations, on combined batches, and return its results. Warn once of overflowing
        gradients. Engines of one `TrainState` run one call at a time.

        Raises: Error, if a task or a peer failed: all state is that after the updates that were finished before;
        UnrecoverableError, if an update failed halfway (the weights are lost), or a peer has ended
        """
        if recorder is not None:
            recorder.begin_call()
        train_state, commit = self.train_state, self.train_state.commit
        commit.settle()
        for worker in self.workers:
            worker.state.bind()
        name = f"call {commit.complete_calls + 1} of the run"
        if self._group is not None:
            self._group.barrier(name, self._with_changes(self._call_fingerprint(hyper, inputs)))
            train_state.confirm_changes()
        steps = self.settings.counts.iterations if self.settings.training else 1
        wait, threads = self.queue.wait_until_idle, torch.get_num_threads()
        results = Results(self.plan.partition.signature, self.settings, self.state.device, len(inputs))
        call = EngineCall(self._split_into_micro_batches(inputs), results, hyper, threads, commit)
        commit.begin(name, steps, wait, self._wake_peers)
        try:
            self.queue.start(call, recorder)
            wait()
        finally:
            commit.settle()  # returns at once, except after Ctrl-C
            if self._group is not None:
                train_state.confirm(self.state.bound_parameters())
                train_state.confirm_changes()
            if recorder is not None:
                recorder.end_call(commit.done, failed=commit.done < steps)
        if call.failure is not None:
            raise call.failure
        if call.overflows and not self._has_warned:
            self._has_warned = True
            logger.warning(_OVERFLOW, *min(call.overflows))
        return results

    def _split_into_micro_batches(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return each batch as [turns, groups, micro-batch, ...], aligned for the CPU."""
        counts = self.settings.counts
        batches = []
        for value in inputs:
            rows = (counts.iterations * counts.accumulation, counts.groups, -1, *value.shape[1:])
            batch = value.reshape(rows) if value.dim() else value.expand(1, 1)
            is_read_here = batch.is_cpu and any(worker.state.device.type == "cpu" for worker in self.workers)
            batches.append(with_aligned_micro_batches(batch) if is_read_here else batch)
        return batches

    def _call_fingerprint(self, hyper: Hyper | None, inputs: Sequence[Tensor]) -> Fingerprint:
        """Return the fingerprint of a call, with hashes of weights that the program has written. It must be equal in
        all processes; the hash of the batch must be equal in the processes of a replica."""
        seed, step = self.train_state.random_state
        factor = repr(float(self.train_state.loss_factor))
        texts: dict[str, Mapping[str, str]] = {
            "rates": {} if hyper is None else rates_as_texts(hyper),
            "state": {"updates so far": str(step), "loss scaling factor": factor},
            "seed": {"random seed": str(seed)},
            "input": {str(index): f"{tuple(value.shape)}" for index, value in enumerate(inputs)},
            "plan": self._hash_of_plan,
        }
        counts = self.settings.counts
        if written := self.train_state.unconfirmed(self.state.bound_parameters()):
            texts[f"value@part {counts.part}" if counts.parts > 1 else "value"] = hash_weights(written)
        if counts.parts > 1:
            numbered = {str(number): value for number, value in enumerate(inputs)}
            texts[f"batch@replica {counts.instance}"] = hash_weights(numbered)
        return texts

    def _with_changes(self, texts: Fingerprint) -> Fingerprint:
        """Return a fingerprint with texts of the program's changes of weights and optimizer state since the latest
        call."""
        counts, changes = self.settings.counts, {"optimizer state": self.train_state.optimizer_changes()}
        if counts.parts > 1:
            changes[f"value@replica {counts.instance}"] = self.train_state.writes()
        return {**changes, **texts}

    # ---- state of all processes ------------------------------------------------------------------------------

    def average_buffers(self) -> None:
        """Set the floating point buffers that forward changes to their means over all replicas of all processes."""
        train_state, counts = self.train_state, self.settings.counts
        train_state.commit.settle()
        train_state.commit.check_not_lost()
        results = [r for r in self.plan.partition.signature.results if r.kind == "buffer"]
        statistics = [result.key for result in results if result.dtype.is_floating_point]
        if not statistics:
            return
        present = train_state.find_weights()
        keys = [key for key in statistics if key not in train_state.elsewhere]
        with torch.no_grad():
            flats = train_state.buffers.flat_doubles(present, keys)
        if counts.instances == 1:
            tree_sum(leaf_nodes([flat] for flat in flats))
        else:
            group = group_of_size(counts.processes)  # an engine for inference has none of its own
            what, part = "the mean of running statistics", counts.part
            reduction = AllReduce(group, Tag.BUFFERS, counts.processes_of_part())
            fingerprint = {f"buffers@part {part}": {key: str(tuple(present[key].shape)) for key in keys}}
            group.barrier(what, fingerprint, lambda: reduction.all_reduce(flats))
        replicas_of_all = counts.instances * train_state.buffers.replicas
        means = (flats[0] / replicas_of_all).split([present[key].numel() for key in keys])
        for key, mean in zip(keys, means, strict=True):
            write(present[key], mean.view(present[key].shape))
        train_state.buffers.set_all({key: present[key] for key in keys})

    def memory(self, replica: int, ipu: int) -> KeptBytes:
        """Return the bytes that an ipu's weights, gradient sums and states take in a memory of its own."""
        states = [worker.state for worker in self.workers if replica in worker.state.where.replicas]
        state = next(s for s in states if ipu in self.plan.slots_at(s.where.place))
        copies = [task for task in self.plan.tasks if task.ipu == ipu and task.index == "step"]
        received = (x.names for task in copies for x in task.instructions if x.kind == "receive")
        held, settings = {*self.plan.slots_of[ipu], *chain(*received)}, state.settings
        slots = [slot for slot in state.plan.partition.signature.slots if slot.name in held]
        weights = sum(slot.nbytes for slot in slots if slot.role == "parameter")
        buffers = sum(slot.nbytes for slot in slots) - weights
        gradients = moments = 0
        parameters, of_optimizer = state.train_state.parameters(), state.train_state.optimizer.state
        for unit in state.units:
            members = settings.sharing_replicas(unit.key, unit.replica)
            if settings.optimizer is not None and state.ipu_of[unit.key] == ipu and replica in members:
                weight, parameter = state.weight(unit), parameters.get(unit.key)
                gradients += weight.numel() * settings.optimizer.sum_dtype(weight.dtype).itemsize
                rows = 1 if parameter is None else parameter.numel() // max(1, weight.numel())
                values = of_optimizer.get(parameter, {}).values()
                sizes = (x.nbytes // (rows if x.dim() else 1) for x in values if isinstance(x, Tensor))
                moments += sum(sizes)
        return KeptBytes(replica, ipu, weights, buffers, gradients, moments)


def threads_per_operation(plan: Plan, settings: Settings, cores: int) -> int:
    """Return the number of threads per operation: cores // (micro-batches · replicas) of a step, at least 1. All
    layouts of stages have the same number, and so the bits of plain PyTorch."""
    return max(1, cores // (plan.micro_batches * settings.counts.replicas))
