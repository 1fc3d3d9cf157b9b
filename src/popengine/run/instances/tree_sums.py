"""The order of a sum over replicas: a balanced binary tree over their numbers in all instances.

    0   1   2   3   4   5   6      neighbours add up first, then their sums, and so on; who has no neighbour waits
    └─┬─┘   └─┬─┘   └─┬─┘   │
      └───┬───┘       └──┬──┘
          └──────┬───────┘

So each instance can add up its own replicas first, whole nodes of the tree, and however many instances there are, the
bits are the same. A node is known by its level and its index there; at level 0 the index is the replica.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(slots=True)
class Node:
    """A partial sum: of the replicas from index · 2^level on."""

    level: int
    index: int
    values: list[Any]  # tensors, which grow in place


def add(stack: list[Node], node: Node) -> None:
    """Put the next part of a sum on the stack, and add up what makes a larger node of the tree."""
    while stack and node.index % 2 and stack[-1].level == node.level and stack[-1].index == node.index - 1:
        left = stack.pop()
        if left.values:
            torch._foreach_add_(left.values, node.values)
        node = Node(node.level + 1, node.index // 2, left.values)
    stack.append(node)


def total(stack: list[Node]) -> list[Any]:
    """The sum of all that is on the stack, once nothing more will come."""
    while len(stack) > 1:
        last = stack.pop()
        torch._foreach_add_(stack[-1].values, last.values)
    return stack.pop().values


def nodes_of(start: int, count: int) -> list[tuple[int, int]]:
    """Level and index of the nodes that so many successive replicas add up to by themselves."""
    stack: list[Node] = []
    for replica in range(start, start + count):
        add(stack, Node(0, replica, []))
    return [(node.level, node.index) for node in stack]
