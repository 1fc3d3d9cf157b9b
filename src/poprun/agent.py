"""The agent: starts and watches the instances of one node by torch.distributed.elastic.

Elastic starts the instances, copies their output, ends all when one fails, and starts all again. This agent
adds popdist's variables, a message about the instance that failed first, and a time limit for the others to
end.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std

from popengine.environment import SECRET, STACK, STORE, path_with_aliases

from . import Log
from . import instance as instance_program
from .command_line import CommandLine
from .election import Lost, Misfit
from .guard import exit_code
from .hangs import Hangs
from .hosts import CONSEQUENCE, WATCH
from .nodes import Nodes
from .topology import Node, cores_of, launch_of, local_instances

PATIENCE = 5  # seconds for the other instances to end after one has failed
PATIENCE_AT_SIGNALS = 25  # seconds to save a checkpoint after SIGTERM; Kubernetes kills after 30
_LOOK = 0.2  # seconds between two checks of the other nodes, and for instances that hang
_LAST_LINES = 20


def work(request: CommandLine, node: Node, log: Log, folder: str) -> int:
    """Run this node's instances to their end.

    Returns: 0, the exit code of the instance that failed first, 2 for a `Misfit`, 128 + n after signal n
    """
    if request.verbosity < 2:
        logging.disable(logging.CRITICAL)  # elastic logs what poprun prints itself
    for stream in (sys.stdout, sys.stderr):  # elastic copies the instances' output to these
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        nodes = Nodes(request, node, log)
        agent = _Agent(request, node, nodes, log, folder)
        try:
            result: RunResult | None = agent.run()  # pyright: ignore[reportAssignmentType]
            # None: the instances of other nodes have ended the training well.
            code = agent.exit_code if result is not None and result.is_failed() else 0
        except Lost as error:
            log.error(str(error))
            code = CONSEQUENCE if WATCH in os.environ and not request.is_elastic else agent.exit_code
    except Misfit as error:
        log.error(f"error: {error}")
        return 2
    except SignalException as error:
        return 128 + error.sigval  # no `leave`: the other nodes may wait for this node to return
    nodes.leave(has_failed=code != 0)
    return code


class _Agent(LocalElasticAgent):
    def __init__(self, request: CommandLine, node: Node, nodes: Nodes, log: Log, folder: str) -> None:
        self._request, self._node, self._nodes, self._log = request, node, nodes, log
        count = local_instances(request, node.count)
        self._first = 0  # number of this node's first instance
        self._folder = folder
        self._running: dict[int, int] = {}  # local instance, by its pidfd, which is readable after its end
        self._ended: list[int] = []  # local instances in the order of their ends
        self._hangs: Hangs | None = None
        self.exit_code = 1
        program = [word.replace("$", "$$") for word in request.program]  # elastic replaces `${names}`
        spec = WorkerSpec(
            role="instance",
            local_world_size=count,
            rdzv_handler=nodes,
            entrypoint=sys.executable,
            args=("-I", "-S", instance_program.__file__, os.getpid(), *program),
            max_restarts=request.max_restarts,
            monitor_interval=1e-3,  # `_monitor_workers` waits
        )
        prefix = "[${rank}] " if request.tags_output else None
        logs = DefaultLogsSpecs(folder)
        super().__init__(spec, logs, log_line_prefix_template=prefix, shutdown_timeout=PATIENCE_AT_SIGNALS)

    # ---- called by elastic, whose decorator hides the types of its methods --------------------------------

    def _assign_worker_ranks(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, store: Any, group_rank: int, *args: Any
    ) -> list[Worker]:
        """Return this node's workers in the current round."""
        current = self._nodes.round
        self._first, size = current.first_instance(self._nodes.name), current.instances
        self._worker_group.spec.local_world_size = count = current.counts[self._nodes.name]
        silent = {i: _silenced(self._request, self._first + i) for i in range(count)}
        tee = Std.ALL if self._request.tags_output else Std.NONE
        self._logs_specs = DefaultLogsSpecs(self._folder, silent, {i: tee & ~silent[i] for i in range(count)})
        return [Worker(i, self._first + i, self._first + i, size, size) for i in range(count)]

    def _exit_barrier(self) -> None:
        """Do nothing: `_monitor_workers` has already waited for the other nodes."""

    def _set_local_rank_env(self, worker_env: dict[str, Any], local_rank: int, spec: WorkerSpec) -> None:
        super()._set_local_rank_env(worker_env, local_rank, spec)
        current = self._nodes.round
        launch = launch_of(self._request, self._first + local_rank, current.instances, local_rank)
        worker_env |= launch.variables()
        cores = cores_of(local_rank, spec.local_world_size) if self._request.numa_aware else []
        if cores:
            worker_env["POPRUN_CORES"] = ",".join(map(str, cores))
        share = len(cores) or len(os.sched_getaffinity(0)) // spec.local_world_size
        worker_env.setdefault("OMP_NUM_THREADS", str(max(1, share)))
        worker_env |= dict(self._request.variables)
        path = worker_env.get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")
        worker_env["PYTHONPATH"] = path_with_aliases(path)
        worker_env |= {STORE: self._nodes.address, SECRET: self._nodes.secret}
        worker_env[STACK] = str(self._stack_file(self._first + local_rank))
        # The round's number, which is equal on all nodes: the instances' rendezvous has it in its keys.
        worker_env["TORCHELASTIC_RESTART_COUNT"] = str(current.number)
        worker_env["PANDO_RESTARTS"] = str(int(os.environ.get("PANDO_RESTARTS", "0")) + current.number)

    def _start_workers(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, worker_group: WorkerGroup
    ) -> dict[int, Any]:
        current, request = self._nodes.round, self._request
        self._remaining_restarts = 1 if request.is_elastic else request.max_restarts - current.number
        if request.is_elastic:
            nodes = ", ".join(f"{count} on {name}" for name, count in current.counts.items())
            self._log.warning(f"round {current.number} of {current.instances} instances begins: {nodes}")
        elif current.number:
            self._log.warning(
                f"all instances start again, {current.number} of at most {request.max_restarts} times"
            )
        pids = super()._start_workers(worker_group)  # pyright: ignore[reportCallIssue]
        context = self._pcontext
        assert context is not None
        close = context.close
        context.close = lambda death_sig=None, timeout=PATIENCE: close(death_sig, timeout)
        for descriptor in self._running:
            os.close(descriptor)
        self._running, self._ended = {os.pidfd_open(pid): local for local, pid in pids.items()}, []
        processes = {self._first + local: pid for local, pid in pids.items()}
        for instance, pid in processes.items():
            self._log.debug(f"instance {instance} is process {pid}")
        self._hangs = Hangs(
            self._nodes.store,
            f"attempt/{current.number}/pando",
            processes,
            {instance: self._stack_file(instance) for instance in processes},
            current.instances,
            request,
            self._log,
        )
        return pids

    def _stack_file(self, instance: int) -> Path:
        return Path(self._folder) / f"stack-{self._nodes.round.number}-{instance}"

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = PATIENCE) -> None:
        super()._shutdown(death_sig, timeout)

    def _monitor_workers(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, worker_group: WorkerGroup
    ) -> RunResult:
        """Wait a moment for an instance to end, record the order of ends, and return the instances' state."""
        gone, _, _ = select.select(list(self._running), [], [], _LOOK)
        for descriptor in gone:
            self._ended.append(self._running.pop(descriptor))
            os.close(descriptor)
        result = super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue]
        if result.is_failed():
            self._report(result)
        elif result.state == WorkerState.SUCCEEDED and not self._nodes.are_done():
            return RunResult(state=WorkerState.HEALTHY)  # another node may fail, and all start again
        elif self._running and self._hangs is not None:
            self._hangs.look()
        return result

    # ---- failures ----------------------------------------------------------------------------------------

    def _report(self, result: RunResult) -> None:
        """Set `exit_code`, and print which instance failed first, with its last lines if they were hidden."""
        failed = {rank - self._first: failure for rank, failure in result.failures.items()}
        first = next((local for local in self._ended if local in failed), min(failed))
        code = failed[first].exitcode
        self.exit_code = exit_code(code)
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        number = self._first + first
        node = self._nodes.first_failure()
        early = [str(self._first + local) for local in takewhile(first.__ne__, self._ended)]
        total = self._nodes.round.instances
        if node != self._nodes.name:
            self._log.error(f"instance {number} failed with {how}, after an instance of node {node}")
            self.exit_code = CONSEQUENCE if WATCH in os.environ else self.exit_code
        elif early:  # perhaps too early: with fewer calls than the others
            several = "s" if len(early) > 1 else ""
            ends = f"instance{several} {', '.join(early)} of {total} ended first, with exit code 0"
            self._log.error(f"{ends}; then instance {number} failed, with {how}")
        else:
            self._log.error(f"instance {number} of {total} failed first, with {how}")
        if not self._request.is_elastic and (lost := self._nodes.lost()):
            self._log.error(lost)
        assert self._pcontext is not None
        silent = _silenced(self._request, number)
        files = [(Std.OUT, self._pcontext.stdouts), (Std.ERR, self._pcontext.stderrs)]
        lines = [line for std, paths in files if std in silent for line in _last_lines(paths[first])]
        if lines:
            self._log.error(f"the last lines of instance {number}:")
            print(*lines, sep="\n", file=sys.stderr, flush=True)


def _silenced(request: CommandLine, instance: int) -> Std:
    """Return the streams of an instance that go to a file instead of to the terminal."""
    if request.only_output not in (None, instance):
        return Std.ALL
    return Std.OUT if request.only_stdout not in (None, instance) else Std.NONE


def _last_lines(path: str) -> list[str]:
    """Return the last lines of a file; an empty list, if it can't be read."""
    with suppress(OSError):
        return Path(path).read_text(errors="replace").splitlines()[-_LAST_LINES:]
    return []
