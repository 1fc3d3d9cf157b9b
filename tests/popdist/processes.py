"""Starts instances as a launcher would: small processes of one that has loaded torch already, with a time limit."""

import multiprocessing
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

from ports import free_port

from popengine.environment import Launch

CONTEXT = multiprocessing.get_context("forkserver")
# The last is what capture loads at its first use, 1.5 s of each process.
CONTEXT.set_forkserver_preload(
    ["torch", "poptorch.executor", "popdist.poptorch", "popdist.collectives", "torch._dynamo"]
)
LIMIT = 600  # seconds until a test that hangs fails; a starved machine needs more than 240 for some


@dataclass
class Ended:
    """How an instance ended: what its function returned, or the error that it raised."""

    value: Any = None
    error: str = ""


def launches(instances, replicas=1, parts=1):
    """The environment of each instance; `parts`: the instances of a replica."""
    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "POPDIST_INIT_TIMEOUT": str(LIMIT)}
    return [
        {
            **Launch(
                instances * replicas // parts, replicas, 1, i * replicas // parts, i, instances, i
            ).variables(),
            **where,
        }
        for i in range(instances)
    ]


def start(function, environments, *args):
    """Processes that run `function(*args)`, and the ends of pipes where each leaves how it ended."""
    started = []
    for environment in environments:
        here, there = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=_child, args=(function, environment, there, sys.path, args))
        process.start()
        there.close()
        started.append((process, here))
    return started


def wait_for(path, started):
    """Wait until a process of `started` has made a file."""
    until = time.monotonic() + LIMIT
    while not path.exists():
        assert time.monotonic() < until and all(process.is_alive() for process, _ in started), finish(started)
        time.sleep(0.02)


def finish(started):
    """Wait for all of them, and kill what takes too long."""
    until = time.monotonic() + LIMIT
    try:
        return [_ended(process, here, until) for process, here in started]
    finally:
        for process, _ in started:
            process.kill()


def run(function, instances, *args, replicas=1, parts=1):
    """Each instance's end after popdist.init() and `function(*args)`."""
    return finish(start(function, launches(instances, replicas, parts), *args))


def _ended(process, here, until):
    assert here.poll(max(until - time.monotonic(), 0.1)), f"no answer from {process.name} in {LIMIT} s"
    try:
        ended = here.recv()
    except EOFError:
        ended = Ended()
    process.join(max(until - time.monotonic(), 0.1))
    return ended


def _child(function, environment, there, path, args):
    sys.path[:] = path
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)
    ended = Ended()
    try:
        ended.value = function(*args)
    except BaseException as error:
        ended.error = str(error)
    there.send(ended)
    there.close()
