"""The parts of `Options`: `Training`, `Precision`, `Jit`, `TensorLocations`, `Distributed` and `_Popart`."""

import enum
import os
from typing import Any, Literal, Self

import torch

from popengine.environment import read_integer, read_launch
from popengine.errors import Error, did_you_mean
from popengine.torch_private import tree_leaves
from poptorch import autocasting
from poptorch.checks import checked
from poptorch.enums import HalfFloatCastingBehavior, MeanReductionStrategy, ReductionType
from poptorch.logs import log_no_effect, logger
from poptorch.options.option_base import OptionsDict, merge_disjoint, plain_copy

HALF_KERNELS = ("auto", "native", "float32")
_PARTIALS = {torch.float: "float", torch.half: "half"}


class Training(OptionsDict):
    """Options for how gradients become a weight update."""

    _path = "options.Training"
    _renamed = {
        "accumulationReductionType": "accumulationAndReplicationReductionType",
        "meanAccumulationAndReplicationReductionStrategy": "mean_accumulation_and_replication_reduction_strategy",
    }

    accumulation_and_replication_reduction_type: int = ReductionType.Mean.value
    gradient_accumulation: int = 1
    mean_accumulation_and_replication_reduction_strategy: int = MeanReductionStrategy.Post.value

    def gradientAccumulation(self, gradient_accumulation: int) -> Self:
        """Set the number of micro-batches per weight update, on each replica (default: 1). A pipeline of n
        forward stages needs at least 2n - 1 of them."""
        return self.set(gradient_accumulation=gradient_accumulation)

    def accumulationAndReplicationReductionType(self, reduction_type: ReductionType) -> Self:
        """Choose the mean (default) or the sum of gradients over micro-batches and replicas."""
        if not isinstance(reduction_type, ReductionType) or reduction_type is ReductionType.NoReduction:
            raise ValueError(
                "accumulationAndReplicationReductionType takes poptorch.ReductionType.Sum or "
                f"poptorch.ReductionType.Mean; found {reduction_type!r}"
            )
        return self.set(accumulation_and_replication_reduction_type=reduction_type)

    def setMeanAccumulationAndReplicationReductionStrategy(self, strategy: MeanReductionStrategy) -> Self:
        """Choose when gradients are divided for a mean: while they are summed (Running) or after (Post)."""
        setter = "setMeanAccumulationAndReplicationReductionStrategy"
        checked(setter, strategy, MeanReductionStrategy, ValueError)
        if strategy is MeanReductionStrategy.PostAndLoss:
            logger.warning("MeanReductionStrategy.PostAndLoss is deprecated: use Post, the result is equal")
        return self.set(mean_accumulation_and_replication_reduction_strategy=strategy)

    def setAutomaticLossScaling(self, enabled: bool) -> Self:
        """Set whether each update adapts the loss scale: it is halved if gradients are large, infinite or
        NaN, else doubled. An update with an infinite or NaN gradient is left out."""
        is_on = checked("setAutomaticLossScaling", enabled, bool)
        return self._set_popart("automaticLossScalingSettings.enabled", is_on)

    def setConvolutionDithering(self, enabled: bool) -> Self:
        """Has no effect; kept for compatibility: there are no tiles to spread convolutions over."""
        is_on = checked("setConvolutionDithering", enabled, bool)
        self._popart._merge("convolutionOptions", {"enableConvDithering": is_on})
        return self


