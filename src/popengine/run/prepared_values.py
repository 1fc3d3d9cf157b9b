"""Prepared values: what pieces read of weights and is computed once per step, such as casts."""

import threading
from collections import Counter

from torch import Tensor

from .. import ir
from .backends.eager import build
from .state import DeviceTensors


class PreparedValues:
    """The prepared values of one replica: computed from weights once per step, such as casts. Thread-safe."""

    def __init__(self, plan: ir.Plan, state: DeviceTensors, replica: int) -> None:
        makers, pieces, place = plan.partition.prepared, plan.partition.pieces, state.where.place
        self._names = [tuple(n for n in piece.reads if n in makers) for piece in pieces]  # by piece
        here = (t.piece for i, t in enumerate(plan.tasks) if t.runs_piece and not plan.is_elsewhere(i, place))
        self._uses = Counter(name for piece in here for name in self._names[piece])  # per micro-batch
        self._makers = {name: (build(makers[name], device=state.device), makers[name]) for name in self._uses}
        self._micro_batches, self._state, self._replica = plan.micro_batches, state, replica
        self._made: dict[str, Tensor] = {}
        self._left: dict[str, int] = {}  # remaining uses of each value in `_made`
        self._lock = threading.Lock()

    def values_for(self, piece: int) -> dict[str, Tensor]:
        """Return the prepared values that piece number `piece` reads, by name. Call it once per piece and micro-batch:
        a value is computed at its first use in a step, and dropped at its last."""
        with self._lock:
            return {name: self._value(name) for name in self._names[piece]}

    def _value(self, name: str) -> Tensor:
        """Return the prepared value `name` for one use."""
        if name not in self._made:
            code, piece = self._makers[name]
            values = self._state.values[self._replica]
            (self._made[name],) = code([values[read] for read in piece.reads])
            self._left[name] = self._micro_batches * self._uses[name]
        self._left[name] -= 1
        return self._made[name] if self._left[name] else self._made.pop(name)

    def clear(self) -> None:
        """Drop all prepared values."""
        self._made.clear()
