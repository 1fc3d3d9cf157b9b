"""`Options.Distributed`: which of how many processes this is; by default what the launcher's environment says.

MPI's names are the contract's. Others count too (torchrun, srun), since processes that don't know of each other would
train alone, and say nothing.
"""

import os
from typing import Self

from popengine.environment import is_set, read
from poptorch.options.option_base import OptionsDict, Setting, expect


class Distributed(OptionsDict):
    """Which of how many processes this is."""

    distributed_process_id = Setting(0)
    num_distributed_processes = Setting(1)
    rows_by_replica = Setting(False)

    def __init__(self) -> None:
        super().__init__()
        self._read("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
        if self.numProcesses == 1 and is_set():
            launch = read()
            self._place(launch.instance, launch.instances)

    @property
    def processId(self) -> int:
        """Which process this is."""
        return self.distributed_process_id

    @property
    def numProcesses(self) -> int:
        """How many processes train together."""
        return self.num_distributed_processes

    def disable(self) -> Self:
        """Forget the environment: this is process 0 of 1."""
        return self._place(0, 1)

    def configureProcessId(self, process_id: int, num_processes: int) -> Self:
        """Say which of how many processes this is."""
        return self._place(process_id, num_processes)

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> Self:
        """Read the number of processes and this process's id from these variables, now."""
        self._place(0, 1)
        return self._read(var_num_processes, var_process_id)

    def rowsByReplica(self, by_replica: bool) -> Self:
        """Have loaders deal each global batch out to the replicas of all processes, so that a replica's rows are the
        same in any number of processes; False: each process reads a contiguous share of the order. The default is
        True for `popdist.poptorch.Options`, and False, as in PopTorch, for others."""
        return self.set(rows_by_replica=expect("rowsByReplica", by_replica, bool))

    def _read(self, var_num_processes: str, var_process_id: str) -> Self:
        found = {name: os.environ.get(name) for name in (var_num_processes, var_process_id)}
        if not any(found.values()):
            return self
        for name, text in found.items():
            assert text and text.isdecimal(), (
                f"{name} must hold a number, as {var_num_processes} and {var_process_id} say how many "
                f"processes there are and which one this is; found {text!r}"
            )
        return self._place(int(found[var_process_id] or 0), int(found[var_num_processes] or 1))

    def _place(self, process_id: int, num_processes: int) -> Self:
        whole = isinstance(process_id, int) and isinstance(num_processes, int)
        assert whole and 0 <= process_id < num_processes, (
            f"process {process_id!r} of {num_processes!r}: an id is an integer from 0 and below the number"
        )
        return self.set(distributed_process_id=process_id, num_distributed_processes=num_processes)
