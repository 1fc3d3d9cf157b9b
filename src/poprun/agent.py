"""The instances of one node, under torch.distributed.elastic.

Elastic starts them, hands their output on, ends all when one fails, meets the other nodes and starts all again. Added
here is what it doesn't know: popdist's variables, who failed first, and how long a survivor may take to end.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from . import instance as instance_program
from .command_line import Request
from .guard import exit_code
from .log import Log
from .numa import cores_of as numa_cores
from .topology import Node, launch_of, local_instances

PATIENCE = 5  # seconds for a survivor to end after another instance has failed
PATIENCE_AT_SIGNALS = 25  # seconds to save a checkpoint after SIGTERM; Kubernetes kills after 30
_LOOK = 0.2  # seconds between two looks at the other nodes
_LAST_LINES = 20


def work(request: Request, node: Node, log: Log, folder: str) -> int:
    """Run this node's instances to their end; the exit code of the first that failed."""
    if request.verbosity < 2:
        logging.disable(logging.CRITICAL)  # elastic's words about what is said here
    for stream in (sys.stdout, sys.stderr):  # what elastic hands on of the instances' output
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        agent = _Agent(request, node, log, folder)
        result: RunResult = agent.run()  # pyright: ignore[reportAssignmentType]
    except SignalException as error:
        return 128 + error.sigval
    except (RendezvousError, _Lost) as error:
        log.error(str(error))
        return 1
    agent.goodbye()
    return agent.exit_code if result.is_failed() else 0


_ALIASES = Path(__file__).parent / "aliases"


class _Lost(Exception):
    """The other nodes are not there."""


class _Agent(LocalElasticAgent):
    def __init__(self, request: Request, node: Node, log: Log, folder: str) -> None:
        self._request, self._node, self._log = request, node, log
        count = local_instances(request, node.count)
        self._first = node.rank * count  # number of this node's first instance
        self._begun = 0  # how often all have been started
        self._running: dict[int, int] = {}  # local instance by the descriptor that tells of its end
        self._ended: list[int] = []  # local instances in the order of their ends
        self.exit_code = 1
        self._handler = _meet(node, log)
        spec = WorkerSpec(
            role="instance",
            local_world_size=count,
            rdzv_handler=self._handler,
            entrypoint=sys.executable,
            # Elastic puts values in the place of `${names}`.
            args=("-I", "-S", instance_program.__file__, os.getpid(), *_escaped(request.program)),
            max_restarts=request.max_restarts,
            monitor_interval=1e-3,  # `_monitor_workers` does the waiting
        )
        silent = {i: _silenced(request, self._first + i) for i in range(count)}
        tee = Std.ALL if request.tags_output else Std.NONE
        logs = DefaultLogsSpecs(folder, silent, {i: tee & ~silent[i] for i in range(count)})
        prefix = "[${rank}] " if request.tags_output else None
        super().__init__(spec, logs, log_line_prefix_template=prefix, shutdown_timeout=PATIENCE_AT_SIGNALS)

    def goodbye(self) -> None:
        """Tell the other nodes that this one has ended."""
        self._handler.shutdown()

    # ---- what elastic calls ------------------------------------------------------------------------------

    def _assign_worker_ranks(self, store: Any, group_rank: int, *args: Any) -> Any:
        """Number instances by nodes; elastic would number them by addresses."""
        return super()._assign_worker_ranks(store, self._node.rank, *args)  # pyright: ignore[reportCallIssue]

    def _set_local_rank_env(self, worker_env: dict[str, Any], local_rank: int, spec: WorkerSpec) -> None:
        super()._set_local_rank_env(worker_env, local_rank, spec)
        launch = launch_of(self._request, self._first + local_rank, self._node.count)
        worker_env |= launch.variables()
        cores = numa_cores(local_rank, spec.local_world_size) if self._request.numa_aware else []
        if cores:
            worker_env["POPRUN_CORES"] = ",".join(map(str, cores))
        share = len(cores) or len(os.sched_getaffinity(0)) // spec.local_world_size
        worker_env.setdefault("OMP_NUM_THREADS", str(max(1, share)))
        if (
            find_spec("horovod") is None
        ):  # programs that reduce their metrics by it find popdist's collectives
            paths = [worker_env.get("PYTHONPATH") or os.environ.get("PYTHONPATH", ""), str(_ALIASES)]
            worker_env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        worker_env |= dict(self._request.variables)
        # The same number on every node, though only one may have seen the failure: workers meet under it.
        worker_env["TORCHELASTIC_RESTART_COUNT"] = str(self._begun)
        worker_env["PANDO_RESTARTS"] = str(int(os.environ.get("PANDO_RESTARTS", "0")) + self._begun)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._remaining_restarts = self._request.max_restarts - self._begun
        if self._begun:
            again = f"{self._begun} of at most {self._request.max_restarts} times"
            self._log.warning(f"all instances start again, {again}")
        pids = super()._start_workers(worker_group)  # pyright: ignore[reportCallIssue]
        self._begun += 1
        context = self._pcontext
        assert context is not None
        close = context.close
        context.close = lambda death_sig=None, timeout=PATIENCE: close(death_sig, timeout)
        self._forget_ends()
        for local, pid in pids.items():
            self._log.debug(f"instance {self._first + local} is process {pid}")
            self._running[os.pidfd_open(pid)] = local
        return pids

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = PATIENCE) -> None:
        super()._shutdown(death_sig, timeout)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look who has ended, and sleep until somebody does: who is gone first has failed first."""
        gone, _, _ = select.select(list(self._running), [], [], _LOOK)
        for descriptor in gone:
            self._ended.append(self._running.pop(descriptor))
            os.close(descriptor)
        result = super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue]
        if result.is_failed():
            self._tell(result)
        elif self._node.count > 1 and self._running and self._handler.is_closed():
            raise _Lost("another node has given up: its poprun says why")
        return result

    # ---- who failed --------------------------------------------------------------------------------------

    def _forget_ends(self) -> None:
        for descriptor in self._running:
            os.close(descriptor)
        self._running, self._ended = {}, []

    def _tell(self, result: RunResult) -> None:
        """Say which instance failed first, and show the last that it said, if that wasn't seen."""
        failed = {rank - self._first: failure for rank, failure in result.failures.items()}
        first = next((local for local in self._ended if local in failed), min(failed))
        code = failed[first].exitcode
        self.exit_code = exit_code(code)
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        number = self._first + first
        self._log.error(f"instance {number} of {self._request.instances} failed first, with {how}")
        assert self._pcontext is not None
        silent = _silenced(self._request, number)
        files = [(Std.OUT, self._pcontext.stdouts), (Std.ERR, self._pcontext.stderrs)]
        lines = [line for std, paths in files if std in silent for line in _last_lines(paths[first])]
        if lines:
            self._log.error(f"the last lines of instance {number}:")
            print(*lines, sep="\n", file=sys.stderr, flush=True)


