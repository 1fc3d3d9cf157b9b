"""`popdist.poptorch.Options`: PopTorch's options with the launcher's number of replicas and processes."""

import os
from collections.abc import Callable
from typing import Any, NoReturn

import poptorch
from popengine.environment import LOCAL, LOCAL_INSTANCE, OFFSET, TOTAL, read_launch
from poptorch.options import Distributed

__all__ = ["Options"]


def _refusing_method(name: str) -> Callable[..., NoReturn]:
    """Return a method that raises a RuntimeError: poprun decides what the option method `name` would set."""

    def refuse(self: object, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"Cannot call `{name}` with popdist.poptorch.Options\n"
            "  why: poprun decides how many replicas there are and where they run\n"
            "  fix: leave the call out and use poprun's options, or poptorch.Options without poprun"
        )

    refuse.__doc__ = "Refused: poprun's options set it. Raises RuntimeError."
    return refuse


class _FixedDistributed(Distributed):  # the launcher decides the number and index of processes
    disable = _refusing_method("Distributed.disable")
    setEnvVarNames = _refusing_method("Distributed.setEnvVarNames")
    configureProcessId = _refusing_method("Distributed.configureProcessId")


class Options(poptorch.Options):
    """The options of one instance, with the launcher's numbers of replicas and processes.

    >>> options = popdist.poptorch.Options(ipus_per_replica=2)  # instead of poptorch.Options()

    Args:
        ipus_per_replica:      ipus that a replica of the model uses; by default poprun's --ipus-per-replica
        instances_per_replica: processes that run one replica, each with some of its ipus; by default 1, or by poprun
        total_replicas:        replicas in all processes together, which share them evenly; by default one for each
            process, or poprun's --num-replicas. With it a run has the same bits in any number of processes
    Raises: RuntimeError, if a number is not poprun's or does not divide the others
    """

    def __init__(
        self,
        ipus_per_replica: int | None = None,
        instances_per_replica: int | None = None,
        total_replicas: int | None = None,
    ) -> None:
        super().__init__()
        launch = read_launch()
        declared = launch.ipus_per_replica
        ipus = ipus_per_replica or declared
        if ipus > 1 and declared not in (1, ipus) and launch.total_replicas > 1:
            raise RuntimeError(
                f"the model uses {ipus} ipus a replica, but poprun was told {declared}\n"
                f"  fix: poprun --ipus-per-replica {ipus}"
            )
        is_fixed = TOTAL in os.environ  # poprun, or earlier options, have set it
        parts = launch.instances_per_replica if instances_per_replica is None else instances_per_replica
        total = total_replicas
        if total is None:
            total = launch.total_replicas if is_fixed else launch.instances // max(parts, 1)
        is_possible = min(parts, total) > 0 and ipus % parts == 0 and total * parts % launch.instances == 0
        is_possible = is_possible and (parts == 1 or total * parts == launch.instances)
        is_changed = (total, parts) != (launch.total_replicas, launch.instances_per_replica)
        if not is_possible or (is_fixed and is_changed):
            fixed = f"; poprun, or earlier options, have set {launch.total_replicas} replicas" * is_fixed
            raise RuntimeError(
                f"{launch.instances} processes can't run {total} replicas of {ipus} ipus, with {parts} processes for"
                f" each replica{fixed}\n"
                "  fix: total_replicas must be a multiple of the number of processes; or, with instances_per_replica,"
                " this number must divide ipus_per_replica and the number of processes; poprun has options for both"
            )
        if is_changed:
            os.environ |= {
                TOTAL: str(total),
                LOCAL: str(total * parts // launch.instances),
                OFFSET: str(launch.instance * total // launch.instances),
                LOCAL_INSTANCE: str(launch.local_instance),
            }
            launch = read_launch()
        distributed = _FixedDistributed().rowsByReplica(True)
        vars(self).update(_ipus_per_replica=ipus, Distributed=distributed)
        self.set(replication_factor=launch.local_replicas)

    @property
    def ipus_per_replica(self) -> int:
        """Return the number of ipus that a replica of the model uses."""
        return self._ipus_per_replica

    replicationFactor = _refusing_method("replicationFactor")
    useIpuId = _refusing_method("useIpuId")