class Precision(OptionsDict):
    """Options for number formats."""

    _path = "options.Precision"
    _renamed = {"runningVarianceAlwaysFloat": "runningStatisticsAlwaysFloat"}

    autocast_enabled: bool = True
    autocast_policy: autocasting.Policy = autocasting.default
    half_kernels: str = "auto"
    half_float_casting: int
    running_statistics_always_float: bool

    def autocastEnabled(self, autocast_enabled: bool) -> Self:
        """Set whether `poptorch.autocast` has an effect in this model (default: True)."""
        return self.set(autocast_enabled=checked("autocastEnabled", autocast_enabled, bool, ValueError))

    def autocastPolicy(self, autocast_policy: autocasting.Policy) -> Self:
        """Has no effect; kept for compatibility: `poptorch.autocast` casts as `torch.autocast` does."""
        checked("autocastPolicy", autocast_policy, autocasting.Policy, ValueError)
        return self.set(autocast_policy=autocast_policy)

    def enableStochasticRounding(self, enabled: bool) -> Self:
        """Set whether half-precision weights are updated with stochastic rounding (no error on average)."""
        checked(
            "enableStochasticRounding", enabled, int, fix="options.Precision.enableStochasticRounding(True)"
        )
        return self._set_popart("enableStochasticRounding", bool(enabled))

    def enableFloatingPointExceptions(self, enabled: bool) -> Self:
        """Set whether a call raises Error if an operation makes an infinity or NaN that its operands don't have.
        A NaN in inputs or weights passes on without an error: check them with `torch.isfinite(x).all()`."""
        checked("enableFloatingPointExceptions", enabled, bool)
        return self._set_popart("enableFloatingPointChecks", enabled)

    def setPartialsType(self, dtype: torch.dtype) -> Self:
        """Has no effect; kept for compatibility: PyTorch's kernels choose this type; see `halfKernels`."""
        partials = _PARTIALS[checked("setPartialsType", dtype, tuple(_PARTIALS), ValueError)]
        self._popart._merge("convolutionOptions", {"partialsType": partials})
        return self._set_popart("partialsTypeMatMuls", partials)

    def halfKernels(self, kernels: Literal["auto", "native", "float32"]) -> Self:
        """*Pando*: choose how a CPU computes products in half precision: "native", "float32" or "auto".

        Products are matrix products, convolutions and attention in float16 and bfloat16. "native" uses the
        kernels of these types. "float32" computes from float32 copies of the operands, rounds once at the
        end, and copies weights once per step. "auto" (default) is "native" for the types that the processor
        has units for (avx512_fp16, avx512_bf16), and "float32" for other types and for attention. Instances
        on different processors must use "native" or "float32".
        """
        return self.set(half_kernels=checked("halfKernels", kernels, HALF_KERNELS, ValueError))

    def halfFloatCasting(self, half_float_casting: HalfFloatCastingBehavior) -> Self:
        """Has no effect; kept for compatibility: operands of two types follow PyTorch's promotion."""
        checked("halfFloatCasting", half_float_casting, HalfFloatCastingBehavior)
        logger.warning("Precision.halfFloatCasting is deprecated and has no effect: leave it out")
        return self.createOrSet(half_float_casting=half_float_casting.value)

    def runningStatisticsAlwaysFloat(self, value: bool) -> Self:
        """Has no effect; kept for compatibility: running statistics have the type that the model gives them."""
        checked("runningStatisticsAlwaysFloat", value, bool, ValueError)
        logger.warning("Precision.runningStatisticsAlwaysFloat is deprecated and has no effect: leave it out")
        return self.createOrSet(running_statistics_always_float=value)


class Jit(OptionsDict):
    """Deprecated: options of TorchScript tracing, which Pando does not use."""

    _path = "options.Jit"
    trace_model: bool = False

    def traceModel(self, trace_model: bool) -> Self:
        """Refused: True asks for tracing with TorchScript, which is gone, and raises ValueError."""
        if trace_model:
            raise ValueError(
                "Jit.traceModel(True) asks for tracing with TorchScript, which is gone: models are captured "
                "by dispatching. Leave the option out"
            )
        logger.warning("Jit.traceModel is deprecated: leave it out")
        return self.set(trace_model=False)


class TensorLocationSettings(OptionsDict):
    """Settings for the memory of one kind of tensor, such as weights. They never change a result.

    >>> poptorch.TensorLocationSettings().useOnChipStorage(False).useReplicatedTensorSharding(True)
    """

    _path = "poptorch.TensorLocationSettings()"
    io_tiles_to_load: bool
    io_tiles_to_store: bool
    min_elements_for_off_chip: int
    min_elements_for_replicated_tensor_sharding: int
    on_chip_storage: bool
    replicated_tensor_sharding: bool

    def minElementsForOffChip(self, min_elements: int) -> Self:
        """Has no effect; kept for compatibility: tensors stay in the memory in which they are computed."""
        return self.createOrSet(min_elements_for_off_chip=checked("minElementsForOffChip", min_elements, int))

    def minElementsForReplicatedTensorSharding(self, min_elements: int) -> Self:
        """Shard the optimizer state only of parameters with at least `min_elements` elements (default: all
        parameters). Every instance keeps the whole state of a smaller one. Raises AssertionError unless int."""
        checked("minElementsForReplicatedTensorSharding", min_elements, int)
        return self.createOrSet(min_elements_for_replicated_tensor_sharding=min_elements)

    def useOnChipStorage(self, use: bool | None) -> Self:
        """Has no effect; kept for compatibility: tensors stay in the memory in which they are computed. None
        deletes the setting."""
        if use is None:
            self.checkIsFrozen()
            return self.deleteIfExists("on_chip_storage")
        return self.createOrSet(on_chip_storage=checked("useOnChipStorage", use, bool))

    def useReplicatedTensorSharding(self, use: bool = True) -> Self:
        """Set whether the optimizer state is sharded: each of N instances keeps about 1/N of it, in whole
        parameters. Other tensors are never sharded. See [scaling out](../guide/scaling.md).
        """
        return self.createOrSet(replicated_tensor_sharding=checked("useReplicatedTensorSharding", use, bool))

    def useIOTilesToLoad(self, use: bool = True) -> Self:
        """Has no effect; kept for compatibility: there are no tiles."""
        return self.createOrSet(io_tiles_to_load=checked("useIOTilesToLoad", use, bool))

    def useIOTilesToStore(self, use: bool = True) -> Self:
        """Has no effect; kept for compatibility: there are no tiles."""
        return self.createOrSet(io_tiles_to_store=checked("useIOTilesToStore", use, bool))


