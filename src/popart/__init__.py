"""The enums of PopART that programs pass, as integers, to `Options._Popart.set`. The rest of PopART is not here.

>>> opts._Popart.set("accumulateOuterFragmentSettings.schedule",
...                  int(popart.AccumulateOuterFragmentSchedule.OverlapMemoryOptimized))
"""

from __future__ import annotations

import enum
from typing import NoReturn

__all__ = [
    "AccumulateOuterFragmentSchedule",
    "BatchSerializationBatchSchedule",
    "PatternsLevel",
    "RecomputationType",
    "SubgraphCopyingStrategy",
    "SyntheticDataMode",
    "VirtualGraphMode",
]


class AccumulateOuterFragmentSchedule(enum.IntEnum):
    Scheduler = 0
    Serial = 1
    OverlapCycleOptimized = 2
    OverlapMemoryOptimized = 3


class BatchSerializationBatchSchedule(enum.IntEnum):
    Scheduler = 0
    Isomorphic = 1
    OverlapOnIo = 2
    OverlapOnCompute = 3


class SyntheticDataMode(enum.IntEnum):
    Off = 0
    Zeros = 1
    RandomNormal = 2
    RandomUniform = 3


class SubgraphCopyingStrategy(enum.IntEnum):
    OnEnterAndExit = 0
    JustInTime = 1


class RecomputationType(enum.IntEnum):
    None_ = 0
    Standard = 1
    NormOnly = 2
    Pipeline = 3
    RecomputeAll = 4


class VirtualGraphMode(enum.IntEnum):
    Off = 0
    Manual = 1
    Auto = 2
    ExecutionPhases = 3


class PatternsLevel(enum.IntEnum):
    NoPatterns = 0
    Minimal = 1
    Default = 2
    All = 3


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"module 'popart' has no attribute {name!r}: this package holds only the enums that poptorch "
        f"programs need ({', '.join(__all__)})"
    )
