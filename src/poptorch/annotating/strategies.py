"""Execution strategies: which block belongs to which stage, and in which order the stages run.

A strategy is a builder: a user may still change it (`strategy.stage("A").ipu(2)`), and `freeze` returns the engine's
value. Compilation checks the strategy against the model's blocks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, TypeVar

from popengine.errors import Error, did_you_mean, without_internal_frames
from popengine.order import Order, enter_order, order_named
from popengine.settings import AutoRule, StagePlan, Strategy
from poptorch.checks import WORDS, checked
from poptorch.enums import AutoStage, Liveness
from poptorch.logs import log_no_effect

T = TypeVar("T", "Stage", "Phase")
_RULES: tuple[AutoRule, ...] = ("same_as_ipu", "auto_increment")  # by AutoStage


class Stage:
    """Blocks that run one after another on one ipu. A strategy takes stages, in the order of the data.

    Without `ipu(...)`, the stage runs on the ipu with the number of the stage.

    >>> stages = [poptorch.Stage("embedding", "layer0").ipu(0), poptorch.Stage("layer1").ipu(1)]
    >>> options.setExecutionStrategy(poptorch.PipelinedExecution(*stages))

    Args: the ids of the stage's blocks, each a string: the `user_id` of a `Block`, or a key of `annotate`
    Raises: AssertionError, if an id is not a string
    """

    blocks: list[str]

    def __init__(self, *block_ids: str) -> None:
        for block in block_ids:
            fix = 'poptorch.Stage("block").ipu(0), or PipelinedExecution(poptorch.AutoStage.AutoIncrement)'
            fix = "PipelinedExecution(*stages), in place of a list" if isinstance(block, Stage) else fix
            checked("Block ids are strings, and an AutoStage stands alone: a Stage", block, str, fix=fix)
        self.blocks = list(block_ids)
        self._ipu: int | None = None

    def ipu(self, ipu: int) -> Self:
        """Set the number of the stage's ipu, from 0, and return the stage. Several stages can be on one ipu."""
        self._ipu = checked("Stage.ipu", ipu, int, least=0, fix='poptorch.Stage("block").ipu({})')
        return self

    def freeze(self) -> StagePlan:
        """Return the value that the engine reads."""
        return StagePlan(tuple(self.blocks), self._ipu)

    def __repr__(self) -> str:
        ipu = "" if self._ipu is None else f".ipu({self._ipu})"
        return f"Stage({', '.join(map(repr, self.blocks))}){ipu}"


class Phase:
    """Stages that run at the same time, in a strategy of phases.

    >>> poptorch.SerialPhasedExecution(poptorch.Phase(poptorch.Stage("a"), poptorch.Stage("b")), "c")

    Args: stages; or block ids, which form one stage
    Raises: AssertionError, if there is no argument, or stages and block ids are mixed
    """

    def __init__(self, *arg: Stage | str) -> None:
        stages = [member for member in arg if isinstance(member, Stage)]
        blocks = [member for member in arg if isinstance(member, str)]
        if not arg or len(arg) not in (len(stages), len(blocks)):
            raise AssertionError(f"A phase is made of stages only, or of block ids only; found {list(arg)!r}")
        self.stages = stages or [Stage(*blocks)]

    def stage(self, index: int) -> Stage:
        """Return the stage with this index, from 0. Raises AssertionError if there is no such stage."""
        return self.stages[checked("Phase.stage", index, tuple(range(len(self.stages))))]

    def ipus(self, *ipus: int) -> Self:
        """Set the ipu of each stage, and return the phase. Raises AssertionError for another number of ipus."""
        if len(ipus) != len(self.stages):
            raise AssertionError(
                f"Phase.ipus takes one ipu for each stage: {len(self.stages)} expected, {len(ipus)} found"
            )
        for stage, ipu in zip(self.stages, ipus, strict=True):
            stage.ipu(ipu)
        return self

    def __repr__(self) -> str:
        return f"Phase({', '.join(map(repr, self.stages))})"


def _as_instance(cls: type[T], argument: Any) -> T:
    """Return a `Stage` or `Phase` unchanged, or a new one of an argument, or of a list of arguments."""
    if isinstance(argument, cls):
        return argument
    return cls(*argument) if isinstance(argument, list | tuple) else cls(argument)


