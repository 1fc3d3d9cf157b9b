"""Several hosts: a poprun on each, started by ssh, which are nodes of one training."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from popengine.environment import NODE_RANK, NUM_NODES

from .command_line import Request
from .guard import exit_code
from .log import Log
from .topology import local_instances

_HERE = ("localhost", socket.gethostname())
_PORT = "29500"
_PATIENCE = 8  # seconds for a host to end after another has failed: more than it gives its instances
WATCH = "POPRUN_ENDS_WITH_STDIN"  # set where poprun ends as soon as its standard input does


def work(request: Request, words: Sequence[str], log: Log) -> int:
    """Run poprun with the same words on every host; the exit code of the first that failed."""
    local_instances(request, len(request.hosts))
    commands = [_command(request, words, rank) for rank in range(len(request.hosts))]
    running: dict[int, subprocess.Popen[bytes]] = {}
    code = 0
    try:
        for rank, command in enumerate(commands):
            log.debug(shlex.join(command))
            running[rank] = subprocess.Popen(command, stdin=subprocess.PIPE)
        deadline = float("inf")
        while running and time.monotonic() < deadline:
            for rank, process in list(running.items()):
                ended = process.poll()
                if ended is None:
                    continue
                del running[rank]
                if ended and not code:
                    code = exit_code(ended)
                    log.error(f"host {request.hosts[rank]} failed first, with exit code {code}{_hint(code)}")
                    deadline = time.monotonic() + _PATIENCE
                    _end(running)
            time.sleep(0.05)
    finally:
        _end(running)
        for process in running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE)
    return code


def _end(running: dict[int, subprocess.Popen[bytes]]) -> None:
    """Ssh hands no signals over, but the end of standard input."""
    for process in running.values():
        assert process.stdin is not None
        process.stdin.close()


def _hint(code: int) -> str:
    return (
        ": ssh could not connect\n  fix: `ssh HOST true` has to work without a question"
        if code == 255
        else ""
    )


def _command(request: Request, words: Sequence[str], rank: int) -> list[str]:
    host = request.hosts[rank]
    address = os.environ.get("MASTER_ADDR") or request.hosts[0]
    if address == "localhost" and any(name not in _HERE for name in request.hosts):
        address = socket.gethostname()  # as the others know this host
    variables = {
        NUM_NODES: str(len(request.hosts)),
        NODE_RANK: str(rank),
        "MASTER_ADDR": address,
        "MASTER_PORT": os.environ.get("MASTER_PORT", _PORT),
        WATCH: "1",
        **dict(request.variables),
    }
    settings = [f"{name}={value}" for name, value in variables.items()]
    command = ["env", *settings, sys.executable, "-m", "poprun", *words]
    if host in _HERE:
        return command
    remote = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}"
    return ["ssh", "-o", "BatchMode=yes", host, remote]
