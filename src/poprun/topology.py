"""The nodes of a run, the instances of a node, and the replicas and cores of an instance."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from popengine import environment
from popengine.texts import table_text

from .command_line import CommandLine, can_run

PORT = 29500  # torchrun's default


@dataclass(frozen=True)
class Node:
    """One of the hosts or pods that take part in a run, each with a poprun of its own."""

    rank: int = 0
    count: int = 1
    address: str = "127.0.0.1"  # host name or IP address of node 0
    port: int = 0  # of the store on node 0; 0: any free port
    patience: int = 600  # seconds that nodes wait for each other


def node_from_variables(variables: Mapping[str, str]) -> Node:
    """Return this node as environment variables describe it; without POPRUN_NUM_NODES it is the only node.
    Raises: ValueError, if a variable is missing, is no number or is out of range"""

    def number(name: str, default: int | None = None) -> int:
        text = variables.get(name, "" if default is None else str(default))
        if not text.isdecimal():
            raise ValueError(f"the environment variable {name} is {text!r}, and must be a number")
        return int(text)

    patience = number("POPRUN_NODE_TIMEOUT", 600)
    if environment.NUM_NODES not in variables:
        return Node(patience=patience)
    count, rank = number(environment.NUM_NODES), number(environment.NODE_RANK)
    if not 0 <= rank < count:
        raise ValueError(f"{environment.NODE_RANK}={rank}, but the nodes are 0 to {count - 1}")
    address = variables.get("MASTER_ADDR", "" if count > 1 else "127.0.0.1")
    if not address:
        raise ValueError(
            f"{environment.NUM_NODES}={count}, but MASTER_ADDR, the address of node 0, is missing"
        )
    return Node(rank, count, address, number("MASTER_PORT", PORT if count > 1 else 0), patience)


def local_instance_count(request: CommandLine, nodes: int) -> int:
    """Return the number of instances on each of `nodes` nodes; in an elastic run, the largest number.
    Raises: ValueError, if the number of instances is fixed, and not a multiple of `nodes`"""
    if request.is_elastic:
        return request.instances_per_node or -(-request.instances // nodes)
    if request.instances % nodes:
        raise ValueError(f"{request.instances} instances can't be shared out over {nodes} nodes")
    return request.instances // nodes


def instances_by_node(request: CommandLine, slots: Mapping[str, int]) -> dict[str, int]:
    """Return the number of instances by node, spread evenly: the largest requested number that can run
    all replicas and fits into the `slots` of the nodes; {} without such a number."""
    most = min(request.instances, sum(slots.values()))
    totals = range(request.fewest_instances or request.instances, most + 1)
    possible = (n for n in totals if can_run(request.replicas, request.ipus_per_replica, n))
    counts = dict.fromkeys(slots, 0)
    for _ in range(max(possible, default=0)):
        free = [node for node, slot in slots.items() if counts[node] < slot]
        counts[min(free, key=counts.__getitem__)] += 1
    return {node: count for node, count in counts.items() if count}


def instance_launch(
    request: CommandLine, instances: int, instance: int, local: int = 0
) -> environment.Launch:
    """Return the share of one of `instances` instances, which has the index `local` on its host. If there are more
    instances than replicas, several consecutive ones run one replica."""
    local_replicas = max(1, request.replicas // instances)
    return environment.Launch(
        total_replicas=request.replicas,
        local_replicas=local_replicas,
        ipus_per_replica=request.ipus_per_replica,
        replica_offset=instance * request.replicas // instances,
        local_instance=local,
        instances=instances,
        instance=instance,
    )


def share_text(launch: environment.Launch) -> str:
    """Return the replicas and ipus of an instance, such as "replica 1, ipus 2 to 3"."""

    def numbered(name: str, numbers: range) -> str:
        return f"{name} {numbers[0]}" if len(numbers) == 1 else f"{name}s {numbers[0]} to {numbers[-1]}"

    replicas = range(launch.replica_offset, launch.replica_offset + launch.local_replicas)
    return f"{numbered('replica', replicas)}, {numbered('ipu', launch.ipus)}"


def numa_cores(local_instance: int, instances: int) -> list[int]:
    """Return the cores of the NUMA node on which one of this host's instances runs; [] if the host has only one
    NUMA node. Instances with neighbouring indices share a node."""
    folders = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    allowed = os.sched_getaffinity(0)
    cores = [{int(core.name[3:]) for core in folder.glob("cpu[0-9]*")} & allowed for folder in folders]
    nodes = [sorted(node_cores) for node_cores in cores if node_cores]
    return nodes[local_instance * len(nodes) // instances] if len(nodes) > 1 else []


def topology_table(request: CommandLine, hosts: Sequence[str]) -> str:
    """Return a table with a row for each instance: its host, replicas and ipus."""
    count = request.instances
    shares = [share_text(instance_launch(request, count, instance)) for instance in range(count)]
    rows = [[str(i), hosts[i * len(hosts) // count], share] for i, share in enumerate(shares)]
    return table_text([["instance", "host", "runs"], *rows])