class ExecutionStrategy:
    """The base class of strategies: the stage of each block, and two methods called around the capture."""

    _execution_mode: int  # PopTorch's number of the kind of strategy
    _schedule: str  # the name of the order of a step

    def __init__(self, stages: Iterable[Stage]) -> None:
        self._order = tuple(stages)
        self._stages: dict[str, Stage] = {}
        for stage in self._order:
            for block in stage.blocks:
                if block in self._stages:
                    raise AssertionError(
                        f"Block {block!r} is associated with more than one stage\n  fix: name it in one stage only"
                    )
                self._stages[block] = stage

    def stage(self, block_id: str) -> Stage:
        """Return the stage of a block. Raises AssertionError for an unknown block."""
        blocks = ", ".join(map(repr, self._stages)) or "none, since the stages are automatic"
        if block_id not in self._stages:
            raise AssertionError(
                f"Unknown block {block_id!r}; this strategy has {blocks}{did_you_mean(block_id, self._stages)}"
            )
        return self._stages[block_id]

    def onStartTracing(self) -> None:
        """Do nothing. Subclasses may override this method, which is called before a model is captured."""

    def onEndTracing(self) -> None:
        """Do nothing. Subclasses may override this method, which is called after a model is captured."""

    def backendOptions(self) -> dict[str, Any]:
        """Return this strategy's items of the dictionary `Options.toDict()`."""
        return {"execution_mode": self._execution_mode}

    def freeze(self) -> Strategy:
        """Return this strategy as a frozen value for the engine."""
        return Strategy(self._schedule, None, tuple(stage.freeze() for stage in self._order))

    if not TYPE_CHECKING:  # so that type checkers find misspelt names

        @without_internal_frames
        def __getattr__(self, name: str) -> Any:
            meant = did_you_mean(name, ["ipu", *dir(type(self))], shown={"ipu": 'Stage("block").ipu(0)'})
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{meant}", name=name)


WORDS[ExecutionStrategy] = "an execution strategy, such as poptorch.PipelinedExecution(...)"


@dataclass(frozen=True)
class AutoBalance:
    """A rule that places blocks on ipus so that the slowest ipu is as fast as possible. (Pando.)

    The first compilation runs one micro-batch and measures each block; the log shows the choice and its
    reason. In a model without marks, each repeated layer is a block.

    Args:
        ipus: the number of ipus; each runs one stage of consecutive blocks

    >>> opts.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoBalance(4)))
    """

    ipus: int

    def __post_init__(self) -> None:
        checked("AutoBalance", self.ipus, int, least=1)


class _StagedExecution(ExecutionStrategy):
    """A strategy of stages, which the user lists or a rule chooses."""

    def __init__(self, *args: AutoStage | AutoBalance | Stage | str | Sequence[str]) -> None:
        first, *rest = args or (AutoStage.SameAsIpu,)
        self._auto = first if isinstance(first, AutoStage | AutoBalance) and not rest else None
        super().__init__((_as_instance(Stage, arg) for arg in args) if self._auto is None else ())

    def freeze(self) -> Strategy:
        strategy = super().freeze()
        if isinstance(self._auto, AutoBalance):
            return replace(strategy, auto="balance", ipus=self._auto.ipus)
        return strategy if self._auto is None else replace(strategy, auto=_RULES[self._auto])

    def __repr__(self) -> str:
        auto = f"AutoStage.{self._auto.name}" if isinstance(self._auto, AutoStage) else repr(self._auto)
        return f"{type(self).__name__}({', '.join(map(repr, self._order)) if self._auto is None else auto})"


class PipelinedExecution(_StagedExecution):
    """A strategy that runs all stages at the same time, each on another micro-batch. It is the default.

    >>> options.setExecutionStrategy(poptorch.PipelinedExecution("embedding", ["layer0", "layer1"], "head"))
    >>> options.Training.gradientAccumulation(8)  # a pipeline of n stages needs at least 2n - 1 in training

    Args:
        args:     one `AutoStage` (default `SameAsIpu`) or `AutoBalance`; or the stages in the order of the data,
            numbered from 0: each a `Stage`, a block id, or a list of block ids
        schedule: *Pando*: the order in which an ipu runs its micro-batches; it does not change the results.
            "1f1b" (default); "gpipe": all forwards first, so the activations of all micro-batches are stored;
            "interleaved": an ipu with several stages alternates between them, which shortens the bubble;
            "zero-bubble": gradients of weights fill the bubble; "zero-bubble-v": the same with two stages on each
            ipu, such as ipus 0, 1, 1, 0; "dualpipe-v": on these stages, a forward and a backward in turns; or a
            `popengine.order.Order` of your own
    Raises:
        AssertionError: an argument is not a stage, or a block is in two stages
        Error: (at compilation) the model has a block without a stage, or there are too few micro-batches
    """

    _execution_mode = 0

    def __init__(
        self, *args: AutoStage | AutoBalance | Stage | str | Sequence[str], schedule: str | Order = "1f1b"
    ) -> None:
        is_own = isinstance(schedule, Order)
        self._schedule = enter_order(schedule) if is_own else order_named(str(schedule)).name
        self._or_sharded = False
        super().__init__(*args)

    def orSharded(self) -> Self:
        """Run stages one after another, as `ShardedExecution`, when a call has too few micro-batches for a
        pipeline. Without `orSharded` such a call raises Error. The results are the same. (Pando.)"""
        self._or_sharded = True
        return self

    def freeze(self) -> Strategy:
        return replace(super().freeze(), or_sharded=self._or_sharded)

    def __repr__(self) -> str:
        schedule = "" if self._schedule == "1f1b" else f", schedule={self._schedule!r}"
        also = ".orSharded()" if self._or_sharded else ""
        return f"{super().__repr__()[:-1]}{schedule}){also}"


