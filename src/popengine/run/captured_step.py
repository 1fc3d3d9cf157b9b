"""A step of an accelerator, captured once and replayed for later steps, so that the host does not start it again.

A graph (`devices.new_graph`) holds the rows of micro-batches: loads, pieces, sums, stores. The host starts the rows of
the step, which update the weights, while the graph runs. So rates, counts and the loss factor are in no graph.

The graph reads its inputs from, and writes its outputs to, memory of its own. Before each replay torch fills the seeds
of `RowFunctions.generators`. If weights or buffers have other addresses, the step is captured again.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..errors import Error
from ..ir import Plan
from ..operations import FUSED_CALLS
from ..piece import GATHER
from ..settings import Settings
from . import devices, random_draws
from .backends.eager import operation_of
from .call import Commit, EngineCall, Results, Stopped
from .row_functions import RowFunctions

logger = logging.getLogger("popengine")
# Operations other than torch's that a graph may hold.
_CAPTURABLE = (GATHER, "popengine.with_strides.default", *FUSED_CALLS)
# Operations for which the host waits on CUDA, or which its captures refuse. They were found on an H200 with torch 2.11,
# by torch's samples of each operator (torch.testing, `op_db`) under `torch.cuda.set_sync_debug_mode("error")` and in a
# capture.
_HOST_WAITS = {
    *("_ctc_loss", "_linalg_check_errors", "_linalg_eigh", "_linalg_svd", "_local_scalar_dense", "allclose"),
    *("cholesky", "equal", "histc", "isin", "linalg_eig", "linalg_lstsq", "linalg_lu", "linalg_lu_factor_ex"),
    *("linalg_matrix_exp", "linalg_pinv", "masked_scatter_backward", "masked_select", "nonzero"),
    *("segment_reduce", "index_fill.int_Tensor", "masked_fill.Tensor", "normal.Tensor_Tensor"),
    *("repeat_interleave.Tensor", "linspace.Scalar_Tensor", "linspace.Tensor_Scalar"),
    *("linspace.Tensor_Tensor", "logspace.Scalar_Tensor", "logspace.Tensor_Scalar"),
    "logspace.Tensor_Tensor",
}
_MAX_CAPTURES_IN_A_ROW = 3
_MAX_OPERATIONS = 200_000  # operations of a graph: each is a node, of about a kilobyte


def why_not_captured(plan: Plan, settings: Settings, device: torch.device) -> str:
    """Return why steps of a plan can't be captured; "" if they can, as far as is known before."""
    lines = [line for piece in plan.partition.pieces for line in piece.lines]
    calls = [*dict.fromkeys(line.call for line in lines)]
    observable = [call for call in calls if "." in call and call not in _CAPTURABLE]
    observable = [call for call in observable if not call.startswith(("aten.", "prims."))]
    names = [call.removeprefix("aten.").removesuffix(".default") for call in calls]
    waited = [name for name in names if {name, name.partition(".")[0]} & _HOST_WAITS]
    draws = [
        line.call
        for line in lines
        if line.draw is not None and not random_draws.has_generator(operation_of(line.call))
    ]
    if plan.places:
        return "ipus are on several devices"
    if settings.finite_checks:
        return "enableFloatingPointExceptions reads each value"
    if observable:
        return f"the host may see when {observable[0]} runs"
    if waited:
        return f"the host waits for the values of {waited[0]}"
    if draws:
        return f"{draws[0]} draws random numbers without a generator of its own"
    if settings.counts.instances > 1 and settings.training:
        return "several processes exchange gradients"
    if settings.step_part.before or not settings.step_part.ends_step:
        return "two plans share the step of an incomplete batch"
    if any(anchor.source == "gradient" for anchor in settings.anchors):
        return "gradients that are returned are divided by the loss scale"
    if len(lines) * plan.micro_batches * settings.counts.replicas > _MAX_OPERATIONS:
        return f"a step has more than {_MAX_OPERATIONS} operations"
    return "" if devices.new_graph(device) is not None else f"torch has no graphs for {device.type}"


