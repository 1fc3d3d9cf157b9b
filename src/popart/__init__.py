"""The enums of PopART that programs pass as integers to `Options._Popart.set`, and nothing else of PopART.

>>> opts._Popart.set("accumulateOuterFragmentSettings.schedule",
...                  int(popart.AccumulateOuterFragmentSchedule.OverlapMemoryOptimized))
"""

from enum import EnumType, IntEnum
from typing import NoReturn

AccumulateOuterFragmentSchedule = IntEnum(
    "AccumulateOuterFragmentSchedule",
    "Scheduler Serial OverlapCycleOptimized OverlapMemoryOptimized",
    start=0,
)
BatchSerializationBatchSchedule = IntEnum(
    "BatchSerializationBatchSchedule", "Scheduler Isomorphic OverlapOnIo OverlapOnCompute", start=0
)
PatternsLevel = IntEnum("PatternsLevel", "NoPatterns Minimal Default All", start=0)
RecomputationType = IntEnum("RecomputationType", "None_ Standard NormOnly Pipeline RecomputeAll", start=0)
SubgraphCopyingStrategy = IntEnum("SubgraphCopyingStrategy", "OnEnterAndExit JustInTime", start=0)
SyntheticDataMode = IntEnum("SyntheticDataMode", "Off Zeros RandomNormal RandomUniform", start=0)
VirtualGraphMode = IntEnum("VirtualGraphMode", "Off Manual Auto ExecutionPhases", start=0)

__all__ = [name for name, value in vars().items() if type(value) is EnumType and value is not IntEnum]  # pyright: ignore


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"module 'popart' has no attribute {name!r}: this package holds only the enums that poptorch "
        f"programs need ({', '.join(__all__)})"
    )
