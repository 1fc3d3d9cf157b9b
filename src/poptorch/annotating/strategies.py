"""Execution strategies: which block belongs to which stage, and how the stages take turns.

Builders that a user writes and may still change (`strategy.stage("A").ipu(2)`); `freeze` turns one into
the engine's value. Whether the model's blocks match is the engine's question, asked at compilation.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from popengine.errors import Error, did_you_mean
from popengine.settings import AutoRule, Mode, Strategy
from poptorch.enums import AutoStage, Liveness

from .stages import Phase, Stage, as_phase, as_stage

_PIPELINED, _SHARDED, _PHASED = 0, 1, 2  # the values of `execution_mode`
_AUTO_RULES: dict[AutoStage, AutoRule] = {
    AutoStage.SameAsIpu: "same_as_ipu",
    AutoStage.AutoIncrement: "auto_increment",
}


class ExecutionStrategy:
    """What all strategies share: their stages by block, and two hooks around the capture of a model."""

    def __init__(self, stages: Iterable[Stage]) -> None:
        self._stages: dict[str, Stage] = {}
        for stage in stages:
            for block in stage.blocks:
                assert block not in self._stages, (
                    f"Block {block!r} is associated with more than one stage. Name it once only."
                )
                self._stages[block] = stage

    def stage(self, block_id: str) -> Stage:
        """The stage that a block belongs to."""
        known = ", ".join(map(repr, self._stages)) or "none, since the stages are automatic"
        assert block_id in self._stages, (
            f"Unknown block {block_id!r}; this strategy has {known}{did_you_mean(block_id, self._stages)}"
        )
        return self._stages[block_id]

    def onStartTracing(self) -> None:
        """Called before a model is captured; for subclasses."""

    def onEndTracing(self) -> None:
        """Called after a model is captured; for subclasses."""

    def backendOptions(self) -> dict[str, Any]:
        """The values this strategy adds to `Options.toDict()`."""
        raise NotImplementedError

    def freeze(self) -> Strategy:
        """The engine's value of this strategy."""
        raise NotImplementedError


@dataclass(frozen=True)
class AutoBalance:
    """Place the blocks of a model on this many ipus so that the slowest is as fast as possible. (Ours.)

    The first compilation runs one micro-batch and measures each block; the log says what was chosen and why.

    Args:
        ipus:     how many, each one stage of consecutive blocks
        capacity: bytes an ipu may hold of weights, gradients, optimizer state and activations

    >>> opts.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoBalance(4)))
    """

    ipus: int
    capacity: float = math.inf

    def __post_init__(self) -> None:
        assert isinstance(self.ipus, int) and self.ipus > 0, (
            f"AutoBalance takes a number of ipus from 1; found {self.ipus!r}"
        )


class PipelinedExecution(ExecutionStrategy):
    """Stages work at the same time, each on another micro-batch.

    Args: one `AutoStage` (default `SameAsIpu`) or `AutoBalance`, or the stages in order, numbered from 0: each
        a `Stage`, a block id, or a list of block ids.

    >>> PipelinedExecution("embedding", ["layer0", "layer1"], Stage("head").ipu(0))
    """

    _execution_mode = _PIPELINED
    _mode: Mode = "pipelined"

    def __init__(self, *args: AutoStage | AutoBalance | Stage | str | Sequence[str]) -> None:
        self._auto: AutoStage | AutoBalance | None = None
        self._order: tuple[Stage, ...] = ()
        self._or_sharded = False
        if not args:
            self._auto = AutoStage.SameAsIpu
        elif len(args) == 1 and isinstance(args[0], AutoStage | AutoBalance):
            self._auto = args[0]
        else:
            self._order = tuple(as_stage(argument) for argument in args)
        super().__init__(self._order)

    def orSharded(self) -> Self:
        """Run the stages one after another, as `ShardedExecution` does, where a call has too few micro-batches to
        fill the pipeline, instead of refusing. The results are the same. (Ours.)"""
        self._or_sharded = True
        return self

    def backendOptions(self) -> dict[str, Any]:
        return {"execution_mode": self._execution_mode}

    def freeze(self) -> Strategy:
        stages = tuple(stage.freeze() for stage in self._order)
        strategy = Strategy(self._mode, stages=stages, or_sharded=self._or_sharded)
        if isinstance(self._auto, AutoBalance):
            return replace(strategy, auto="balance", ipus=self._auto.ipus, capacity=self._auto.capacity)
        return replace(strategy, auto=None if self._auto is None else _AUTO_RULES[self._auto])

    def __repr__(self) -> str:
        stages = ", ".join(map(repr, self._order))
        auto = f"AutoStage.{self._auto.name}" if isinstance(self._auto, AutoStage) else repr(self._auto)
        also = ".orSharded()" if self._or_sharded else ""
        return f"{type(self).__name__}({stages if self._auto is None else auto}){also}"


