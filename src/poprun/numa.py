"""The cores of a host's NUMA nodes, as Linux lists them."""

from __future__ import annotations

import os
from pathlib import Path


def cores_of(local_instance: int, instances: int) -> list[int]:
    """The cores of the NUMA node that an instance belongs to, its neighbours to the same; none where all is one."""
    folders = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    allowed = os.sched_getaffinity(0)
    nodes = [sorted(allowed & set(_listed((path / "cpulist").read_text()))) for path in folders]
    nodes = [cores for cores in nodes if cores]
    return nodes[local_instance * len(nodes) // instances] if len(nodes) > 1 else []


def _listed(text: str) -> list[int]:
    """Of Linux's lists: "0-2,8" is 0, 1, 2, 8."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers
