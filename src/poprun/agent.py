"""The agent: starts this node's instances in each round, and watches them.

torch.distributed.elastic starts the processes, redirects and prefixes their output, and ends them. Its own agent is
not used: `nodes.py` decides when rounds end, and poprun names the instance that ended first.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import time
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import TextIO

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std, start_processes

from popengine.environment import INIT_TIMEOUT, LOST_PEER, RESTART, path_with_aliases

from . import instance as instance_program
from .command_line import CommandLine
from .guard import shell_exit_code
from .hosts import CONSEQUENCE, WATCH
from .nodes import ElasticNode, NodeOfRun
from .shared_folder import RunLost
from .topology import Node, instance_launch, numa_cores, share_text

PATIENCE = 5  # seconds for the other instances to end after one has failed
PATIENCE_AT_SIGNALS = 25  # seconds to save a checkpoint after SIGTERM; Kubernetes kills after 30
_PATIENCE_FOR_CAUSE = 20  # seconds for another instance to fail, if those that failed had lost a peer
_POLL = 0.2  # seconds between two checks of the other nodes
_LAST_LINES = 20
_TAG_END = "\0"  # stands between a line's tag and the line


def run_node(request: CommandLine, description: Node, folder: str) -> int:
    """Run the instances of this node in all rounds. Return poprun's exit code: 0 after success; 128 + n after signal n;
    CONSEQUENCE if the run has failed on another host, under `run_on_hosts`; else that of an instance of this node or
    of a `RunLost`. `folder` is a temporary folder of this poprun."""
    if request.verbosity < 2:
        logging.disable(logging.CRITICAL)  # elastic logs what poprun prints itself
    for name in ("stdout", "stderr"):  # elastic copies the instances' output to these
        setattr(sys, name, _WholeLines(getattr(sys, name)))
    code: int | None = None  # of the last round
    node, is_end = None, False  # after a signal the other nodes may wait for this node to come back
    try:
        node = (ElasticNode if request.is_elastic else NodeOfRun)(request, description, folder)
        while code != 0 and node.wait_for_round():
            code = _run_round(node)
        is_end = True
        return 0
    except RunLost as error:
        is_end = True
        if str(error):
            request.log.error(f"error: {error}" if error.code == 2 else str(error))
        return code or error.code
    except SignalException as error:
        return 128 + error.sigval
    finally:
        if node is not None:
            node.close(is_end)


def _run_round(node: NodeOfRun) -> int | None:
    """Start this node's instances, wait until they or the round end, and end those that still run. Return 0 after
    success, the exit code of a failed instance of this node, else None."""
    current, request, log = node.round, node.request, node.request.log
    if request.is_elastic:
        counts = ", ".join(f"{count} on {name}" for name, count in current.counts.items())
        log.warning(f"round {current.number} of {current.instances} instances begins: {counts}")
    elif current.number:
        times = f"{current.number} of at most {request.max_restarts} times"
        log.warning(f"all instances start again, {times}")
    with Instances(node) as instances:
        for instance, pid in instances.running.items():
            share = share_text(instance_launch(request, current.instances, instance))
            log.debug(f"instance {instance} is process {pid}, with {share}")
        while (failed := instances.first_failure()) is None:
            state = node.round_state(is_done=not instances.running and not instances.failed)
            if state == "finished":
                return 0
            if state != "runs":
                instances.wait(0)
                if not instances.failed:
                    return None
                failed = instances.failed[0]
                break
            instances.wait(_POLL)
        first_place = node.end_round(instances.has_lost_peer(failed))
    return _report_failure(node, instances, failed, first_place)


def _instance_variables(node: NodeOfRun, local: int) -> dict[str, str]:
    """Return the environment variables to add for the instance with index `local` among this node's."""
    current, request, name = node.round, node.request, node.name
    count, instance = current.counts[name], current.first_instance(name) + local
    master, _, port = current.address.rpartition(":")
    cores = numa_cores(local, count) if request.numa_aware else []
    threads = max(1, len(cores) or len(os.sched_getaffinity(0)) // count)
    given = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), **dict(request.variables)}
    return {
        **instance_launch(request, current.instances, instance, local).variables(),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": str(list(current.counts).index(name)),
        "GROUP_WORLD_SIZE": str(len(current.counts)),
        "MASTER_ADDR": master,
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        INIT_TIMEOUT: os.environ.get(INIT_TIMEOUT, str(node.node.patience)),
        **given,
        "PYTHONPATH": path_with_aliases(given["PYTHONPATH"]),
        "POPRUN_CORES": ",".join(map(str, cores)),
        RESTART: str(current.number),
        "PANDO_RESTARTS": str(int(os.environ.get("PANDO_RESTARTS", "0")) + current.number),
        **node.store_variables(),
        LOST_PEER: str(node.lost_peer_path(instance)),
    }