def _escaped(words: Sequence[str]) -> list[str]:
    return [word.replace("$", "$$") for word in words]


def _silenced(request: Request, instance: int) -> Std:
    """What of an instance's output goes to a file instead of to the terminal."""
    if request.only_output not in (None, instance):
        return Std.ALL
    return Std.OUT if request.only_stdout not in (None, instance) else Std.NONE


def _last_lines(path: str) -> list[str]:
    with suppress(OSError):
        return Path(path).read_text(errors="replace").splitlines()[-_LAST_LINES:]
    return []


# ---- meeting the other nodes -----------------------------------------------------------------------------


def _meet(node: Node, log: Log) -> DynamicRendezvousHandler:
    """Wait until all nodes are here.

    Raises:
        _Lost: some are missing after the time, which the error names, or two have one number
    """
    patience = timedelta(seconds=int(os.environ.get("POPRUN_NODE_TIMEOUT", "600")))
    where = f"{node.address}:{node.port}"
    if node.count > 1:
        log.info(f"node {node.rank} of {node.count} waits for the others at {where}")
    try:
        store = TCPStore(
            node.address, node.port, is_master=node.rank == 0, timeout=patience, wait_for_workers=False
        )
    except (RuntimeError, OSError) as error:
        raise _Lost(
            f"node 0 is not to be reached at {where}: {str(error).splitlines()[0]}\n"
            "  fix: MASTER_ADDR and MASTER_PORT are the address of node 0 and a free port there"
        ) from None
    keys = [f"poprun/node/{rank}" for rank in range(node.count)]
    if store.add(keys[node.rank], 1) > 1:
        raise _Lost(f"two nodes have the number {node.rank}\n  fix: POPRUN_NODE_RANK differs on every node")
    try:
        store.wait(keys, patience)
    except RuntimeError:
        missing = ", ".join(str(rank) for rank, key in enumerate(keys) if not store.check([key]))
        raise _Lost(f"of {node.count} nodes these have not come in {patience.seconds} s: {missing}") from None
    return DynamicRendezvousHandler.from_backend(
        run_id="poprun",
        store=store,
        backend=C10dRendezvousBackend(store, "poprun"),
        min_nodes=node.count,
        max_nodes=node.count,
        local_addr=node.address if node.rank == 0 else _own_address(node),
        timeout=RendezvousTimeout(join=patience),
    )


def _own_address(node: Node) -> str:
    """The address of this host on the way to node 0, where other nodes can reach it too."""
    family, *_, address = socket.getaddrinfo(node.address, node.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return probe.getsockname()[0]
