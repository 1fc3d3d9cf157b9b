"""The import path of programs for Lightning 2.0 and 2.1: `from lightning_graphcore import IPUStrategy`.

The classes belong to the Lightning package that is imported; to `lightning`, if both or none are imported.
"""

from typing import Any

_NAMES = ("IPUAccelerator", "IPUPrecision", "IPUStrategy")


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_ipu.family import build_classes, imported_package

    return build_classes(imported_package())[name]
