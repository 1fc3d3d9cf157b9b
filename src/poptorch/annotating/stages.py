"""Stages and phases: which blocks run together, as a user writes it down."""

from collections.abc import Sequence
from typing import Any, Self

from popengine.settings import StagePlan


class Stage:
    """Blocks that run on one ipu, one after another.

    >>> Stage("embedding", "layer0").ipu(1)
    """

    def __init__(self, *block_ids: str) -> None:
        for block in block_ids:
            assert isinstance(block, str), f"Block ids are strings; found {block!r} in a Stage"
        self._blocks = block_ids
        self._ipu: int | None = None

    @property
    def blocks(self) -> list[str]:
        return list(self._blocks)

    def ipu(self, ipu: int) -> Self:
        assert isinstance(ipu, int), f"Stage.ipu takes the number of an ipu; found {ipu!r}"
        assert ipu >= 0, f"Stage.ipu takes a number from 0; found {ipu}"
        self._ipu = ipu
        return self

    def freeze(self) -> StagePlan:
        return StagePlan(self._blocks, self._ipu)

    def __repr__(self) -> str:
        ipu = "" if self._ipu is None else f".ipu({self._ipu})"
        return f"Stage({', '.join(map(repr, self._blocks))}){ipu}"


class Phase:
    """Stages that run at the same time: `Phase(Stage("a"), Stage("b"))`. Block ids alone form one stage."""

    def __init__(self, *arg: Stage | str) -> None:
        self.stages = stages_of_phase(arg)

    def stage(self, index: int) -> Stage:
        assert 0 <= index < len(self.stages), f"Phase has stages 0 to {len(self.stages) - 1}; found {index}"
        return self.stages[index]

    def ipus(self, *ipus: int) -> Self:
        assert len(ipus) == len(self.stages), (
            f"Phase.ipus takes one ipu for each stage: {len(self.stages)} expected, {len(ipus)} found"
        )
        for stage, ipu in zip(self.stages, ipus, strict=True):
            stage.ipu(ipu)
        return self

    def __repr__(self) -> str:
        return f"Phase({', '.join(map(repr, self.stages))})"


def as_stage(argument: Any) -> Stage:
    if isinstance(argument, Stage):
        return argument
    blocks = [argument] if isinstance(argument, str) else argument
    assert isinstance(blocks, list | tuple) and all(isinstance(block, str) for block in blocks), (
        f"A stage is a poptorch.Stage, a block id or a list of block ids (an AutoStage stands alone); "
        f"found {argument!r}"
    )
    return Stage(*blocks)


def stages_of_phase(members: Sequence[Any]) -> list[Stage]:
    if members and all(isinstance(member, Stage) for member in members):
        return list(members)
    assert members and all(isinstance(member, str) for member in members), (
        f"A phase is made of stages only, or of block ids only; found {list(members)!r}"
    )
    return [Stage(*members)]


def as_phase(argument: Any) -> Phase:
    if isinstance(argument, Phase):
        return argument
    return Phase(*argument) if isinstance(argument, list | tuple) else Phase(argument)
