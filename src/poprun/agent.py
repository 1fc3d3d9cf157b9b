"""The agent: starts this node's instances in each round, and watches them.

torch.distributed.elastic starts the processes, redirects and prefixes their output, and ends them. Its own agent is
not used: poprun's leader decides when rounds end, and poprun names the instance that ended first.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std, start_processes

from popdist.signed_store import StoreError
from popengine.environment import SECRET, STACK, STORE, path_with_aliases

from . import Log
from . import instance as instance_program
from .command_line import CommandLine
from .election import Lost, Misfit
from .guard import exit_code
from .hangs import Hangs, stack_file
from .hosts import CONSEQUENCE, WATCH
from .nodes import Nodes, Round
from .topology import Node, cores_of, launch_of

PATIENCE = 5  # seconds for the other instances to end after one has failed
PATIENCE_AT_SIGNALS = 25  # seconds to save a checkpoint after SIGTERM; Kubernetes kills after 30
_POLL = 0.2  # seconds between two checks of the other nodes, and for instances that hang
_LAST_LINES = 20


def work(request: CommandLine, node: Node, log: Log, folder: str) -> int:
    """Connect this node to the others, and run its instances in all rounds.

    Returns: poprun's exit code: that of `Agent.run`, 2 for a `Misfit`, or 128 + n after signal n
    """
    if request.verbosity < 2:
        logging.disable(logging.CRITICAL)  # elastic logs what poprun prints itself
    for stream in (sys.stdout, sys.stderr):  # elastic copies the instances' output to these
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        nodes = Nodes(request, node, log)
        code = Agent(request, nodes, log, folder).run()
    except Misfit as error:
        log.error(f"error: {error}")
        return 2
    except SignalException as error:
        return 128 + error.sigval  # no `leave`: the other nodes may wait for this node to return
    nodes.leave()
    return code


@dataclass(frozen=True)
class Agent:
    """The agent of this node, which runs the node's instances."""

    request: CommandLine
    nodes: Nodes
    log: Log
    folder: str  # of the files with the output and the stacks of instances

    def run(self) -> int:
        """Run this node's instances in all rounds, and return poprun's exit code.

        Returns: 0 after success; if the training can't go on, the last round's exit code, else 1, or
            `CONSEQUENCE` for a poprun that another one has started
        """
        code = None  # exit code of the last round
        try:
            while code != 0 and (current := self.nodes.next_round()) is not None:
                code = self._run_round(current)
            return 0
        except Lost as error:
            if str(error):
                self.log.error(str(error))
            is_consequence = WATCH in os.environ and not self.request.is_elastic
            return code or (CONSEQUENCE if is_consequence else 1)

    def _run_round(self, current: Round) -> int | None:
        """Run this node's instances in one round.

        Returns: 0, if all instances of all nodes have succeeded; poprun's exit code, if an instance of
            this node has failed; None, if the round has ended for another reason
        """
        if self.request.is_elastic:
            places = ", ".join(f"{count} on {name}" for name, count in current.counts.items())
            self.log.warning(f"round {current.number} of {current.instances} instances begins: {places}")
        elif current.number:
            times = f"{current.number} of at most {self.request.max_restarts} times"
            self.log.warning(f"all instances start again, {times}")
        variables = [self._variables_of(current, local) for local in range(current.counts[self.nodes.name])]
        first = current.first_instance(self.nodes.name)
        with Instances(self.request, first, variables, self.folder) as instances:
            for instance, pid in instances.running.items():
                self.log.debug(f"instance {instance} is process {pid}")
            hangs = Hangs(self.nodes.store, current, self.folder, self.request, self.log)
            while (failed := instances.first_failure) is None:
                if instances.running:
                    with suppress(StoreError):  # `must_stop` handles a lost connection
                        hangs.kill(instances.running)
                elif self.nodes.record_success():
                    return 0
                if self.nodes.must_stop():
                    return None
                instances.wait(_POLL)
            first_node = self.nodes.record_failure()
        return self._report(current, instances, failed, first_node)

    def _variables_of(self, current: Round, local: int) -> dict[str, str]:
        """Return the environment variables that are added for instance number `local` of this node."""
        count = current.counts[self.nodes.name]
        instance = current.first_instance(self.nodes.name) + local
        master, _, port = current.address.rpartition(":")
        cores = cores_of(local, count) if self.request.numa_aware else []
        threads = max(1, len(cores) or len(os.sched_getaffinity(0)) // count)
        variables = {
            **launch_of(self.request, instance, current.instances, local).variables(),
            "LOCAL_WORLD_SIZE": str(count),
            "GROUP_RANK": str(list(current.counts).index(self.nodes.name)),
            "GROUP_WORLD_SIZE": str(len(current.counts)),
            "MASTER_ADDR": master,
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            **dict(self.request.variables),
            "POPRUN_CORES": ",".join(map(str, cores)),
            "TORCHELASTIC_RUN_ID": "poprun",
            # The round's number, which is equal on all nodes: the instances' rendezvous has it in its keys.
            "TORCHELASTIC_RESTART_COUNT": str(current.number),
            "PANDO_RESTARTS": str(int(os.environ.get("PANDO_RESTARTS", "0")) + current.number),
            STORE: self.nodes.address,
            SECRET: self.nodes.secret,
            STACK: stack_file(self.folder, current, instance),
        }
        variables["PYTHONPATH"] = path_with_aliases(variables["PYTHONPATH"])
        return variables

    def _report(self, current: Round, instances: Instances, failed: int, first_node: str) -> int:
        """Print which instance failed first, and its last lines if hidden; return poprun's exit code.

        Args:
            failed:     index of the instance of this node that failed first
            first_node: name of the node that recorded the first failure of the round
        """
        code, total = instances.exit_codes[failed], current.instances
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        early = [str(instance) for instance in takewhile(failed.__ne__, instances.exit_codes)]
        is_consequence = first_node != self.nodes.name
        if is_consequence:
            self.log.error(f"instance {failed} failed with {how}, after an instance of node {first_node}")
        elif early:  # perhaps too early: with fewer calls than the others
            several = "s" if len(early) > 1 else ""
            ends = f"instance{several} {', '.join(early)} of {total} ended first, with exit code 0"
            self.log.error(f"{ends}; then instance {failed} failed, with {how}")
        else:
            self.log.error(f"instance {failed} of {total} failed first, with {how}")
        if lines := instances.last_hidden_lines(failed):
            self.log.error(f"the last lines of instance {failed}:")
            print(*lines, sep="\n", file=sys.stderr, flush=True)
        return CONSEQUENCE if is_consequence and WATCH in os.environ else exit_code(code)


class Instances:
    """The processes of this node's instances in one round. Leaving the `with` statement ends them.

    Args:
        first:     index of this node's first instance among all instances
        variables: for each instance of this node, environment variables added to this process's
        folder:    of the files with the output of silenced instances
    """

    def __init__(
        self, request: CommandLine, first: int, variables: Sequence[dict[str, str]], folder: str
    ) -> None:
        places = range(len(variables))
        self._first, self._silent = first, {i: _silenced_streams(request, first + i) for i in places}
        tee = Std.ALL if request.tags_output else Std.NONE
        program = ("-I", "-S", instance_program.__file__, os.getpid(), *request.program)
        self._context = start_processes(
            name="instance",
            entrypoint=sys.executable,
            args=dict.fromkeys(places, program),
            envs=dict(enumerate(variables)),
            logs_specs=DefaultLogsSpecs(folder, self._silent, {i: tee & ~self._silent[i] for i in places}),
            log_line_prefixes={i: f"[{first + i}] " for i in places},
        )
        self.running = {first + i: pid for i, pid in self._context.pids().items()}
        self.exit_codes: dict[int, int] = {}  # by instance, in the order of their ends
        self._ends = {os.pidfd_open(pid): instance for instance, pid in self.running.items()}

    def __enter__(self) -> Instances:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, SignalException):
            self._context.close(error.sigval, PATIENCE_AT_SIGNALS)
        else:
            self._context.close(signal.SIGTERM, PATIENCE)
        for descriptor in self._ends:
            os.close(descriptor)

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` until an instance ends, and move it from `running` to `exit_codes`."""
        ended, _, _ = select.select(list(self._ends), [], [], seconds)
        for descriptor in ended:
            instance = self._ends.pop(descriptor)
            os.close(descriptor)
            _, status = os.waitpid(self.running.pop(instance), 0)
            self.exit_codes[instance] = os.waitstatus_to_exitcode(status)

    @property
    def first_failure(self) -> int | None:
        """Return the index of the instance that failed first; None, if no instance has failed."""
        return next((instance for instance, code in self.exit_codes.items() if code), None)

    def last_hidden_lines(self, instance: int) -> list[str]:
        """Return the last lines of an instance's silenced streams; an empty list, if none is silenced."""
        local, lines = instance - self._first, []
        for std, paths in ((Std.OUT, self._context.stdouts), (Std.ERR, self._context.stderrs)):
            if std in self._silent[local]:
                with suppress(OSError):
                    lines += Path(paths[local]).read_text(errors="replace").splitlines()[-_LAST_LINES:]
        return lines


def _silenced_streams(request: CommandLine, instance: int) -> Std:
    """Return the streams of an instance that go to a file instead of to the terminal."""
    if request.only_output not in (None, instance):
        return Std.ALL
    return Std.OUT if request.only_stdout not in (None, instance) else Std.NONE
