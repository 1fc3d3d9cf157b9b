"""Random layouts: how the blocks of a model are cut into stages, and who runs them."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field
from typing import Any

import poptorch
from popengine.order import ORDERS


@dataclass(frozen=True)
class Load:
    """What all layouts of a trial have in common, since it changes the numbers."""

    rows: int
    accumulation: int
    iterations: int
    replicas: int
    optimizer: str
    strides: str = "contiguous"  # of the inputs: a key of `runs.STRIDES`

    @property
    def rows_of_a_call(self) -> int:
        return self.rows * self.accumulation * self.iterations * self.replicas


@dataclass(frozen=True)
class Layout:
    """`cuts`: the blocks that begin a stage, from 0; `ipus`: of each stage."""

    mode: str
    cuts: list[int] = field(default_factory=lambda: [0])
    ipus: list[int] = field(default_factory=lambda: [0])
    recompute: bool = False
    schedule: str = "1f1b"

    def strategy(self, blocks: int) -> Any:
        ends = [*self.cuts[1:], blocks]
        stages = [
            poptorch.Stage(*(f"b{i}" for i in range(start, end))).ipu(ipu)
            for start, end, ipu in zip(self.cuts, ends, self.ipus, strict=True)
        ]
        kinds: dict[str, Any] = {
            "pipelined": functools.partial(poptorch.PipelinedExecution, schedule=self.schedule),
            "sharded": poptorch.ShardedExecution,
        }
        return kinds[self.mode](*stages)


UNSPLIT = Layout("pipelined")


def random_load(numbers: random.Random) -> Load:
    return Load(
        rows=numbers.choice([2, 3, 5]),
        accumulation=numbers.choice([3, 5, 7]),
        iterations=numbers.choice([1, 2]),
        replicas=numbers.choice([1, 1, 2]),
        optimizer=numbers.choice(["sgd", "adam"]),
        strides=numbers.choice(["contiguous", "transposed", "sliced", "expanded"]),
    )


def random_layout(numbers: random.Random, mode: str, blocks: int, load: Load) -> Layout:
    most = min(blocks, (load.accumulation + 1) // 2 if mode == "pipelined" else 4)
    stages = numbers.randint(2, most) if most > 1 else 1
    cuts = [0, *sorted(numbers.sample(range(1, blocks), stages - 1))]
    ipus = list(range(stages))
    if numbers.random() < 0.4:  # wrapped around, or a V
        ipus = numbers.choice([[stage % 2 for stage in ipus], [min(s, stages - 1 - s) for s in ipus]])
    orders = (order for order in ORDERS.values() if order.overlaps and order.layout_on(ipus) == ipus)
    schedule = numbers.choice([order.name for order in orders])
    return Layout(mode, cuts, ipus, mode == "pipelined" and numbers.random() < 0.5, schedule)


def options(blocks: int, layout: Layout, load: Load) -> poptorch.Options:
    made = poptorch.Options().deviceIterations(load.iterations).replicationFactor(load.replicas)
    made.randomSeed(7).outputMode(poptorch.OutputMode.All).showCompilationProgressBar(False)
    made.broadcastBuffers(False)
    made.Training.gradientAccumulation(load.accumulation)
    made.setExecutionStrategy(layout.strategy(blocks))
    made._Popart.set("autoRecomputation", 3 if layout.recompute else 0)
    return made
