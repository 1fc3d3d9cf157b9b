"""What pieces read of the weights in another form, such as float32 copies of half ones: made once a step.

A value is made at its first use in a step and let go of with the last: so a core that has no work for a stage any
more holds none of its copies. What a step uses, the program says.
"""

from __future__ import annotations

import threading
from collections import Counter

import torch
from torch import Tensor

from popengine import ir

from ..backends.eager import build
from .store import Store


class Prepared:
    """The prepared values of one ipu of one replica. Several cores may ask at the same time."""

    def __init__(self, plan: ir.Plan, ipu: int, store: Store, device: torch.device) -> None:
        makers, pieces = plan.partition.prepared, plan.partition.pieces
        self._names = {i: tuple(n for n in piece.reads if n in makers) for i, piece in enumerate(pieces)}
        self._uses = Counter(
            name
            for instruction in plan.programs[ipu]
            if isinstance(instruction, ir.Compute)
            for name in self._names[instruction.piece]
        )
        self._makers = {name: (build(makers[name], device=device), makers[name]) for name in self._uses}
        self._store = store
        self._made: dict[str, Tensor] = {}
        self._left: dict[str, int] = {}
        self._lock = threading.Lock()

    def take(self, piece: int) -> dict[str, Tensor]:
        """The prepared values that a piece reads, for one micro-batch."""
        names = self._names[piece]
        if not names:
            return {}
        with self._lock:
            return {name: self._one(name) for name in names}

    def _one(self, name: str) -> Tensor:
        if name not in self._made:
            code, piece = self._makers[name]
            (self._made[name],) = code([self._store.state[read] for read in piece.reads])
            self._left[name] = self._uses[name]
        self._left[name] -= 1
        return self._made[name] if self._left[name] else self._made.pop(name)

    def forget(self) -> None:
        """A call is over, or has failed half-way."""
        self._made.clear()
