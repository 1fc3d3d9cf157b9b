"""The first meeting: instances that know an address find each other, within a time limit."""

from __future__ import annotations

import atexit
import os
import re
import time
from datetime import timedelta
from queue import Empty
from typing import Any

import torch.distributed as dist

from popengine.environment import Launch
from popengine.errors import Error
from popengine.run.instances import this_process
from popengine.run.instances.meeting import in_a_thread

TIMEOUT = "POPDIST_INIT_TIMEOUT"
_PATIENCE = 0.2  # seconds; an interrupt wakes nobody who waits


def meet(launch: Launch) -> None:
    """Meet the other instances, once.

    Raises:
        Error: no address, one in use, or not everybody came
    """
    if dist.is_initialized():
        this_process.current()
        return
    seconds = float(os.environ.get(TIMEOUT, "600"))
    address, port = _address()
    outcome = in_a_thread(lambda: _meet(launch, address, port, seconds))
    while True:
        try:
            store, error = outcome.get(timeout=_PATIENCE)
            break
        except Empty:
            continue
    if error is not None:
        raise error
    this_process.open_with(store, launch.instance, launch.instances)
    atexit.register(this_process.leave)


def _address() -> tuple[str, int]:
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if "SLURM_STEP_ID" in os.environ:  # srun tells where its tasks run, but no address
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


def _meet(launch: Launch, address: str, port: int, seconds: float) -> Any:
    until = time.monotonic() + seconds
    store = _store(launch, address, port, seconds)
    store.set(f"here/{launch.instance}", "1")
    missing = list(range(launch.instances))
    while missing := [other for other in missing if not store.check([f"here/{other}"])]:
        if time.monotonic() > until:
            raise Error(
                f"popdist.init(): after {seconds:g} s instance{'s' if len(missing) > 1 else ''}"
                f" {', '.join(map(str, missing))} of {launch.instances} had not come to {address}:{port}\n"
                f"  fix: see what they print; {TIMEOUT} is the limit in seconds"
            )
        time.sleep(0.02)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("torch", store),
        rank=launch.instance,
        world_size=launch.instances,
    )
    return store


def _store(launch: Launch, address: str, port: int, seconds: float) -> Any:
    """The store at the address: instance 0 keeps it, or torchrun's agent."""
    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keeps = launch.instance == 0 and not of_agent
    try:
        store = dist.TCPStore(
            address, port, None, keeps, timeout=timedelta(seconds=seconds), wait_for_workers=False
        )
    except RuntimeError as error:
        if keeps:
            raise Error(
                f"popdist.init(): instance 0 can't use {address}:{port}: {str(error).splitlines()[0]}\n"
                "  fix: MASTER_PORT must be a free port, and MASTER_ADDR this host; poprun chooses both"
            ) from error
        raise Error(
            f"popdist.init(): instance {launch.instance} found nobody at {address}:{port} in {seconds:g} s:"
            f" {str(error).splitlines()[0]}\n"
            "  fix: MASTER_ADDR must be the host of instance 0, and MASTER_PORT its port, in all instances;"
            f" {TIMEOUT} is the limit in seconds"
        ) from error
    if of_agent:  # it outlives restarts
        return dist.PrefixStore(f"attempt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return store