class ShardedExecution(PipelinedExecution):
    """Stages take turns: one micro-batch passes all stages before the next one starts."""

    _execution_mode = _SHARDED
    _mode: Mode = "sharded"


class _PhasedExecution(ExecutionStrategy):
    """Phases run one after another, and tensors go to host memory between them."""

    _serial: bool

    def __init__(self, *phases: Phase | Stage | str | Sequence[Stage] | Sequence[str]) -> None:
        automatic = not phases or any(isinstance(phase, AutoStage) for phase in phases)
        assert not automatic, (
            "There is no AutoStage for PhasedExecution: name the blocks of each phase, as in "
            'SerialPhasedExecution("a", ["b", "c"])'
        )
        self._phases = [as_phase(phase) for phase in phases]
        self._separate_backward_phase = False
        self._liveness = Liveness.AlwaysLive
        super().__init__(stage for phase in self._phases for stage in phase.stages)

    def phase(self, index: int) -> Phase:
        assert 0 <= index < len(self._phases), (
            f"Phase {index} does not exist: {type(self).__name__} has phases 0 to {len(self._phases) - 1}"
        )
        return self._phases[index]

    def useSeparateBackwardPhase(self, use: bool = True) -> Self:
        """Give the backward pass of the last phase a phase of its own. Recorded: results are the same."""
        assert isinstance(use, bool), f"useSeparateBackwardPhase takes a bool; found {use!r}"
        self._separate_backward_phase = use
        return self

    def backendOptions(self) -> dict[str, Any]:
        return {
            "execution_mode": _PHASED,
            "separate_backward_phase": self._separate_backward_phase,
            "tensors_liveness": self._liveness.value,
            "serial_phases_execution": self._serial,
        }

    def freeze(self) -> Strategy:
        return Strategy("phased", None, tuple(s.freeze() for phase in self._phases for s in phase.stages))

    def __repr__(self) -> str:
        settings = f"separate_backward_phase={self._separate_backward_phase}, liveness={self._liveness.name}"
        return f"{type(self).__name__}({', '.join(map(repr, self._phases))}, {settings})"


class SerialPhasedExecution(_PhasedExecution):
    """All ipus work on one phase, then all on the next."""

    _serial = True

    def setTensorsLiveness(self, liveness: Liveness) -> Self:
        """How long tensors stay on the device. Recorded: results are the same."""
        assert isinstance(liveness, Liveness), f"setTensorsLiveness takes a Liveness; found {liveness!r}"
        self._liveness = liveness
        return self


class ParallelPhasedExecution(_PhasedExecution):
    """Even phases run on even ipus and odd phases on odd ones, so that one loads while the other computes."""

    _serial = False

    def sendTensorsOffChipAfterFwd(self, off_chip: bool = True) -> Self:
        """Send tensors to host memory after their forward phase. Recorded: results are the same."""
        assert isinstance(off_chip, bool), f"sendTensorsOffChipAfterFwd takes a bool; found {off_chip!r}"
        self._liveness = Liveness.OffChipAfterFwd if off_chip else Liveness.AlwaysLive
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
