"""The program `poprun`."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Sequence

from popengine.environment import NUM_NODES

from . import Log, guard, hosts
from .command_line import CommandLine, parse
from .topology import Node, local_instances, node_of, table


def main(words: Sequence[str] | None = None) -> int:
    """Run poprun with arguments (None: this process's), and return its exit code: 2 if it can't start."""
    words = sys.argv[1:] if words is None else words
    request = parse(words)
    log = Log(request.verbosity)
    if hosts.WATCH in os.environ:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    if not hasattr(os, "pidfd_open"):
        log.error(
            "error: this system lacks pidfd_open and prctl, by which poprun ends every process of a training\n"
            "  fix: use Linux 5.3 or newer; elsewhere torchrun starts instances: torchrun --nproc-per-node 2 train.py"
        )
        return 2
    try:
        if len(request.hosts) > 1 and NUM_NODES not in os.environ:
            _announce(request, request.hosts, log)
            return guard.run(lambda: hosts.work(request, words, log))
        node = node_of(os.environ)
        local_instances(request, node.count)
        if NUM_NODES not in os.environ:
            _announce(request, ["localhost"], log)
        elif hosts.WATCH not in os.environ and node.rank == 0:
            _announce(request, [f"node {rank}" for rank in range(node.count)], log)
    except ValueError as error:
        log.error(f"error: {error}")
        return 2
    folder = tempfile.mkdtemp(prefix="poprun-")
    try:
        return guard.run(lambda: _run_agent(request, node, log, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_agent(request: CommandLine, node: Node, log: Log, folder: str) -> int:
    """Run the agent and return its exit code."""
    from . import agent  # loads torch, which the guard does not use

    return agent.work(request, node, log, folder)


def _announce(request: CommandLine, names: Sequence[str], log: Log) -> None:
    """Log the options that have no effect, and print the topology if it is wanted."""
    if request.recorded:
        options = ", ".join(f"--{name}" for name in request.recorded)
        log.warning(f"of no effect without IPUs: {options}")
    if request.ignored_mpi:
        log.warning(f"of no effect without MPI: {' '.join(request.ignored_mpi)}")
    if (request.prints_topology or request.verbosity) and not request.is_elastic:
        print(table(request, names), flush=True)
    log.info(f"{request.instances} instances on {len(names)} hosts run {' '.join(request.program)}")


def _end_with_stdin() -> None:
    """Wait until standard input ends, since the poprun that started this one has; then send SIGTERM here."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), 15)
