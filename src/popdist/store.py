"""The store through which the processes of a run meet: torch's TCPStore, which here listens at one address only.

Like gloo, the store serves every caller that reaches it (SECURITY.md).
"""

import ipaddress
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

_OUTSIDE_ADDRESS = "192.0.2.1"  # reserved for documentation: reached by the default route
_PAUSE = 0.05  # seconds between two attempts
T = TypeVar("T")


def serve(host: str, port: int, seconds: float) -> dist.TCPStore:
    """Return a store that this process serves at a name or address of this host (port 0: any free port). `seconds`:
    how long the name of a new pod may have no address, and the limit of the store's waits. Raises: OSError"""
    family, address = _retry(lambda: _resolve_host(host), socket.gaierror, seconds)
    listening = socket.create_server((address, port), family=family, backlog=1024)
    return dist.TCPStore(
        address,
        listening.getsockname()[1],
        is_master=True,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),  # without it torch listens on all interfaces
        # Torch for Windows lacks libuv; the other kind serves one caller at a time.
        use_libuv=sys.platform != "win32",
    )


def connect(host: str, port: int, seconds: float) -> dist.TCPStore:
    """Return a connection to the store of another process, which may begin to listen within `seconds`. Raises: OSError;
    RuntimeError, if something else listens there"""
    return _retry(lambda: _connect_now(host, port, seconds), OSError, seconds)


def _retry(work: Callable[[], T], expected: type[OSError], seconds: float) -> T:
    """Return the result of `work`; call it again for `seconds` if it raises an `expected` error."""
    until = time.monotonic() + seconds
    while True:
        try:
            return work()
        except expected:
            if time.monotonic() > until:
                raise
            time.sleep(_PAUSE)


def ping(host: str, port: int, seconds: float) -> None:
    """Ask a store whether it has a key. It must accept within `seconds`; a store that is stopped blocks this function.
    Raises: OSError or RuntimeError, if there is no store, or it has no descriptor left for a connection"""
    _connect_now(host, port, seconds).check(["ping"])


def _connect_now(host: str, port: int, seconds: float) -> dist.TCPStore:
    socket.create_connection((host, port), seconds).close()  # torch prints pages if a connection is refused
    return dist.TCPStore(host, port, timeout=timedelta(seconds=seconds), wait_for_workers=False)


def _resolve_host(host: str) -> tuple[socket.AddressFamily, str]:
    """Return the family and the text of a host's address: IPv4, or IPv6 if it has no other."""
    addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    family, *_, address = min(addresses, key=lambda entry: entry[0] != socket.AF_INET)
    return family, str(address[0])


def reachable_name(host: str) -> str:
    """Return `host`, or the address of this host's default route if `host` is a name with a loopback address other
    than "localhost": Debian maps a host's own name to 127.0.1.1, which other hosts can't reach."""
    with suppress(OSError):
        address = _resolve_host(host)[1]
        if is_loopback(address) and host not in ("localhost", address):
            return own_address()
    return host


def own_address(host: str = _OUTSIDE_ADDRESS) -> str:
    """Return this host's IP address on the route to `host`, which need not answer. Raises: OSError"""
    family, address = _resolve_host(reachable_name(host))
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        return probe.getsockname()[0]


def is_loopback(address: str) -> bool:
    """Return whether an IP address is a loopback address, which only this host reaches."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