class TensorLocations(OptionsDict):
    """The location settings of each kind of tensor, read back as `location_weight` and so on."""

    _path = "options.TensorLocations"
    location_activation: TensorLocationSettings = TensorLocationSettings()
    location_weight: TensorLocationSettings = TensorLocationSettings()
    location_optimizer: TensorLocationSettings = TensorLocationSettings()
    location_accumulator: TensorLocationSettings = TensorLocationSettings()
    num_io_tiles: int

    def setActivationLocation(self, location: TensorLocationSettings) -> Self:
        """Has no effect; kept for compatibility: activations stay in the memory in which they are computed."""
        return self.set(location_activation=location)

    def setWeightLocation(self, location: TensorLocationSettings) -> Self:
        """Has no effect; kept for compatibility: weights stay in the memory in which they are used."""
        return self.set(location_weight=location)

    def setOptimizerLocation(self, location: TensorLocationSettings) -> Self:
        """Set the location of the optimizer state. Only its replicated tensor sharding has an effect.

        >>> sharded = poptorch.TensorLocationSettings().useReplicatedTensorSharding(True)
        >>> options.TensorLocations.setOptimizerLocation(sharded)
        """
        return self.set(location_optimizer=location)

    def setAccumulatorLocation(self, location: TensorLocationSettings) -> Self:
        """Has no effect; kept for compatibility: gradient sums stay in the memory in which they are computed."""
        return self.set(location_accumulator=location)

    def numIOTiles(self, num_tiles: int) -> Self:
        """Has no effect; kept for compatibility: a CPU has no tiles. Takes an even number from 32 to 192. A
        model with overlapped inputs or outputs raises Error at compilation if this was not called."""
        if not isinstance(num_tiles, int) or num_tiles not in range(32, 193, 2):
            raise AssertionError(f"numIOTiles must be an even number between 32 and 192; found {num_tiles!r}")
        return self.createOrSet(num_io_tiles=num_tiles)


class Distributed(OptionsDict):
    """The number of processes and the id of this process, by default from the launcher's environment.

    MPI's variables take precedence, as in PopTorch. Variables of other launchers (torchrun, srun) are read,
    too: without them, each process would train alone.
    """

    _path = "options.Distributed"
    distributed_process_id: int = 0
    num_distributed_processes: int = 1
    rows_by_replica: bool = False
    instances_per_replica: int = 1

    def __init__(self) -> None:
        super().__init__()
        launch = read_launch()
        # Of this class, because popdist.poptorch.Options refuses the method.
        Distributed.configureProcessId(self, launch.instance, launch.instances)
        self.set(instances_per_replica=launch.instances_per_replica)

    @property
    def processId(self) -> int:
        """Return the id of this process, from 0."""
        return self.distributed_process_id

    @property
    def numProcesses(self) -> int:
        """Return the number of processes that train together."""
        return self.num_distributed_processes

    @property
    def _dataset_share(self) -> tuple[int, int]:
        """Return the index and the number of the shares of a dataset. Processes that run one replica have one share."""
        return self.processId // self.instances_per_replica, self.numProcesses // self.instances_per_replica

    def disable(self) -> Self:
        """Make this process 0 of 1. The environment's variables are ignored."""
        return self.configureProcessId(0, 1)

    def configureProcessId(self, process_id: int, num_processes: int) -> Self:
        """Set the id of this process, from 0, and the number of processes, as loaders divide a dataset. It is
        for programs that no launcher starts. Raises AssertionError unless 0 <= process_id < num_processes."""
        checked("configureProcessId: num_processes", num_processes, int, least=1)
        checked("configureProcessId: process_id", process_id, tuple(range(num_processes)))
        self.set(distributed_process_id=process_id, num_distributed_processes=num_processes)
        return self.set(instances_per_replica=1)

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> Self:
        """Read the number of processes and this process's id, at once, from the two environment variables with
        these names. If neither is set, this is process 0 of 1. Raises ValueError if one is not an integer."""
        if not any(map(os.environ.get, (var_num_processes, var_process_id))):
            return self.disable()
        names = var_process_id, var_num_processes
        return self.configureProcessId(*(read_integer(os.environ, name) for name in names))

    def rowsByReplica(self, by_replica: bool) -> Self:
        """*Pando*: choose which rows a loader reads in each process. True: each global batch is divided among
        the replicas of all processes, so that a replica's rows are the same for any number of processes.
        False: each process reads a contiguous share of the dataset's order. The default is True for
        `popdist.poptorch.Options`, else False, as in PopTorch."""
        return self.set(rows_by_replica=checked("rowsByReplica", by_replica, bool))


