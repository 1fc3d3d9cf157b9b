"""One of the Lightning packages, which have the same source under two names."""

from __future__ import annotations

import importlib
from typing import Any


class Lightning:
    """One of the Lightning packages: its modules, loaded when they are first needed."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get(self, path: str) -> Any:
        """What `path` names inside the package: `loops.fit_loop._FitLoop`."""
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(f"{self.name}.{module}"), name)

    @property
    def Misconfiguration(self) -> type[Exception]:
        """The exception that Lightning's users catch."""
        return self.get("utilities.exceptions.MisconfigurationException")

    def is_overridden(self, method: str, module: Any) -> bool:
        return self.get("utilities.model_helpers.is_overridden")(method, module)
