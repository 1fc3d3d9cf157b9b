"""Our three classes, built once for each Lightning package.

`lightning` and `pytorch_lightning` are the same source under two names, with base classes that don't know each other.
So what our classes do is written once, in plain classes, and joined with the bases of a package when somebody asks.
"""

from __future__ import annotations

import functools
import sys

from .accelerator import AcceleratorPart
from .autoload import PACKAGES
from .ipu_precision import PrecisionPart
from .lightning_package import Lightning
from .strategy import StrategyPart


@functools.cache
def classes(package: str) -> dict[str, type]:
    """IPUStrategy, IPUAccelerator, IPUPrecision (and its older name) of a package."""
    lightning = Lightning(package)
    parts = {
        "IPUStrategy": (StrategyPart, "strategies.ParallelStrategy"),
        "IPUAccelerator": (AcceleratorPart, "accelerators.Accelerator"),
        "IPUPrecision": (PrecisionPart, "plugins.precision.Precision"),
    }
    found = {
        name: type(
            name,
            (part, lightning.get(base)),
            {
                "__module__": "lightning_graphcore",
                "__doc__": part.__doc__,
                "lightning": lightning,
                "_is_pandos": True,
            },
        )
        for name, (part, base) in parts.items()
    }
    return {**found, "IPUPrecisionPlugin": found["IPUPrecision"]}


def imported() -> str:
    """The package that the program uses: the one that is imported, `lightning` if both or none are."""
    loaded = [package for package in PACKAGES if package in sys.modules]
    return loaded[0] if len(loaded) != 2 and loaded else PACKAGES[0]
