"""Asking for a profile as programs do: by an environment variable, set while executors are made."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator

_VARIABLE = "POPLAR_ENGINE_OPTIONS"


@contextlib.contextmanager
def reporting(directory: str | None) -> Iterator[None]:
    """Executors made inside write a profile into the directory, or into the current one."""
    before = os.environ.get(_VARIABLE)
    asked = {"autoReport.all": "true"}
    if directory is not None:
        os.makedirs(directory, exist_ok=True)
        asked["autoReport.directory"] = directory
    os.environ[_VARIABLE] = json.dumps({**json.loads(before or "{}"), **asked})
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before