def _report_failure(node: NodeOfRun, instances: Instances, failed: int, first_place: str) -> int:
    """Log which instance of this node `failed` first, and its last lines if silenced; return poprun's exit code.
    `first_place`: where the round's first failure was, if not here."""
    code, total, log = instances.exit_codes[failed], node.round.instances, node.request.log
    how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    before = takewhile(failed.__ne__, instances.exit_codes)
    early = [str(instance) for instance in before if not instances.exit_codes[instance]]
    if first_place:
        log.error(f"instance {failed} failed with {how}, after an instance of {first_place}")
    elif early:  # perhaps the cause: a peer that makes fewer calls ends too early
        several = "s" if len(early) > 1 else ""
        ends = f"instance{several} {', '.join(early)} of {total} ended first, with exit code 0"
        log.error(f"{ends}; then instance {failed} failed, with {how}")
    else:
        log.error(f"instance {failed} of {total} failed first, with {how}")
    if lines := instances.last_silenced_lines(failed):
        log.error(f"the last lines of instance {failed}:")
        print(*lines, sep="\n", file=sys.stderr, flush=True)
    return CONSEQUENCE if first_place and WATCH in os.environ else shell_exit_code(code)


class Instances:
    """The processes of this node's instances in one round, started at once. Leaving the `with` ends them."""

    def __init__(self, node: NodeOfRun) -> None:
        self._node, request, indices = node, node.request, range(node.round.counts[node.name])
        self._first = first = node.round.first_instance(node.name)
        self._silent = {i: _silenced_streams(request, first + i) for i in indices}
        tee = Std.ALL if request.tags_output else Std.NONE
        program = ("-I", "-S", instance_program.__file__, os.getpid(), *request.program)
        self._context = start_processes(
            name="instance",
            entrypoint=sys.executable,
            args=dict.fromkeys(indices, program),
            envs={i: _instance_variables(node, i) for i in indices},
            logs_specs=DefaultLogsSpecs(
                node.folder, self._silent, {i: tee & ~self._silent[i] for i in indices}
            ),
            log_line_prefixes={i: f"[{first + i}] {_TAG_END}" for i in indices},
        )
        self.running = {first + i: pid for i, pid in self._context.pids().items()}
        self.exit_codes: dict[int, int] = {}  # by instance, in the order of their ends
        self._waits_until = 0.0  # the time until which the cause of the first failure is waited for
        self._ends = {os.pidfd_open(pid): instance for instance, pid in self.running.items()}

    def __enter__(self) -> Instances:
        return self

    def __exit__(self, cls: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, SignalException):
            self._context.close(error.sigval, PATIENCE_AT_SIGNALS)
        else:
            self._context.close(signal.SIGTERM, PATIENCE)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for descriptor in self._ends:
            os.close(descriptor)

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` until an instance ends; move each ended one from `running` to `exit_codes`."""
        poll = select.poll()  # select.select takes no descriptor above 1023
        for descriptor in self._ends:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(1000 * seconds):
            instance = self._ends.pop(descriptor)
            os.close(descriptor)
            _, status = os.waitpid(self.running.pop(instance), 0)
            self.exit_codes[instance] = os.waitstatus_to_exitcode(status)

    @property
    def failed(self) -> list[int]:
        """Return the indices of the instances that have failed, in the order of their ends."""
        return [instance for instance, code in self.exit_codes.items() if code]

    def has_lost_peer(self, instance: int) -> bool:
        """Return whether an instance has lost the connection to a peer that failed or ended."""
        return self._node.lost_peer_path(instance).exists()

    def first_failure(self) -> int | None:
        """Return the index of the instance that failed first; None if no instance has failed. An instance that
        failed because it lost a peer is the first only if no other one fails within 20 s."""
        causes = [instance for instance in self.failed if not self.has_lost_peer(instance)]
        if causes or not self.failed:
            return next(iter(causes), None)
        self._waits_until = self._waits_until or time.monotonic() + _PATIENCE_FOR_CAUSE
        return self.failed[0] if not self.running or time.monotonic() > self._waits_until else None

    def last_silenced_lines(self, instance: int) -> list[str]:
        """Return the last lines of an instance's silenced streams; [] if none of its streams is silenced."""
        local, lines = instance - self._first, []
        for std, paths in ((Std.OUT, self._context.stdouts), (Std.ERR, self._context.stderrs)):
            if std in self._silent[local]:
                with suppress(OSError):
                    lines += Path(paths[local]).read_text(errors="replace").splitlines()[-_LAST_LINES:]
        return lines


class _WholeLines:
    """A stream that writes tagged lines whole: the beginning of a line waits for the line's end, or for `flush`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._begun = stream, dict[str, str]()

    def write(self, text: str) -> None:
        tag, is_tagged, part = text.partition(_TAG_END)
        line = self._begun.pop(tag, tag) + part if is_tagged else text
        if is_tagged and not part.endswith("\n"):
            self._begun[tag] = line
        else:
            print(line, end="", file=self._stream, flush=True)

    def flush(self) -> None:
        for tag in tuple(self._begun):
            self.write(f"{tag}{_TAG_END}\n")


def _silenced_streams(request: CommandLine, instance: int) -> Std:
    """Return which of an instance's standard streams are written to a file instead of to the terminal."""
    if request.only_output_from_instance not in (None, instance):
        return Std.ALL
    return Std.OUT if request.only_stdout_from_instance not in (None, instance) else Std.NONE
