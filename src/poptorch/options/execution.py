"""The options of a step: how much one call computes, on how many replicas, and what comes back."""

from typing import Any, Literal, Self

import torch

from poptorch.annotating.strategies import ExecutionStrategy
from poptorch.enums import CommGroupType, OutputMode
from poptorch.logs import logger
from poptorch.options.option_base import OptionsDict, Setting, expect, recorded

BACKENDS = ("eager", "inductor")
MEMORY_FORMATS = ("preserve", "channels_last", "auto")
_SYNTHETIC_NORMAL = 2  # popart.SyntheticDataMode.RandomNormal


class ExecutionOptions(OptionsDict):
    _execution_strategy: ExecutionStrategy

    anchored_tensors: Setting[dict[str, list[Any]]] = Setting({})  # [long name, use default, mode, period]
    backend: Setting[str] = Setting()
    broadcast_buffers = Setting(True)
    device_iterations = Setting(1, positive=True)
    input_cgt = Setting(CommGroupType.Consecutive)
    input_group_size = Setting(1)
    memory_format: Setting[str] = Setting()
    output_mode = Setting(OutputMode.Default.value)
    output_return_period = Setting(1)
    random_seed: Setting[int] = Setting()
    replication_factor = Setting(1, positive=True)

    def deviceIterations(self, device_iterations: int) -> Self:
        """Weight updates in one call; in inference, micro-batches of each replica."""
        return self.set(device_iterations=device_iterations)

    def replicationFactor(self, replication_factor: int) -> Self:
        """Copies of the model in this process, each with its own rows of the batch."""
        return self.set(replication_factor=replication_factor)

    def inputReplicaGrouping(self, input_group_size: int, input_group_type: CommGroupType) -> Self:
        """Replicas of one group get the same input. Call after `replicationFactor`.

        Raises: ValueError, for a group that does not fit the replicas, or of type All.
        """
        if not isinstance(input_group_type, CommGroupType):
            raise ValueError(f"input_group_type is a poptorch.CommGroupType; found {input_group_type!r}")
        if input_group_type is CommGroupType.All:
            raise ValueError(
                "input_group_type cannot be All: for the same input on all replicas use Consecutive with "
                f"input_group_size={self.replication_factor}"
            )
        if input_group_type is CommGroupType.NoGrouping:
            input_group_size, input_group_type = 1, CommGroupType.Consecutive
        if not isinstance(input_group_size, int) or input_group_size < 1:
            raise ValueError(f"input_group_size is a number from 1; found {input_group_size!r}")
        if input_group_size > self.replication_factor or self.replication_factor % input_group_size:
            raise ValueError(
                f"input_group_size {input_group_size} must not be larger than the replication factor "
                f"{self.replication_factor}, and must divide it; call replicationFactor first"
            )
        return self.set(input_group_size=input_group_size, input_cgt=input_group_type)

    def broadcastBuffers(self, broadcast_buffers: bool = True) -> Self:
        """True (default) refuses models whose buffers would drift apart on several replicas; False lets them."""
        return self.set(broadcast_buffers=broadcast_buffers)

    def setExecutionStrategy(self, strategy: ExecutionStrategy) -> Self:
        """How stages take turns: Pipelined-, Sharded-, SerialPhased- or ParallelPhasedExecution."""
        assert isinstance(strategy, ExecutionStrategy), (
            "setExecutionStrategy takes a strategy, such as poptorch.PipelinedExecution(...); an AutoStage "
            f"goes into one: poptorch.ShardedExecution(poptorch.AutoStage.SameAsIpu). Found {strategy!r}"
        )
        self._execution_strategy = strategy
        return self

    def outputMode(self, output_mode: OutputMode, output_return_period: int | None = None) -> Self:
        """Which outputs of one call come back; the period is for EveryN only, in device iterations."""
        period = _period(expect("outputMode", output_mode, OutputMode), output_return_period)
        return self.set(output_mode=output_mode, output_return_period=period)

    def defaultOutputMode(self) -> bool:
        """True while the mode is Default: Final in training, All in inference."""
        return self.output_mode == OutputMode.Default

    def anchorTensor(
        self,
        short_name: str,
        long_name: str,
        output_mode: OutputMode | None = None,
        output_return_period: int | None = 1,
    ) -> None:
        """Keep a tensor's value at each call, for `getAnchoredTensor(short_name)`: of what `getTensorNames()` lists.

        Stores `[long_name, use_default, mode, period]`. Without a mode it is the model's, resolved when the
        model is wrapped. As in PopTorch, frozen options allow it.
        """
        use_default = output_mode is None
        mode = expect("anchorTensor", OutputMode.Default if output_mode is None else output_mode, OutputMode)
        period = 1 if mode != OutputMode.EveryN else _period(mode, output_return_period)
        self.anchored_tensors[short_name] = [long_name, use_default, mode.value, period]

    def randomSeed(self, random_seed: int) -> Self:
        """Seed the random numbers of the model, and torch's own on the host."""
        self.createOrSet(random_seed=expect("randomSeed", random_seed, int))
        torch.manual_seed(random_seed)
        return self

    def enableSyntheticData(self, enabled: bool | int) -> Self:
        """Make the inputs up, once; outputs have no meaning. Also takes a `popart.SyntheticDataMode`."""
        assert isinstance(enabled, int), f"enableSyntheticData takes a bool; found {enabled!r}"
        mode = enabled * _SYNTHETIC_NORMAL if isinstance(enabled, bool) else int(enabled)
        assert 0 <= mode <= 3, f"enableSyntheticData takes a bool or a popart.SyntheticDataMode; found {mode}"
        return self._set_popart("syntheticDataMode", mode)

    def compiler(self, backend: str) -> Self:
        """*Ours*: what runs the model's operations, "eager" (one by one) or "inductor" (compiled to fused kernels).

        Wins over the environment variable POPTORCH_BACKEND.
        """
        assert backend in BACKENDS, f"compiler takes one of {', '.join(BACKENDS)}; found {backend!r}"
        return self.createOrSet(backend=backend)

    def memoryFormat(self, memory_format: Literal["preserve", "channels_last", "auto"]) -> Self:
        """*Ours*: the layout of convolutional parts: the model's ("preserve"), "channels_last", or by a rule ("auto").

        "auto" is "channels_last" where images of 8 channels or more are pooled or resized, which is 2 to 10 times as
        fast in it on CPUs; a profile measures what it gives. "preserve" (default) gives the bits of plain PyTorch; the
        other layout differs by rounding. `executor.memory_format` says which one a compiled model has.
        """
        assert memory_format in MEMORY_FORMATS, (
            f"memoryFormat takes one of {', '.join(MEMORY_FORMATS)}; found {memory_format!r}"
        )
        return self.createOrSet(memory_format=memory_format)

    @recorded("PyTorch's norms are stable")
    def enableStableNorm(self, enabled: bool) -> Self:
        return self._set_popart("enableStableNorm", expect("enableStableNorm", enabled, bool))

    def updatableNamedBuffers(self, buffers: list[str]) -> Self:
        """The buffers that `copyNamedBuffersToDevice` uploads."""
        assert isinstance(buffers, list) and all(isinstance(name, str) for name in buffers), (
            f"updatableNamedBuffers takes a list of buffer names; found {buffers!r}"
        )
        return self._set_popart("updatableNamedBuffers", list(buffers))

    def relaxOptimizerAttributesChecks(self, relax: bool = True) -> Self:
        """Tell of unexpected attributes of optimizers at DEBUG, not in warnings."""
        self._relax_optimizer_checks = expect("relaxOptimizerAttributesChecks", relax, bool)
        return self


def _period(mode: OutputMode, period: int | None) -> int:
    if mode == OutputMode.EveryN:
        assert isinstance(period, int) and period > 0, (
            f"OutputMode.EveryN needs output_return_period, a number of device iterations from 1; "
            f"found {period!r}"
        )
        return period
    if period is not None:
        logger.info("output_return_period=%s is ignored: it is for OutputMode.EveryN only", period)
    return 1
