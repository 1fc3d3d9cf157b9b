"""The launchers' environment variables as a value: the number of replicas, and the share of this process.

`poprun` writes these variables; `popdist` and `poptorch` read them. A process of mpirun, torchrun or srun is
an instance with one replica, unless `popdist.poptorch.Options` sets the variables of another division. This file
imports the standard library only, for launchers without torch.
"""

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

TOTAL = "POPDIST_NUM_TOTAL_REPLICAS"
LOCAL = "POPDIST_NUM_LOCAL_REPLICAS"
IPUS = "POPDIST_NUM_IPUS_PER_REPLICA"
OFFSET = "POPDIST_REPLICA_INDEX_OFFSET"
UNIFORM = "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE"
LOCAL_INSTANCE = "POPDIST_LOCAL_INSTANCE_INDEX"

# Set for each poprun if there are several, one per node.
NUM_NODES = "POPRUN_NUM_NODES"
NODE_RANK = "POPRUN_NODE_RANK"

# The file of the store by which poprun's instances connect, on one host.
STORE = "POPDIST_STORE"
# Torchrun's names, also for torch: "True" if the launcher serves the store at MASTER_ADDR, else instance 0 does; and
# the begin of the keys, since a store may serve several runs and restarts.
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
RUN_ID, RESTART = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"
MAX_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"  # torchrun sets it
INIT_TIMEOUT = "POPDIST_INIT_TIMEOUT"
WAIT_LIMIT = "POPDIST_WAIT_LIMIT"

# The folder of `poprun --checkpoint-dir`.
CHECKPOINTS = "POPDIST_CHECKPOINT_DIR"

# The file that exists while an instance has lost a peer: if the instance fails then, its peer has failed before.
LOST_PEER = "POPRUN_LOST_PEER_FILE"

# A folder of modules with the names of other libraries (Horovod, libpvti), on the path of poprun's processes only.
ALIASES = str(Path(__file__).parents[1] / "poprun" / "aliases")

# The variables of other launchers: the number of processes, the rank, and the rank on the host.
MPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
TORCHRUN = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
# Of a Slurm step: a batch script itself is one process, though its job has several tasks.
SLURM = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID")

_YEAR = 365 * 86_400.0  # seconds


@dataclass(frozen=True)
class Launch:
    """One instance (a process) of a run. The defaults describe a process without a launcher."""

    total_replicas: int = 1
    local_replicas: int = 1
    ipus_per_replica: int = 1
    replica_offset: int = 0  # the index of this instance's first replica
    local_instance: int = 0  # the index of this instance on its host
    instances: int = 1
    instance: int = 0

    @property
    def instances_per_replica(self) -> int:
        """The number of instances that run one replica together, each with some of its ipus; mostly 1."""
        return max(1, self.instances // self.total_replicas)

    @property
    def ipus(self) -> range:
        """The ipus of a replica that this instance runs."""
        count = self.ipus_per_replica // self.instances_per_replica
        first = self.instance % self.instances_per_replica * count
        return range(first, first + count)

    def variables(self) -> dict[str, str]:
        """Return the environment variables of this instance, with popdist's, MPI's and torchrun's names."""
        variables = {
            TOTAL: str(self.total_replicas),
            LOCAL: str(self.local_replicas),
            IPUS: str(self.ipus_per_replica),
            OFFSET: str(self.replica_offset),
            UNIFORM: "1",
            LOCAL_INSTANCE: str(self.local_instance),
        }
        counts = str(self.instances), str(self.instance), str(self.local_instance)
        for names in (MPI, TORCHRUN):
            variables |= dict(zip(names, counts, strict=True))
        return variables


def pando_version() -> str:
    """Return the version of the installed package, or "(not installed)"."""
    from importlib import metadata  # slow to import

    try:
        return metadata.version("pando-torch")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def is_launched(environment: Mapping[str, str]) -> bool:
    """Return whether poprun, or another launcher of several processes, has started this process."""
    return TOTAL in environment or _launcher_variables(environment) is not None


def read_launch(environment: Mapping[str, str] | None = None) -> Launch:
    """Return this process's share of the run, from the variables of poprun, mpirun, torchrun or srun; `Launch()`
    if none of them has started several processes. Raises ValueError for variables that are missing or wrong."""
    environment = os.environ if environment is None else environment
    if TOTAL not in environment:
        names = _launcher_variables(environment)
        if names is None:
            return Launch()
        size, rank = read_integer(environment, names[0]), read_integer(environment, names[1])
        return Launch(size, 1, 1, rank, read_integer(environment, names[2], 0), size, rank)
    total, local = read_integer(environment, TOTAL), read_integer(environment, LOCAL, 1)
    if local < 1 or total % local:
        raise ValueError(f"{TOTAL}={total} is not a multiple of {LOCAL}={local}")
    offset, names = read_integer(environment, OFFSET, 0), _launcher_variables(environment) or MPI
    return Launch(
        total_replicas=total,
        local_replicas=local,
        ipus_per_replica=read_integer(environment, IPUS, 1),
        replica_offset=offset,
        local_instance=read_integer(environment, LOCAL_INSTANCE, 0),
        instances=read_integer(environment, names[0], total // local),
        instance=read_integer(environment, names[1], offset // local),
    )


def is_on_one_host() -> bool:
    """Return whether the launcher's variables say that all processes of the run are on this host."""
    local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    return str(read_launch().instances) == local or os.environ.get("SLURM_STEP_NUM_NODES") == "1"


def _launcher_variables(environment: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Return the names of (world size, rank, local rank) of a launcher that has started several processes, or None."""
    return next((names for names in (MPI, TORCHRUN, SLURM) if environment.get(names[0], "1") != "1"), None)


def read_integer(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the integer in an environment variable, or `default` if it is not set. Raises ValueError otherwise."""
    text = environment.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ValueError(
            f"the environment variable {name} is {text!r}, and must be a number in a process that is one of several\n"
            "  fix: start the program with poprun, which sets all of them"
        ) from None


def read_seconds(name: str, default: float) -> float:
    """Return the number of seconds in an environment variable, or `default`. Raises ValueError, if it is none."""
    text = os.environ.get(name, str(default))
    with suppress(ValueError):
        if 0 < float(text) <= _YEAR:
            return float(text)
    raise ValueError(f"{name} is {text!r}, and must be a number of seconds, more than 0 and at most a year")


def path_with_aliases(path: str) -> str:
    """Return `path`, a PYTHONPATH, with the folder `ALIASES` appended; unchanged if Horovod is installed."""
    folders = [folder for folder in sys.path if folder != ALIASES]
    is_installed = PathFinder.find_spec("horovod", folders) is not None
    return path if is_installed else os.pathsep.join(filter(None, [path, ALIASES]))