class ShardedExecution(_StagedExecution):
    """A strategy that runs one stage at a time: a micro-batch passes all stages before the next one starts.

    Only one ipu works at any time, and each ipu holds the weights and activations of its stages alone. So sharding
    fits a large model into the memory of several ipus, and needs no minimum of micro-batches.

    >>> options.setExecutionStrategy(poptorch.ShardedExecution("embedding", ["layer0", "layer1"], "head"))

    Args: as for `PipelinedExecution`, without a schedule
    Raises:
        AssertionError: an argument is not a stage, or a block is in two stages
        Error: (at compilation) the model has a block without a stage
    """

    _execution_mode, _schedule = 1, "sharded"


class _PhasedExecution(ExecutionStrategy):
    """A strategy that runs the stages of its phases as `ShardedExecution` does; on an IPU, tensors are in host memory
    between phases."""

    _execution_mode, _schedule = 2, "sharded"
    _serial: bool

    def __init__(self, *phases: Phase | Stage | str | Sequence[Stage] | Sequence[str]) -> None:
        if not phases or any(isinstance(phase, AutoStage) for phase in phases):
            raise AssertionError("There is no AutoStage for PhasedExecution: name the blocks of each phase")
        self._phases = [_as_instance(Phase, phase) for phase in phases]
        self._separate_backward_phase = False
        self._liveness = Liveness.AlwaysLive
        super().__init__(stage for phase in self._phases for stage in phase.stages)

    def phase(self, index: int) -> Phase:
        """Return the phase with this index, from 0. Raises AssertionError if there is no such phase."""
        indices = tuple(range(len(self._phases)))
        return self._phases[checked(f"{type(self).__name__}.phase", index, indices)]

    def useSeparateBackwardPhase(self, use: bool = True) -> Self:
        """Has no effect; kept for compatibility: the last phase's backward is not a phase of its own."""
        self._separate_backward_phase = checked("useSeparateBackwardPhase", use, bool)
        log_no_effect("useSeparateBackwardPhase", "the last phase's backward is not a phase of its own")
        return self

    def backendOptions(self) -> dict[str, Any]:
        return {
            **super().backendOptions(),
            "separate_backward_phase": self._separate_backward_phase,
            "tensors_liveness": self._liveness.value,
            "serial_phases_execution": self._serial,
        }

    def __repr__(self) -> str:
        settings = f"separate_backward_phase={self._separate_backward_phase}, liveness={self._liveness.name}"
        return f"{type(self).__name__}({', '.join(map(repr, self._phases))}, {settings})"


class SerialPhasedExecution(_PhasedExecution):
    """A strategy that runs phases one after another, each on all ipus: as `ShardedExecution` over their stages.

    >>> options.setExecutionStrategy(poptorch.SerialPhasedExecution("embedding", ["layer0", "layer1"], "head"))

    Args: the phases in the order of the data: each a `Phase`, a `Stage`, a block id, or a list of either
    Raises: AssertionError, if there is no phase, or a phase is an `AutoStage`
    """

    _serial = True

    def setTensorsLiveness(self, liveness: Liveness) -> Self:
        """Has no effect; kept for compatibility: tensors stay in the memory of this machine."""
        self._liveness = checked("setTensorsLiveness", liveness, Liveness)
        log_no_effect("setTensorsLiveness", "tensors stay in the memory of this machine")
        return self


class ParallelPhasedExecution(_PhasedExecution):
    """A strategy that runs phases one after another, as `SerialPhasedExecution`: even phases on even ipus, odd phases
    on odd ipus.

    >>> phases = [poptorch.Phase("a").ipus(0), poptorch.Phase("b").ipus(1)]
    >>> options.setExecutionStrategy(poptorch.ParallelPhasedExecution(*phases))

    Args: as for `SerialPhasedExecution`
    Raises: also Error (when a model is wrapped), if an even phase is on an odd ipu, or an odd one on an even ipu
    """

    _serial = False

    def sendTensorsOffChipAfterFwd(self, off_chip: bool = True) -> Self:
        """Has no effect; kept for compatibility: tensors stay in the memory of this machine."""
        is_off = checked("sendTensorsOffChipAfterFwd", off_chip, bool)
        self._liveness = Liveness.OffChipAfterFwd if is_off else Liveness.AlwaysLive
        log_no_effect("sendTensorsOffChipAfterFwd", "tensors stay in the memory of this machine")
        return self

    def freeze(self) -> Strategy:
        for index, phase in enumerate(self._phases):
            for stage in map(Stage.freeze, phase.stages):
                if stage.ipu is not None and stage.ipu % 2 != index % 2:
                    raise Error(
                        f"phase {index} of ParallelPhasedExecution is on ipu {stage.ipu} (blocks "
                        f"{', '.join(stage.blocks)}): even phases run on even ipus, odd ones on odd ipus\n"
                        f"  fix: strategy.phase({index}).ipus(...) with {'odd' if index % 2 else 'even'} ipus"
                    )
        return super().freeze()
