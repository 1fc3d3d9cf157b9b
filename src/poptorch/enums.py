"""The public enums. Saved options hold the integers of their members."""

import contextlib
import enum
from typing import Any

from poptorch.checks import checked


def member_by_name(cls: type[enum.Enum], value: Any) -> Any:
    """Return the enum member with this name or value. Raises ValueError, if there is none."""
    with contextlib.suppress(ValueError):
        return cls(value)
    return cls[checked(cls.__name__, value, tuple(cls.__members__), ValueError)]


class MeanReductionStrategy(enum.IntEnum):
    """When gradients are divided for a mean: while they are summed (Running), or after (Post, the default)."""

    Running = 0
    Post = 1
    PostAndLoss = 2  # deprecated: use Post


class DataLoaderMode(enum.IntEnum):
    """Where batches are loaded: in this process (Sync, the default), or ahead, in a worker process (Async),
    which also joins incomplete batches of an IterableDataset's `num_workers` (AsyncRebatched)."""

    Sync = 0
    Async = 1
    AsyncRebatched = 2


class SharingStrategy(enum.IntEnum):
    """How a worker process receives its dataset: pickled (ForkServer, the default, and FileSystem), with tensors in
    shared memory (SharedMemory), or as a copy of this process (Fork, which pickles nothing)."""

    SharedMemory = 0
    FileSystem = 1
    Fork = 2
    ForkServer = 3


class OutputMode(enum.IntEnum):
    """Which outputs a call returns. All: those of every micro-batch. Final: those of each replica's last
    micro-batch. Sum: the sum of each replica's outputs. EveryN: those of every n-th device iteration.
    Default: Final in training, All in inference."""

    Final = 0
    EveryN = 1
    All = 2
    Sum = 3
    Default = 4


AnchorMode = OutputMode  # the name in programs for PopTorch 2.4 and earlier


class ConnectionType(enum.IntEnum):
    """The time at which a device is attached: at compilation (Always, OnDemand), or never. With Never a model
    can be compiled and saved, and a call raises AssertionError."""

    Always = 0
    OnDemand = 1
    Never = 2


class HalfFloatCastingBehavior(enum.IntEnum):
    """Values of a deprecated option that has no effect: operands of two types follow PyTorch's promotion."""

    FloatDowncastToHalf = 0
    HalfUpcastToFloat = 1
    Default = 2


class ReductionType(enum.IntEnum):
    """How gradients are reduced: their Mean (the default) or Sum. No option accepts NoReduction."""

    Sum = 0
    Mean = 1
    NoReduction = 2


class SyncPattern(enum.IntEnum):
    """Which ipus wait for each other at the end of a step. Has no effect; kept for compatibility."""

    Full = 0
    SinglePipeline = 1
    ReplicaAndLadder = 2


class Liveness(enum.IntEnum):
    """How long the tensors of a phase stay on the device. Has no effect; kept for compatibility."""

    AlwaysLive = 0
    OffChipAfterFwd = 1
    OffChipAfterFwdNoOverlap = 2
    OffChipAfterEachPhase = 3


class AutoStage(enum.IntEnum):
    """The stage of a block: its ipu's number (SameAsIpu, the default), or a new one for each id (AutoIncrement)."""

    SameAsIpu = 0
    AutoIncrement = 1


class MultiConvPlanType(enum.IntEnum):
    """How the convolutions of a `MultiConv` share the device. Has no effect; kept for compatibility."""

    Parallel = 0
    Serial = 1


class CommGroupType(enum.IntEnum):
    """The groups of `inputReplicaGrouping` and `replicaGrouping`, for example of 4 replicas in groups of 2:
    (0, 1), (2, 3) for Consecutive; (0, 2), (1, 3) for Orthogonal. All: one group; NoGrouping: 4 groups."""

    All = 0
    Consecutive = 1
    Orthogonal = 2
    NoGrouping = 3


class VariableRetrievalMode(enum.IntEnum):
    """Which replicas' values of a parameter the host receives: each group's first (OnePerGroup), or AllReplicas."""

    OnePerGroup = 0
    AllReplicas = 2  # 1 was never used


class MatMulSerializationMode(enum.Enum):
    """The dimension along which `serializedMatMul(lhs, rhs)` cuts the product: the rows of lhs (InputChannels),
    the dimension that is summed (ReducingDim), the columns of rhs (OutputChannels), or none (Disabled)."""

    InputChannels = "input_channels"
    ReducingDim = "reducing_dim"
    OutputChannels = "output_channels"
    Disabled = "none"


class OverlapMode(enum.Enum):
    """Which loop's computation a transfer overlaps. Has no effect; kept for compatibility."""

    NoOverlap = "no_overlap"
    OverlapAccumulationLoop = "overlap_accumulation_loop"
    OverlapDeviceIterationLoop = "overlap_device_iteration_loop"


__all__ = [name for name, cls in vars().items() if isinstance(cls, enum.EnumType)]  # pyright: ignore