class CapturedStep:
    """The graphs of a step of a plan, one for each device."""

    def __init__(self, workers: Sequence[RowFunctions]) -> None:
        rows, self._workers = workers[0], workers
        self._graphs = [_DeviceGraph(worker) for worker in workers]
        reasons = (why_not_captured(rows.plan, rows.settings, worker.state.device) for worker in workers)
        self._why_not = next(filter(None, reasons), "")
        if self._why_not:
            self._stop_capturing(self._why_not)
        self._is_warm = False  # whether a step has run: kernels are loaded, workspaces allocated
        self._captures_in_a_row = 0  # calls that captured a step again

    def _stop_capturing(self, why_not: str, log: Any = logger.info) -> None:
        """Capture no more steps, and free the graphs' memory."""
        self._why_not, self._graphs = why_not, []
        names = ", ".join(str(worker.state.device) for worker in self._workers)
        log("steps on %s are started operation by operation: %s", names, why_not)

    def run(self, table: Any, call: EngineCall) -> bool:
        """Run the tasks of a step (a `StepTasks`) by replays; return False if they are to be run one by one."""
        if self._why_not or not self._is_warm:
            self._is_warm = True
            return False
        rows, tasks = self._workers[0].plan.tasks, [table.all[number] for number in table.order]
        inner = [task for task in tasks if rows[task.row].index == "micro_batch"]
        stale = [graph for graph in self._graphs if not graph.is_valid()]
        if not stale:
            # A call's first step shows whether weights have moved.
            self._captures_in_a_row *= call.commit.done > 0
        else:
            self._captures_in_a_row += 1
            if self._captures_in_a_row > _MAX_CAPTURES_IN_A_ROW:
                self._stop_capturing("weights or buffers have other memory at each call", logger.warning)
                return False
            try:
                for graph in stale:
                    lane = self._graphs.index(graph)
                    with devices.as_current_device(graph.device):
                        graph.capture(call, [task for task in inner if task.lane == lane])
            except (RuntimeError, Error) as error:
                self._stop_capturing(str(error.__context__ or error).splitlines()[0])
                for worker in self._workers:
                    worker.clear()
                    worker.state.begin_step()
                    worker.seed_generators(are_new=True)
                return False
        if call.commit.is_stopping:
            raise Stopped
        for graph in self._graphs:
            with devices.as_current_device(graph.device):
                graph.replay(call)
        for task in tasks[len(inner) :]:
            if call.commit.is_stopping and call.commit.state == "open":
                raise Stopped
            task.work(call, task.index)
        return True


class _DeviceGraph:
    """The graph of a device's part of a step, and the memory that it reads and writes."""

    def __init__(self, rows: RowFunctions) -> None:
        self._rows, self._plan, self._settings, self._state = rows, rows.plan, rows.settings, rows.state
        self.device = rows.state.device
        self._addresses: list[int] = []  # of weights and buffers, when the step was captured
        self._graph: Any = None
        self._inputs: list[Tensor] = []
        self._results: Results
        self._sums: list[dict[str, Tensor]] = []
        self._buffers: list[dict[str, Tensor]] = []

    def _present_addresses(self) -> list[int]:
        by_replica = (self._state.values[replica] for replica in self._state.where.replicas)
        return [value.data_ptr() for values in by_replica for value in values.values()]

    def is_valid(self) -> bool:
        """Return whether weights and buffers have the addresses at which the step was captured."""
        return self._addresses == self._present_addresses()

    def capture(self, call: EngineCall, tasks: Sequence[Any]) -> None:
        """Capture tasks in this order, which is legal for one thread."""
        rows, state, device = self._rows, self._state, self.device
        settings, count = self._settings, self._plan.micro_batches
        self._addresses, self._graph = self._present_addresses(), None  # frees its memory
        graph = devices.new_graph(device)
        for generator in chain(*rows.generators.values()):
            graph.register_generator_state(generator)
        self._inputs = [devices.empty_micro_batches(batch[:count], device) for batch in call.inputs]
        anchors = tuple(anchor for anchor in settings.anchors if anchor.is_output)
        if settings.training:  # one iteration
            once = replace(settings.counts, iterations=1)
            anchors = tuple(replace(anchor, return_period=1) for anchor in anchors)
            settings = replace(settings, counts=once, return_period=1)
        settings = replace(settings, anchors=anchors)
        self._results = Results(self._plan.partition.signature, settings, device, len(self._inputs))
        captured = EngineCall(self._inputs, self._results, call.hyper, call.threads, Commit())
        pools = state.train_state.graph_pools

        def run_tasks() -> None:
            for task in tasks:
                task.work(captured, task.index)

        devices.capture(graph, pools.get(device), device, run_tasks)
        pools.setdefault(device, graph.pool())
        self._graph = graph
        self._sums = [dict(sums) for sums in state.sums]
        self._buffers = [dict(buffers) for buffers in state.new_buffers]

    def replay(self, call: EngineCall) -> None:
        """Start the graph on the inputs of the running step."""
        state, done, count = self._state, call.commit.done, self._plan.micro_batches
        turns = range(done * count, (done + 1) * count)
        for target, batch in zip(self._inputs, call.inputs, strict=True):
            rows = devices.in_pinned_memory(batch[turns.start : turns.stop], state.device)
            target.copy_(rows, non_blocking=True)
        self._results.continue_sums(call.results)
        self._graph.replay()
        call.results.add_step(
            done if self._settings.training else 0, self._results, turns, state.where.replicas
        )
        for replica in state.where.replicas:
            state.sums[replica].update(self._sums[replica])
            state.new_buffers[replica].update(self._buffers[replica])
