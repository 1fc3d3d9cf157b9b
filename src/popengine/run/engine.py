"""Runs a plan: one call takes a combined batch, runs all device iterations, and returns the results.

The loop over iterations and micro-batches runs in the threads of the ready queue (`ready_queue.py`). A step
is finished completely or not at all: after an error or an interrupt the weights, buffers and optimizer state
are those of the last finished step.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..errors import UnrecoverableError
from ..ir import Plan
from ..settings import Hyper, Settings
from . import devices
from .backends.eager import build
from .call import EngineCall, Results
from .devices import with_aligned_micro_batches
from .instances.all_reduce import AllReduce, leaf_nodes, tree_sum
from .instances.consistency import Fingerprint, fingerprint_of_plan, hash_weights, rates_as_texts
from .instances.process_group import group_of_size
from .ready_queue import ReadyQueue
from .recorder import Recorder
from .row_functions import RowFunctions
from .state import State

logger = logging.getLogger("popengine")
_BUFFERS_TAG = 10  # of messages

_OVERFLOW = (
    "gradients of step %d hold an infinity or a NaN, and so will the weights: the loss scale is %g\n"
    "  fix: a smaller loss_scaling; or options.Training.setAutomaticLossScaling(True), which leaves such updates out\n"
    "  where it is made: options.Precision.enableFloatingPointExceptions(True) names the operation"
)


class Engine:
    """A loaded plan: its tensors, and the threads that run its calls.

    Args:
        weights:  parameters and buffers by canonical name; they are copied
        device:   the device that holds all ipus; None: this machine's device of the kind in `settings`
        previous: an engine with another plan of the model, whose tensors and call count this engine continues
    """

    def __init__(
        self,
        plan: Plan,
        settings: Settings,
        weights: Mapping[str, Tensor],
        seed: int,
        device: torch.device | None = None,
        previous: Engine | None = None,
    ) -> None:
        several = settings.training and settings.counts.instances > 1
        self._group = group_of_size(settings.counts.instances) if several else None
        if self._group is not None:
            what = "compilation" if previous is None else "compilation for other inputs"
            first = weights if previous is None else {}
            self._group.barrier(what, fingerprint_of_plan(plan, settings, first, seed))
        self.plan, self.settings = plan, settings
        device = device or devices.device_of(settings.device)
        devices.keep_freed_memory()
        # Threads refer to the state and not to the engine: they end when nothing else refers to the engine.
        self._state = State(plan, settings, weights, device, previous.state if previous else None)
        if previous is None:
            self._state.random_state = seed, 0
        self.updates_done = 0  # of the latest call
        self._calls = 0 if previous is None else previous._calls
        # Parameters that were written since the processes compared them.
        self._unconfirmed: set[str] = set() if previous is None else previous._unconfirmed
        # The name under which peers read this process's shard of the optimizer state; "": it is not sharded.
        self._sharded = self._group.publish_state(self._state) if self._group and self._state.owner else ""
        self._has_warned = False  # of overflowing gradients
        self._is_running = False
        self._latest: EngineCall | None = None  # the call that the threads may still run
        # Re-entrant: an interrupt at the end of a call may leave it locked, and the same thread may call again.
        self._call_lock = threading.RLock()
        if settings.is_eager:
            codes = tuple(build(piece, device=device) for piece in plan.partition.pieces)
        else:
            from .backends import inductor  # slow to import

            codes = inductor.load_pieces(plan.partition, device)
        self._step = RowFunctions(plan, settings, self._state, codes, self._group)
        cores = devices.core_count(settings.device)
        per_operation = threads_per_operation(plan, settings, cores)
        self._queue = ReadyQueue(self._step, cores // per_operation, per_operation)
        self._close = weakref.finalize(self, self._queue.close)

    def take_over(self, other: Engine) -> None:
        """Continue with the tensors and the call count of an engine with another plan of the model."""
        self._state.take_over(other.state)
        self._calls, self._unconfirmed = other._calls, other._unconfirmed

    def close(self) -> None:
        """End the threads. Peers can read a copy of this process's optimizer shard until the next barrier."""
        if self._group is not None and self._sharded:
            self._group.copy_state_until_barrier(self._sharded)
        self._close()

    # ---- running -----------------------------------------------------------------------------------------

    def run(self, inputs: Sequence[Tensor], hyper: Hyper | None, recorder: Recorder | None = None) -> Results:
        """Run one call, all device iterations, and return its results. Warn once of overflowing gradients.

        Args:
            inputs: combined batches, each [iterations * accumulation * groups * micro-batch, ...]
            hyper:  the rates of its weight updates; None in inference
        Raises:
            Error: a task or a peer failed. Weights, buffers and optimizer state are those of the last
                finished update; `updates_done` updates of this call are finished
            UnrecoverableError: an update failed halfway (the weights are lost), or a peer has ended
        """
        with self._call_lock:
            self._is_running = True
            try:
                return self._run(inputs, hyper, recorder)
            finally:
                self._is_running = False

    @property
    def state(self) -> State:
        """The weights, buffers and optimizer state. A call that an interrupt left running is ended first."""
        if self._latest is not None and self._call_lock.acquire(blocking=False):
            try:
                if not self._is_running:  # True for a signal handler that reads while this thread's call runs
                    self._await_idle()
            finally:
                self._call_lock.release()
        return self._state

    def _run(self, inputs: Sequence[Tensor], hyper: Hyper | None, recorder: Recorder | None) -> Results:
        if recorder is not None:
            recorder.begin_call()
        self._await_idle()
        self._state.check_not_lost()
        self.updates_done = 0
        name = f"call {self._calls + 1} of the training"
        if self._group is not None:
            self._group.barrier(name, self._fingerprint(hyper, inputs))
            self._unconfirmed.clear()
        call = self._latest = EngineCall(
            self._split_into_micro_batches(inputs),
            Results(self.plan.partition.signature, self.settings, self._state.device),
            hyper,
            self.settings.counts.iterations if self.settings.training else 1,
            torch.get_num_threads(),
            name,
        )
        try:
            self._queue.start(call, recorder)
            self._queue.wait_until_idle()
        finally:
            self._await_idle()  # returns at once, except after Ctrl-C
            self._calls += call.done == call.steps
            self.updates_done = call.done if self.settings.training and self.settings.part.ends_step else 0
            if recorder is not None:
                recorder.end_call(call.done, failed=call.done < call.steps)
        if call.failure is not None:
            raise call.failure
        if call.overflows and not self._has_warned:
            self._has_warned = True
            logger.warning(_OVERFLOW, *min(call.overflows))
        return call.results

    def _split_into_micro_batches(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return each batch as [turns, groups, micro-batch, ...], aligned, or pinned for an accelerator."""
        counts, device = self.settings.counts, self._state.device
        found = []
        for value in inputs:
            rows = (counts.iterations * counts.accumulation, counts.groups, -1, *value.shape[1:])
            batch = value.reshape(rows) if value.dim() else value.expand(1, 1)
            is_here = device.type == "cpu" and batch.is_cpu
            found.append(
                with_aligned_micro_batches(batch) if is_here else devices.in_pinned_memory(batch, device)
            )
        return found

    def _fingerprint(self, hyper: Hyper | None, inputs: Sequence[Tensor]) -> Fingerprint:
        """Return the fingerprint of a call, written weights included: it has to be equal in all processes."""
        assert hyper is not None
        seed, step = self._state.random_state
        texts: dict[str, dict[str, str]] = {
            "rates": rates_as_texts(hyper),
            "state": {"updates so far": str(step), "loss scaling factor": repr(self._state.loss_factor)},
            "seed": {"random seed": str(seed)},
            "input": {str(index): f"{tuple(value.shape)}" for index, value in enumerate(inputs)},
        }
        if self._unconfirmed:
            weights = self._state.read()
            texts["value"] = hash_weights({key: weights[key] for key in self._unconfirmed})
        return texts

    def _await_idle(self) -> None:
        """Wait until no call runs. Stop a call that an interrupt has left running, and wake the peers. If an
        update of the call failed halfway, mark the weights as lost."""
        call = self._latest
        if call is None:
            return
        if not call.is_over:
            call.stop()
            if self._group is not None and not call.is_committed:
                self._group.abort(f"was interrupted at {call.name}")
            while True:
                try:
                    self._queue.wait_until_idle()
                    break
                except KeyboardInterrupt:  # a second Ctrl-C: the call is stopping already
                    continue
            if self._group is not None and call.done < call.steps:
                self._group.abort(f"was interrupted at {call.name}")
            # Some libraries have one number of threads for the process, which another thread may have set.
            torch.set_num_threads(torch.get_num_threads())
        if self._step.updates.is_writing:
            self._mark_weights_lost(call)
        self._latest = None

    def _mark_weights_lost(self, call: EngineCall) -> None:
        """Mark the weights as lost after a failed update: `call` and later calls raise UnrecoverableError."""
        self._state.lost = UnrecoverableError(
            f"the weights are lost: some are those after {call.name}, and some those before"
            f" ({type(call.failure).__name__}: {call.failure})\n"
            "  why: an update failed halfway\n"
            "  fix: start again from a checkpoint"
        )
        self._state.host_is_stale = False  # the host's weights stay
        self._step.updates.is_writing = False
        self._state.weights_lock.release()
        call.failure = self._state.lost

    # ---- the host's side -----------------------------------------------------------------------------------

    def read_whole_optimizer(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of the optimizer state by parameter. If processes shard the state, gather all shards:
        wait until each peer reads, too, or is at its next call (see `ProcessGroup.read_shards`)."""
        if self._group is None or not self._sharded:
            return self._state.read_optimizer()
        shards = self._group.read_shards(self._sharded)
        # This process's shard is last: each instance has its own states of parameters with replica groups.
        whole = {key: state for shard in [*shards, shards[self._group.rank]] for key, state in shard.items()}
        return {key: whole[key] for key in dict.fromkeys(self._state.trained) if key in whole}

    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Copy parameters and buffers, by canonical name, to all replicas; an error changes none. The next
        call of a training raises Error if trained parameters differ between processes."""
        self._state.write([weights] * self.settings.counts.replicas)
        self._unconfirmed.update(key for key in weights if key in self._state.trained)

    def average_buffers(self) -> None:
        """Set each floating point buffer that forward changes to its mean over all replicas of all processes.
        The mean has the same bits in every layout of replicas and processes."""
        with self._call_lock:
            self._await_idle()
            results = self.plan.partition.signature.results
            buffers = [r for r in results if r.kind == "buffer" and r.dtype.is_floating_point]
            if not buffers:
                return
            replicas = self._state.read_buffers()
            flats = [torch.cat([each[b.key].double().reshape(-1) for b in buffers]) for each in replicas]
            if self._group is None:
                tree_sum(leaf_nodes([flat] for flat in flats))
            else:
                what, reduction = "the mean of running statistics", AllReduce(self._group, _BUFFERS_TAG)
                fingerprint = {"buffers": {b.key: str(b.shape) for b in buffers}}
                self._group.after_barrier(what, fingerprint, lambda: reduction.all_reduce(flats))
            flat = flats[0] / self.settings.counts.global_replicas
            means = flat.split([replicas[0][b.key].numel() for b in buffers])
            pairs = zip(buffers, means, strict=True)
            new = {b.key: mean.view(b.shape).to(b.dtype) for b, mean in pairs}
            self._state.write([new] * len(replicas))
            self._state.host_is_stale = True


def threads_per_operation(plan: Plan, settings: Settings, cores: int) -> int:
    """Return the number of threads per operation: cores // (micro-batches · replicas) of a step, at least 1.
    It does not depend on the stages, so that all layouts of stages give the bits of plain PyTorch."""
    return max(1, cores // (plan.micro_batches * settings.counts.replicas))
