"""`popdist.poptorch.Options`: PopTorch's options with the launcher's number of replicas and processes."""

import os
from collections.abc import Callable
from typing import Any, NoReturn

import poptorch
from popengine.environment import PARTS, TOTAL, read_launch
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
        instances_per_replica: processes that run one replica, each with some of its ipus, for launchers other than
            poprun, which knows this number
    Raises: RuntimeError, if there are several processes, and a number is not poprun's or does not divide the others
    """

    def __init__(self, ipus_per_replica: int | None = None, instances_per_replica: int | None = None) -> None:
        super().__init__()
        launch = read_launch()
        declared = launch.ipus_per_replica
        ipus = ipus_per_replica or declared
        if ipus > 1 and declared not in (1, ipus) and launch.total_replicas > 1:
            raise RuntimeError(
                f"the model uses {ipus} ipus a replica, but poprun was told {declared}\n"
                f"  fix: poprun --ipus-per-replica {ipus}"
            )
        known = launch.instances_per_replica
        several = instances_per_replica or known
        is_fixed = TOTAL in os.environ or known > 1  # poprun, or earlier options, have set it
        if (is_fixed and several != known) or launch.instances % several or ipus % several:
            raise RuntimeError(
                f"{several} instances can't run a replica of {ipus} ipus together, with {launch.instances} instances"
                f" in all, and {known} for each replica by the launcher\n"
                "  fix: ipus_per_replica and the number of processes must be multiples of instances_per_replica;"
                " poprun --num-instances N --num-replicas R makes it N / R"
            )
        if several != known:  # another launcher than poprun started the processes
            os.environ[PARTS] = str(several)
        distributed = _FixedDistributed().rowsByReplica(True)
        vars(self).update(_ipus_per_replica=ipus, Distributed=distributed)
        self.set(replication_factor=launch.local_replicas)

    @property
    def ipus_per_replica(self) -> int:
        """Return the number of ipus that a replica of the model uses."""
        return self._ipus_per_replica

    replicationFactor = _refusing_method("replicationFactor")
    useIpuId = _refusing_method("useIpuId")
