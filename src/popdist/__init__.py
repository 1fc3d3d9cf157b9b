"""Processes that train one model together: their number, the index of this process, and how they connect.

    import popdist

    if popdist.isPopdistEnvSet():
        popdist.init()
        opts = popdist.poptorch.Options(ipus_per_replica=4)

Without a launcher there is one instance with one replica.
"""

import os
from collections.abc import Callable, Iterable
from types import FunctionType as _FunctionType
from typing import Any

from popengine import environment as _environment
from popengine.errors import did_you_mean as _did_you_mean
from popengine.errors import without_internal_frames as _without_internal_frames

_read_launch = _environment.read_launch


def isPopdistEnvSet() -> bool:
    """Return whether poprun started this process, or another launcher started several processes."""
    return _environment.is_launched(os.environ)


def getNumTotalReplicas() -> int:
    """Return the number of replicas in all instances."""
    return _read_launch().total_replicas


def getNumLocalReplicas() -> int:
    """Return the number of replicas in this instance."""
    return _read_launch().local_replicas


def getNumIpusPerReplica() -> int:
    """Return the number of ipus of a replica: the value of `poprun --ipus-per-replica`, by default 1."""
    return _read_launch().ipus_per_replica


def checkNumIpusPerReplica(num_ipus: int) -> bool:
    """Return whether `num_ipus` is `getNumIpusPerReplica()`."""
    return num_ipus == getNumIpusPerReplica()


def getNumInstances() -> int:
    """Return the number of processes that train together."""
    return _read_launch().instances


def getNumInstancesPerReplica() -> int:
    """Return the number of processes that run one replica together, each with some of its ipus; mostly 1."""
    return _read_launch().instances_per_replica


def getInstanceIndex() -> int:
    """Return the index of this process, from 0, among those that train together."""
    return _read_launch().instance


def getLocalInstanceIndex() -> int:
    """Return the index of this instance, from 0, among those of its host."""
    return _read_launch().local_instance


def getReplicaIndexOffset() -> int:
    """Return the index of this instance's first replica among the replicas of all instances."""
    return _read_launch().replica_offset


def getDeviceId(ipus_per_replica: int = 0) -> int:
    """Return the index of this instance's first ipu among all ipus of its host.

    Args: ipus_per_replica: ipus of a replica; 0: the number that was given to poprun
    """
    launch = _read_launch()
    ipus = (
        launch.local_replicas * (ipus_per_replica or launch.ipus_per_replica) // launch.instances_per_replica
    )
    return launch.local_instance * ipus


def init() -> None:
    """Connect to the other instances. Call it once, before any collective; with one instance it does nothing.

    Raises: poptorch.Error, if an instance is missing after POPDIST_INIT_TIMEOUT seconds (default: 600), the address
        (MASTER_ADDR and MASTER_PORT) is missing, wrong or in use
    """
    launch = _read_launch()
    if launch.instances > 1:
        from .rendezvous import connect  # loads torch, which programs that only read their index don't need

        connect(launch)


def isBackendInitialized() -> bool:
    """Return whether torch.distributed is initialized, by `init` for example; True with one instance."""
    if getNumInstances() == 1:
        return True
    import torch.distributed as dist

    return dist.is_initialized()


def synchronize() -> None:
    """Wait until all instances have called this.

    Raises: poptorch.Error, if an instance calls another collective, has failed or ended, or isn't connected
    """
    from . import collectives  # loads torch

    collectives.barrier("popdist.synchronize()")


@_without_internal_frames
def execute_on_instances(instances: Iterable[int], fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `fn` and return its value in the instances with these indices; return None at once in all others.

    Inside `fn`, `synchronize` and `popdist.collectives` involve only these instances.

    >>> popdist.execute_on_instances([0], download, "https://example.org/data.tar")

    Args:
        instances: indices of instances, from 0
        fn:        called with `args` and `kwargs`
    """
    chosen = sorted(set(instances))
    if getInstanceIndex() not in chosen:
        return None
    from . import collectives

    with collectives.restrict_to_instances(chosen):
        return fn(*args, **kwargs)


__all__ = [name for name, value in vars().items() if type(value) is _FunctionType and name[0] != "_"]  # pyright: ignore


@_without_internal_frames
def __getattr__(name: str) -> Any:
    """Return `poptorch`, `collectives`, `Checkpoint` or `resumable`; import its module at the first use."""
    import importlib

    if name in ("poptorch", "collectives"):
        return importlib.import_module(f"popdist.{name}")
    if name in ("Checkpoint", "resumable"):
        return getattr(importlib.import_module("popdist.checkpoint"), name)
    places = {"Options": "popdist.poptorch.Options", "all_reduce": "popdist.collectives.all_reduce"}
    meant = _did_you_mean(name, [*__dir__(), *places], shown=places)
    raise AttributeError(f"module 'popdist' has no attribute {name!r}{meant}")


def __dir__() -> list[str]:
    """Return the public names, for completion."""
    return sorted([*__all__, "Checkpoint", "collectives", "poptorch", "resumable"])
