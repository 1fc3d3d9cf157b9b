"""Starts a poprun on each of several hosts by ssh, and all of them again after a failure."""

import os
import secrets
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from popengine.environment import NODE_RANK, NUM_NODES, RUN_ID

from .command_line import CommandLine
from .guard import shell_exit_code
from .topology import PORT

_HERE = ("localhost", socket.gethostname())
_PATIENCE = 30  # seconds for a host to end after another has failed: longer than `agent.PATIENCE_AT_SIGNALS`
WATCH = "POPRUN_ENDS_WITH_STDIN"  # environment variable: if set, poprun ends when its standard input ends
CONSEQUENCE = 75  # exit code of a poprun with WATCH that ended because another host failed


def is_here(host: str) -> bool:
    """Return whether a host name or address is one of this machine."""
    with suppress(OSError), socket.create_server((host, 0)):
        return True
    return host in _HERE


def run_on_hosts(request: CommandLine, words: Sequence[str], patience: float) -> int:
    """Run poprun with the arguments `words` on every host; return 0, or the first failed host's exit code. After a
    failure all popruns are ended and started again, `request.max_restarts` times; but an elastic run fails only if all
    hosts fail. `patience`: seconds for the host that failed first to end, after another has ended"""
    attempt = 0
    while (code := _run_once(request, words, patience, attempt)) and not request.is_elastic:
        if attempt == request.max_restarts:
            break
        attempt += 1
        times = f"{attempt} of at most {request.max_restarts} times"
        request.log.warning(f"all instances start again, {times}")
    return code


def _run_once(request: CommandLine, words: Sequence[str], patience: float, attempt: int) -> int:
    """Run poprun on every host once, as restart number `attempt`; return an exit code as `run_on_hosts` does."""
    run_id = secrets.token_hex(8)
    running: dict[int, subprocess.Popen[bytes]] = {}
    code, has_succeeded = 0, False
    try:
        for rank in range(len(request.hosts)):
            running[rank] = _start_poprun(request, rank, words, run_id, attempt)
        deadline = float("inf")
        while running and code in (0, CONSEQUENCE) and time.monotonic() < deadline:
            time.sleep(0.05)
            for rank in [rank for rank, process in running.items() if process.poll() is not None]:
                host, ended = request.hosts[rank], shell_exit_code(running.pop(rank).returncode)
                has_succeeded = has_succeeded or not ended
                if ended and request.is_elastic and (running or has_succeeded):
                    request.log.warning(f"host {host} ended with exit code {ended}: the others go on")
                elif ended == CONSEQUENCE:
                    code = code or ended
                    deadline = min(deadline, time.monotonic() + patience)
                elif ended and code in (0, CONSEQUENCE):
                    code = ended
                    request.log.error(f"host {host} failed first, with exit code {ended}")
                    if ended == 255:
                        request.log.error(
                            "ssh could not connect, or lost the connection\n"
                            "  fix: `ssh HOST true` has to work without a question"
                        )
    finally:
        for process in running.values():
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()  # which ends the poprun there: ssh does not forward signals
        for process in running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE)
    return 1 if code == CONSEQUENCE else code


def _start_poprun(
    request: CommandLine, rank: int, words: Sequence[str], run_id: str, attempt: int
) -> subprocess.Popen[bytes]:
    """Start the poprun of host number `rank`, by ssh or here; return its process. Its environment variables are sent
    to its standard input, since all users of a host see command lines."""
    host, address = request.hosts[rank], os.environ.get("MASTER_ADDR") or request.hosts[0]
    if address == "localhost" and not set(request.hosts) <= set(_HERE):
        address = socket.gethostname()  # the name by which the other hosts know this one
    variables = {
        NUM_NODES: str(len(request.hosts)),
        NODE_RANK: str(rank),
        "MASTER_ADDR": address,
        "MASTER_PORT": os.environ.get("MASTER_PORT", str(PORT)),
        WATCH: "1",
        "PANDO_RESTARTS": str(int(os.environ.get("PANDO_RESTARTS", "0")) + attempt),
        RUN_ID: run_id,
        **dict(request.variables),
    }
    settings = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
    poprun = shlex.join([sys.executable, "-m", "poprun", *words])
    count = settings.count("\n")
    script = f'eval "$(head -n {count})" && cd {shlex.quote(os.getcwd())} && exec {poprun}'
    # ssh ends 30 s after a host has died. `--`: a host whose name begins with a dash is no option.
    options = ("-oBatchMode=yes", "-oServerAliveInterval=10", "--")
    ssh = ["ssh", *options, host, f"exec sh -c {shlex.quote(script)}"]
    command = ["sh", "-c", script] if host in _HERE else ssh
    request.log.debug(shlex.join(command))
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # ssh has failed: `run_on_hosts` reads its exit code
        process.stdin.write(settings.encode())
        process.stdin.flush()
    return process
