"""The connection of all instances by `popdist.init`, through a store at one address, within a time limit."""

import atexit
import os
import re
import socket
import struct
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from popengine.environment import (
    AGENT_STORE,
    INIT_TIMEOUT,
    MAX_RESTARTS,
    RESTART,
    RUN_ID,
    STORE,
    Launch,
    is_on_one_host,
    read_seconds,
)
from popengine.errors import Error
from popengine.run.instances import process_group

from .store import connect as connect_store
from .store import is_loopback, own_address, reachable_name, serve

_SIOCGIFADDR = 0x8915
_PATIENCE_AT_EXIT = 2.0  # seconds
_served: dist.Store | None = None  # the store that this process serves


def connect(launch: Launch) -> None:
    """Initialize torch.distributed (unless it is) and Pando's process group for all instances; disconnect at exit."""
    if dist.is_initialized():
        process_group.current()
        return
    seconds = read_seconds(INIT_TIMEOUT, 600)
    atexit.register(_disconnect_at_exit)
    process_group.call_in_thread(lambda: _connect_instances(launch, seconds))


def _disconnect_at_exit() -> None:
    """Write to the store that this process ends, and wait for torch's threads in this process. The process that serves
    the store first waits a while for all others to do so, because torch prints pages about a store that is gone."""
    process_group.announce_end()
    if _served is not None:
        process_group.await_other_ends(_PATIENCE_AT_EXIT)
    process_group.join_torch_threads(_PATIENCE_AT_EXIT)


def _store_address() -> tuple[str, int]:
    """Return the store's host and port, from variables of poprun, torchrun, Slurm or the user."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if "SLURM_STEP_ID" in os.environ:  # srun names the nodes of its tasks, but sets no address
        first = re.match(r"([^\[,]+)(?:\[(\d+))?", os.environ.get("SLURM_STEP_NODELIST", ""))
        address = address or (first and "".join(filter(None, first.groups())))
        port = port or str(20000 + int(os.environ.get("SLURM_JOB_ID", "0")) % 20000)
    if not address or not port.isdecimal():
        raise Error(
            f"popdist.init(): MASTER_ADDR is {address!r} and MASTER_PORT is {port!r}; they must say where instance 0"
            " is\n"
            "  fix: start the program with poprun or torchrun, which set them; else export both, equal in all"
            " instances: a host that all can reach, and a free port of it"
        )
    return address, int(port)


def _connect_instances(launch: Launch, seconds: float) -> None:
    """Wait until all instances use the store; then create torch's default process group and Pando's."""
    address, port = _store_address()
    until = time.monotonic() + seconds
    store = _open_store(launch, address, port, seconds)
    greet = None
    if MAX_RESTARTS in os.environ and os.environ.get(AGENT_STORE) == "True":
        store, greet = _store_of_start(launch, store, until)
    pando_store, torch_store = dist.PrefixStore("pando", store), dist.PrefixStore("torch", store)
    group = process_group.ProcessGroup(pando_store, launch.instance, launch.instances)
    missing = group.await_peers("popdist.init()", until - time.monotonic(), meanwhile=greet)
    if missing:
        raise Error(
            f"popdist.init(): after {seconds:g} s instance{'s' if len(missing) > 1 else ''}"
            f" {', '.join(map(str, missing))} of {launch.instances} had not come to {address}:{port}\n"
            f"  fix: see what they print; {INIT_TIMEOUT} is the limit in seconds"
        )
    interface = _network_interface(address)
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # else gloo resolves the host's name
    dist.init_process_group("gloo", store=torch_store, rank=launch.instance, world_size=launch.instances)
    process_group.set_current(group)


def _store_of_start(
    launch: Launch, store: dist.Store, until: float
) -> tuple[dist.Store, Callable[[], None] | None]:
    """Return a store for this start of a run by torchrun, and a function to call on instance 0 while its peers come (on
    peers None). Torchrun's store has keys of earlier starts, and its nodes count restarts differently, so instance 0
    gives the start a name."""
    start_id, greeted = uuid.uuid4().hex, set[bytes]()

    def greet() -> None:
        for peer in range(1, launch.instances):
            if store.check([f"come/{peer}"]) and (name := store.get(f"come/{peer}")) not in greeted:
                store.set(f"start/{name.decode()}", start_id)
                greeted.add(name)

    if launch.instance == 0:
        return dist.PrefixStore(start_id, store), greet
    store.set(f"come/{launch.instance}", start_id)
    try:
        store.wait([f"start/{start_id}"], timedelta(seconds=max(1.0, until - time.monotonic())))
    except RuntimeError as error:
        raise Error(
            "popdist.init(): instance 0 had not come\n"
            f"  fix: see what it prints; {INIT_TIMEOUT} is the limit in seconds"
        ) from error
    return dist.PrefixStore(store.get(f"start/{start_id}").decode(), store), None


def _open_store(launch: Launch, address: str, port: int, seconds: float) -> dist.Store:
    """Return a connection to the store of poprun or torchrun. Without both, instance 0 serves a store."""
    global _served
    is_served = os.environ.get(AGENT_STORE) == "True"
    if not (is_served or is_on_one_host()):
        address = reachable_name(address)
    try:
        if STORE in os.environ:
            store = dist.FileStore(os.environ[STORE])
            store.set_timeout(timedelta(seconds=seconds))
        elif launch.instance or is_served:
            store = connect_store(address, port, seconds)
        else:
            store = _served = serve(address, port, seconds)
    except (OSError, RuntimeError) as error:
        if launch.instance == 0 and not is_served:
            raise Error(
                f"popdist.init(): instance 0 can't use {address}:{port}: {error}\n"
                "  fix: MASTER_PORT must be a free port, and MASTER_ADDR this host; poprun chooses both"
            ) from error
        raise Error(
            f"popdist.init(): instance {launch.instance} found no store at {address}:{port} in {seconds:g} s:"
            f" {str(error).splitlines()[0]}\n"
            "  fix: MASTER_ADDR must be the host of instance 0, and MASTER_PORT its port, in all instances;"
            f" {INIT_TIMEOUT} is the limit in seconds"
        ) from error
    counts = [] if MAX_RESTARTS in os.environ else [RESTART]
    names = [os.environ[name] for name in (RUN_ID, *counts) if name in os.environ]
    return dist.PrefixStore("/".join(["popdist", *names]), store)


def _network_interface(address: str) -> str | None:
    """Return the name of the network interface to `address`, loopback's if all instances are on this host;
    None if unknown."""
    names = [name for _, name in socket.if_nameindex()]
    with suppress(OSError):
        ip = own_address(address)
        if is_on_one_host() or is_loopback(ip):
            return next((name for name in ("lo", "lo0") if name in names), None)
        if sys.platform == "linux":
            import fcntl

            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
                for name in names:
                    request = struct.pack("256s", name.encode()[:15])
                    with suppress(OSError):  # an interface without IPv4
                        if socket.inet_ntoa(fcntl.ioctl(any_socket, _SIOCGIFADDR, request)[20:24]) == ip:
                            return name
    return None
