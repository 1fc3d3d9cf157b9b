"""Ports for programs that tests start."""

import secrets
import socket
from contextlib import suppress
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # Linux
_FIRST = 10_000


def free_port() -> int:
    """Return a port at which nothing listens, and which the system gives to no socket that names no port: on a busy
    machine many of these are opened before the program has started that is to listen there."""
    end = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32_768
    while True:
        port = _FIRST + secrets.randbelow(end - _FIRST)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
