"""The public enums. Saved options hold their integers."""

import enum
from typing import Any


def by_name(kind: type[enum.Enum], value: Any) -> Any:
    """Return the member of an enum that a string names; any other value unchanged."""
    return kind.__members__.get(value, value) if isinstance(value, str) else value


class MeanReductionStrategy(enum.IntEnum):
    """When a mean over gradient accumulation and replicas is divided: at each step of the sum, or after it."""

    Running = 0
    Post = 1
    PostAndLoss = 2  # deprecated: use Post


class DataLoaderMode(enum.IntEnum):
    """Where batches are loaded: in the caller, in another process, or in several whose batches are regrouped."""

    Sync = 0
    Async = 1
    AsyncRebatched = 2


class SharingStrategy(enum.IntEnum):
    """How a loading process receives its dataset and returns tensors."""

    SharedMemory = 0
    FileSystem = 1
    Fork = 2
    ForkServer = 3


class OutputMode(enum.IntEnum):
    """Which outputs of a call are returned. Default: Final in training, All in inference."""

    Final = 0
    EveryN = 1
    All = 2
    Sum = 3
    Default = 4


AnchorMode = OutputMode  # the name in programs for PopTorch 2.4 and earlier


class ConnectionType(enum.IntEnum):
    """When the program takes a device: when the model is compiled, at the first call, or never (compile only)."""

    Always = 0
    OnDemand = 1
    Never = 2


class HalfFloatCastingBehavior(enum.IntEnum):
    """Deprecated, without effect: operands of mixed precision follow PyTorch's own promotion."""

    FloatDowncastToHalf = 0
    HalfUpcastToFloat = 1
    Default = 2


class ReductionType(enum.IntEnum):
    """How values of micro-batches or replicas are reduced to one."""

    Sum = 0
    Mean = 1
    NoReduction = 2


class SyncPattern(enum.IntEnum):
    """Which ipus wait for each other at the end of a step."""

    Full = 0
    SinglePipeline = 1
    ReplicaAndLadder = 2


class Liveness(enum.IntEnum):
    """How long the tensors of a phase stay on the device."""

    AlwaysLive = 0
    OffChipAfterFwd = 1
    OffChipAfterFwdNoOverlap = 2
    OffChipAfterEachPhase = 3


class AutoStage(enum.IntEnum):
    """The stage of a block that no stage names: its ipu's number, or the next free one."""

    SameAsIpu = 0
    AutoIncrement = 1


class MultiConvPlanType(enum.IntEnum):
    """How the convolutions of a MultiConv share the device."""

    Parallel = 0
    Serial = 1


class CommGroupType(enum.IntEnum):
    """Which replicas form a group: neighbours (Consecutive), every n-th (Orthogonal), all, or none."""

    All = 0
    Consecutive = 1
    Orthogonal = 2
    NoGrouping = 3


class VariableRetrievalMode(enum.IntEnum):
    """The replicas from which a per-replica weight is copied to the host."""

    OnePerGroup = 0
    AllReplicas = 2  # 1 was never used


class MatMulSerializationMode(enum.Enum):
    """The dimension along which a matrix product is split into smaller ones."""

    InputChannels = "input_channels"
    ReducingDim = "reducing_dim"
    OutputChannels = "output_channels"
    Disabled = "none"


class OverlapMode(enum.Enum):
    """The loop with which the transfer of an input or output overlaps."""

    NoOverlap = "no_overlap"
    OverlapAccumulationLoop = "overlap_accumulation_loop"
    OverlapDeviceIterationLoop = "overlap_device_iteration_loop"


__all__ = [name for name, kind in vars().items() if isinstance(kind, enum.EnumType)]  # pyright: ignore
