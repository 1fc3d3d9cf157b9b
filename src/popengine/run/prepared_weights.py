"""What pieces read of the weights in another form, such as float32 copies of half ones: made once a step.

A value is made at its first use in a step and freed with the last: so a core that has no work for a stage any more
holds none of its copies.
"""

from __future__ import annotations

import threading
from collections import Counter

from torch import Tensor

from popengine import ir

from .backends.eager import build
from .state import State


class Prepared:
    """The prepared values of one replica. Several cores may read at the same time."""

    def __init__(self, plan: ir.Plan, state: State, replica: int) -> None:
        makers, pieces = plan.partition.prepared, plan.partition.pieces
        self._names = [tuple(n for n in piece.reads if n in makers) for piece in pieces]
        self._uses = Counter(
            {n: plan.micro_batches * c for n, c in Counter(n for names in self._names for n in names).items()}
        )
        self._makers = {name: (build(makers[name], device=state.device), makers[name]) for name in self._uses}
        self._state, self._replica = state, replica
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
            values = self._state.values[self._replica]
            (self._made[name],) = code([values[read] for read in piece.reads])
            self._left[name] = self._uses[name]
        self._left[name] -= 1
        return self._made[name] if self._left[name] else self._made.pop(name)

    def forget(self) -> None:
        """A call is over, or has failed half-way."""
        self._made.clear()
