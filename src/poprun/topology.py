"""The nodes of a training, the instances of a node, and the replicas and cores of an instance."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from popengine import environment

from .command_line import CommandLine

PORT = 29500  # torchrun's default
_SHOWN = 16  # replicas that a table shows one by one


@dataclass(frozen=True)
class Node:
    """One of the hosts or pods that share a training. Each of them has its own poprun."""

    rank: int = 0
    count: int = 1
    address: str = "127.0.0.1"  # host name or IP address of node 0
    port: int = 0  # of the store on node 0; 0: any free port
    patience: int = 600  # seconds that nodes wait for each other


def node_of(variables: Mapping[str, str]) -> Node:
    """Return this node from environment variables; without POPRUN_NUM_NODES, the only node.

    Raises: ValueError, if a variable is missing, no number or out of range
    """

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


def local_instances(request: CommandLine, nodes: int) -> int:
    """Return the number of instances per node; of an elastic training, the largest number.

    Raises: ValueError, if the number of instances is fixed, and not a multiple of the number of nodes
    """
    if request.is_elastic:
        return request.instances_per_node or -(-request.instances // nodes)
    if request.instances % nodes:
        raise ValueError(f"{request.instances} instances can't be shared out over {nodes} nodes")
    return request.instances // nodes


def deal(replicas: int, fewest: int, most: int, slots: Sequence[int]) -> list[int]:
    """Return instance counts by node, spread evenly; their sum is the largest that divides `replicas`.

    Args:
        fewest, most: the range of the total
        slots:        by node, the largest number of instances
    Returns: zeros, if no total in the range fits into the slots and divides the replicas
    """
    fitting = range(fewest, min(most, sum(slots)) + 1)
    counts = [0] * len(slots)
    for _ in range(max((count for count in fitting if replicas % count == 0), default=0)):
        free = [node for node, slot in enumerate(slots) if counts[node] < slot]
        counts[min(free, key=counts.__getitem__)] += 1
    return counts


def launch_of(request: CommandLine, instance: int, instances: int, local_instance: int) -> environment.Launch:
    """Return the `Launch` of one instance: the numbers that popdist reads from its environment."""
    replicas = request.replicas // instances
    return environment.Launch(
        total_replicas=request.replicas,
        local_replicas=replicas,
        ipus_per_replica=request.ipus_per_replica,
        replica_offset=instance * replicas,
        local_instance=local_instance,
        instances=instances,
        instance=instance,
    )


def cores_of(local_instance: int, instances: int) -> list[int]:
    """Return the cores of an instance's NUMA node; an empty list, if the host has only one NUMA node.

    Neighbours among the `instances` of this host have the same NUMA node.
    """
    folders = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    allowed = os.sched_getaffinity(0)
    nodes = [sorted(allowed & set(_listed((path / "cpulist").read_text()))) for path in folders]
    nodes = [cores for cores in nodes if cores]
    return nodes[local_instance * len(nodes) // instances] if len(nodes) > 1 else []


def _listed(text: str) -> list[int]:
    """Return the numbers of a list in Linux's format: 0, 1, 2, 8 for "0-2,8"."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def table(request: CommandLine, hosts: Sequence[str]) -> str:
    """Return the table of hosts, instances and replicas that poprun prints.

    ```
     =============================
    |      poprun topology        |
    |=============================|
    | hosts     |    localhost    |
    |-----------|-----------------|
    | ILDs      |        0        |
    |-----------|-----------------|
    | instances |   0    |   1    |
    |-----------|--------|--------|
    | replicas  | 0 | 1  | 2 | 3  |
     -----------------------------
    ```
    """
    each = request.replicas // request.instances
    replicas = list(map(str, range(request.replicas)))
    if request.replicas > _SHOWN and each > 1:
        replicas = [f"{first} to {first + each - 1}" for first in range(0, request.replicas, each)]
    rows = {
        "hosts": hosts,
        "ILDs": [str(host) for host in range(len(hosts))],
        "instances": [str(instance) for instance in range(request.instances)],
        "replicas": replicas,
    }
    # Each cell is as wide as the replicas under it, with their borders.
    spans = {name: len(replicas) // len(cells) for name, cells in rows.items()}
    # The width of a replica's cell, with one border.
    width = max(-(-(len(cell) + 3) // spans[name]) for name, cells in rows.items() for cell in cells)
    lines = []
    for name, cells in rows.items():
        wide = spans[name] * width - 1
        lines.append("|".join(["", "-" * 11, *["-" * wide] * len(cells), ""]))
        lines.append("|".join(["", f" {name}".ljust(11), *(cell.center(wide) for cell in cells), ""]))
    total = len(replicas) * width + 11
    title = [f" {'=' * total} ", f"|{'poprun topology'.center(total)}|", f"|{'=' * total}|"]
    return "\n".join([*title, *lines[1:], f" {'-' * total} "])
