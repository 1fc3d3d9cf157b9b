"""Which of the trainer's counters a step reads while it is captured: they are constants of the compiled step."""

from __future__ import annotations

import logging
from typing import Any

COUNTERS = ("current_epoch", "global_step")

logger = logging.getLogger("poptorch::python")


class Watch:
    """Sees reads of counters on a module and its trainer, by subclasses that they have meanwhile; then warns."""

    def __init__(self, module: Any) -> None:
        self._owners = [owner for owner in (module, module._trainer) if isinstance(type(owner), type)]
        self._allowed = getattr(module._trainer.strategy, "recompile_on", ())
        self._read: set[str] = set()

    def __enter__(self) -> Watch:
        self._classes = [type(owner) for owner in self._owners]
        for owner, kind in zip(self._owners, self._classes, strict=True):
            owner.__class__ = type(
                kind.__name__, (kind,), {name: self._property(kind, name) for name in COUNTERS}
            )
        return self

    def _property(self, kind: type, name: str) -> property:
        def read(owner: Any) -> Any:
            self._read.add(name)
            return getattr(super(type(owner), owner), name)

        return property(read)

    def __exit__(self, *details: Any) -> None:
        for owner, kind in zip(self._owners, self._classes, strict=True):
            owner.__class__ = kind
        for name in sorted(self._read - set(self._allowed)):
            logger.warning(
                "the step reads %s, which is a constant once the step is compiled. To compile anew when it has changed:"
                " strategy.recompile_on = (%r,)",
                name,
                name,
            )
