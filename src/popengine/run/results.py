"""Where outputs are put: only the micro-batches that the output mode asks for, in the contract's order.

For each output tensor the chosen (iteration, accumulation, replica) stand after one another in dimension 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ir import Result
from ..settings import Settings

# Devices have no 64-bit types in this model; what returns to the user is narrower.
RETURNED = {torch.int64: torch.int32, torch.float64: torch.float32}


class Results:
    """Result tensors of one call, allocated before it."""

    def __init__(self, results: Sequence[Result], settings: Settings) -> None:
        self._settings = settings
        counts = settings.counts
        period = settings.return_period
        self._copies = {
            "all": counts.iterations * counts.accumulation * counts.replicas,
            "final": counts.replicas,
            "sum": counts.replicas,
            "every_n": counts.iterations // period * counts.accumulation * counts.replicas,
        }[settings.outputs]
        self._rows: dict[int, Tensor] = {}  # position -> [copies, *shape]
        for position, result in enumerate(results):
            if result.kind == "output":
                dtype = RETURNED.get(result.dtype, result.dtype)
                make = torch.zeros if settings.outputs == "sum" else torch.empty
                self._rows[position] = make((self._copies, *result.shape), dtype=dtype)
            elif result.kind == "input":  # forward wrote into it: every micro-batch's value goes back
                every = (counts.iterations, counts.accumulation, counts.groups)
                self._rows[position] = torch.empty((*every, *result.shape), dtype=result.dtype)

        self._kinds = [result.kind for result in results]

    def put(self, position: int, iteration: int, accumulation: int, replica: int, value: Tensor) -> None:
        """Copy one micro-batch's value to its place, if its mode wants it."""
        counts, mode = self._settings.counts, self._settings.outputs
        rows = self._rows[position]
        if self._kinds[position] == "input":
            rows[iteration, accumulation, counts.group_of(replica)].copy_(value)
            return
        if mode == "sum":
            rows[replica].add_(value)
            return
        if mode == "final":
            if iteration == counts.iterations - 1 and accumulation == counts.accumulation - 1:
                rows[replica].copy_(value)
            return
        if mode == "every_n":
            if (iteration + 1) % self._settings.return_period:
                return
            iteration //= self._settings.return_period
        row = (iteration * counts.accumulation + accumulation) * counts.replicas + replica
        rows[row].copy_(value)

    def outputs(self) -> list[Tensor]:
        """The outputs in the forward's order: [copies * d0, ...]; a 0-d value is [copies], or 0-d if alone."""
        found = []
        for position, kind in enumerate(self._kinds):
            if kind == "output":
                rows = self._rows[position]
                if rows.dim() == 1:
                    found.append(rows.reshape(()) if self._copies == 1 else rows)
                else:
                    found.append(rows.flatten(0, 1))
        return found

    def inputs(self) -> dict[int, Tensor]:
        """The new values of inputs that the forward wrote into, by position of the result."""
        return {
            position: self._rows[position].flatten(0, 3)
            for position, kind in enumerate(self._kinds)
            if kind == "input"
        }
