"""The program `poprun`."""

import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress

from popengine.environment import NUM_NODES

from . import guard, hosts
from .command_line import CommandLine, parse
from .instance import print_start_error
from .shared_folder import record_path
from .topology import local_instance_count, node_from_variables, topology_table


def main(words: Sequence[str] | None = None) -> int:
    """Run poprun with command-line arguments (None: those of this process). Return the exit code of
    `run_node` or `run_on_hosts`; 2, if poprun can't start here."""
    words = sys.argv[1:] if words is None else words
    request = parse(words)
    if hosts.WATCH in os.environ:
        threading.Thread(target=_terminate_at_stdin_end, daemon=True).start()
    if not hasattr(os, "pidfd_open"):
        request.log.error(
            "error: this system lacks pidfd_open and prctl, by which poprun ends every process of a run\n"
            "  fix: use Linux 5.3 or newer; elsewhere torchrun starts instances: torchrun --nproc-per-node 2 train.py"
        )
        return 2
    try:
        node = node_from_variables(os.environ)
        is_elsewhere = len(request.hosts) > 1 or not all(map(hosts.is_here, request.hosts))
        starts_hosts = is_elsewhere and NUM_NODES not in os.environ
        local_instance_count(request, len(request.hosts) if starts_hosts else node.count)
    except ValueError as error:
        request.log.error(f"error: {error}")
        return 2
    if node.rank == 0 and hosts.WATCH not in os.environ:  # else another poprun of this run prints this
        names = [f"node {rank}" for rank in range(node.count)] if NUM_NODES in os.environ else ["localhost"]
        _print_summary(request, request.hosts if starts_hosts else names)
        if node.count > 1 and request.max_restarts and not request.is_elastic:
            request.log.warning(
                "--max-restarts has no effect if a scheduler starts a poprun on each node: let the scheduler start all"
                f" again\n  fix: or --num-instances {request.instances}:{request.instances} --checkpoint-dir DIR"
            )
    if starts_hosts:
        return guard.run_guarded(lambda: hosts.run_on_hosts(request, words, node.patience))

    path = dict(request.variables).get("PATH")
    # If there are several nodes, an instance says so: the other nodes learn of its failure.
    if node.count == 1 and shutil.which(request.program[0], os.F_OK, path) is None:
        return print_start_error(request.program, "No such file or directory")

    def run_agent() -> int:
        if request.is_elastic or node.count > 1:  # else no process uses a TCPStore
            # It prints pages about a store that is gone, and a line for each host without a name.
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        from . import agent  # loads torch, which the guard does not use

        return agent.run_node(request, node, folder)

    with tempfile.TemporaryDirectory(prefix="poprun-", ignore_cleanup_errors=True) as folder:
        code = guard.run_guarded(run_agent)
        if request.is_elastic:
            with suppress(OSError):  # so that the other nodes need not wait for its counter
                record_path(request.checkpoint_dir, folder).unlink()
        return code


def _print_summary(request: CommandLine, names: Sequence[str]) -> None:
    """Log words without effect, the instances and the program; print the topology if requested."""
    for warning in request.warnings:
        request.log.warning(warning)
    if (request.print_topology or request.verbosity) and not request.is_elastic:
        print(topology_table(request, names), flush=True)
    request.log.info(f"{request.instances} instances on {len(names)} hosts run {' '.join(request.program)}")


def _terminate_at_stdin_end() -> None:
    """Wait until the poprun that started this process closes its standard input; then send this process SIGTERM."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