# Settings without effect; with a dot at the end: the prefix of names.
_NO_EFFECT = """
    accumulateOuterFragmentSettings. automaticLossScalingSettings. batchSerializationSettings.
    replicatedCollectivesSettings.
    cachePath convolutionOptions decomposeGradSum defaultBufferingDepth defaultPrefetchBufferingDepth
    disableGradAccumulationTensorStreams disableOptimizerStateTensorStreams enableEngineCaching enableExplicitIR
    enableGradientAccumulation enableOutlining enableStableNorm explicitRecomputation
    groupNormStridedChannelGrouping outlineThreshold partialsTypeMatMuls rearrangeAnchorsOnHost
    saveInitializersToFile scheduleNonWeightUpdateGradientConsumersEarly subgraphCopyingStrategy
    timeLimitScheduler virtualGraphMode
"""
# Settings with an effect, and their defaults.
_DEFAULTS: dict[str, Any] = {
    "autoRecomputation": 0,
    "automaticLossScalingSettings.enabled": False,
    "enableFloatingPointChecks": False,
    "enableStochasticRounding": False,
    "engineOptions": {},
    "instrumentWithHardwareCycleCounter": False,
    "syntheticDataMode": 0,
    "updatableNamedBuffers": [],
}


class Popart(OptionsDict):
    """`options._Popart`: settings of PopTorch's compiler, stored by name in `options`. At compilation a name that looks
    mistyped raises Error, and an unknown name logs a warning."""

    _path = "options._Popart"
    options: dict[str, Any] = {}
    patterns: dict[str, bool] = {}
    patterns_level: int = 2

    def __call__(self, name: str) -> Any:
        return self.options.get(name, _DEFAULTS[name])

    def set(self, name: str, value: Any) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Store a setting by name. A name may have dots: "automaticLossScalingSettings.enabled"."""
        if checked("_Popart.set", name, str) not in _DEFAULTS and _has_no_effect(name):
            log_no_effect(f"options._Popart.set({name!r}, ...)", "Pando has no such setting")
        return self._store(name, int(value) if isinstance(value, enum.IntEnum) else value)

    def _store(self, name: str, value: Any) -> Self:
        self.checkIsFrozen()
        self.options[name] = value
        return self

    def _merge(self, name: str, values: dict[str, Any]) -> Self:
        """Add entries to a setting that is a dictionary; create it if it does not exist."""
        return self._store(name, {**self.options.get(name, {}), **values})

    def setEngineOptions(self, engine_options: dict[str, str]) -> Self:
        """Set all engine options. Only `autoReport.all` and `autoReport.directory` (profiles) are used."""
        return self.set("engineOptions", dict(checked("setEngineOptions", engine_options, dict)))

    def setPatterns(self, patterns: dict[str, bool], level: int = 2) -> Self:
        """Has no effect; kept for compatibility: there are no graph patterns."""
        for name, is_on in checked("setPatterns", patterns, dict).items():
            checked("setPatterns: the name of a pattern", name, str)
            checked(f"setPatterns: the value of {name!r}", is_on, int)
        self.patterns, self.patterns_level = dict(patterns), int(checked("setPatterns", level, int))
        return self

    def check_names(self) -> None:
        """*Pando*: raise Error for names that look mistyped, and for values that are not bools, numbers,
        strings or containers of these. Log a warning for each unknown name."""
        for name, value in self.options.items():
            if not all(isinstance(leaf, int | float | str) for leaf in tree_leaves(value)):
                raise Error(
                    f"Unknown value type {type(value).__name__} for option {name}: _Popart options are "
                    f"bools, numbers, strings, and lists or dictionaries of them"
                )
            if name in _DEFAULTS or _has_no_effect(name):
                continue
            if meant := did_you_mean(name, [*_DEFAULTS, *_NO_EFFECT.split()], least=0.85):
                raise Error(f"Unknown {type(value).__name__} option {name}{meant}")
            logger.warning("_Popart option %s is not known here: it has no effect", name)

    def toDict(self) -> dict[str, Any]:
        """Return the settings by name, and the patterns with their level."""
        patterns = {"patterns": dict(self.patterns), "patterns_level": self.patterns_level}
        return merge_disjoint(plain_copy(self.options), patterns)


def _has_no_effect(name: str) -> bool:
    names = _NO_EFFECT.split()
    return name in names or name.startswith(tuple(prefix for prefix in names if prefix.endswith(".")))
