"""`popdist.poptorch.Options`: PopTorch's options with the launcher's number of replicas and processes."""

from collections.abc import Callable
from typing import Any, NoReturn

import poptorch
from popengine.environment import read_launch
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

    Args: ipus_per_replica: ipus that a replica of the model uses; by default poprun's --ipus-per-replica
    Raises: RuntimeError, if there are several replicas, and both numbers of ipus are above 1 and differ
    """

    _ipus_per_replica: int

    def __init__(self, ipus_per_replica: int | None = None) -> None:
        super().__init__()
        launch = read_launch()
        declared = launch.ipus_per_replica
        ipus = ipus_per_replica or declared
        if ipus > 1 and declared not in (1, ipus) and launch.total_replicas > 1:
            raise RuntimeError(
                f"the model uses {ipus} ipus a replica, but poprun was told {declared}\n"
                f"  fix: poprun --ipus-per-replica {ipus}"
            )
        vars(self).update(_ipus_per_replica=ipus, Distributed=_FixedDistributed().rowsByReplica(True))
        self.set(replication_factor=launch.local_replicas)

    @property
    def ipus_per_replica(self) -> int:
        """Return the number of ipus that a replica of the model uses."""
        return self._ipus_per_replica

    replicationFactor = _refusing_method("replicationFactor")
    useIpuId = _refusing_method("useIpuId")
