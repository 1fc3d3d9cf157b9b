"""Is the advice true? Random small models: each advice that their report gives is followed, and measured.

What a report says of separate devices is measured under a recorder, where each of the two ipus is one thread that does
one thing at a time; what it says of this host without one.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import poptorch
from popengine.profile import load
from popvision.analysis import Figures, figures
from popvision.changes import LEAST, Change

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import environment, markdown  # pyright: ignore[reportMissingImports]

HEAD = ["case", "model", "advice", "machine", "promised", "measured"]


@dataclass(frozen=True)
class Case:
    """A model of blocks in a row, each some layers deep, and how it runs."""

    depths: tuple[int, ...]  # of each block
    width: int
    rows: int
    cut: tuple[tuple[str, ...], ...]
    accumulation: int
    pipelined: bool
    replicas: int = 1
    training: bool = True

    def changed(self, setting: Mapping[str, Any]) -> Case:
        setting = dict(setting)
        if "iterations" in setting:
            setting["accumulation"] = setting.pop("iterations")
        if "cut" in setting:
            setting["cut"] = tuple(map(tuple, setting["cut"]))
        return replace(self, **setting)

    def __str__(self) -> str:
        kind = "training" if self.training else "inference"
        mode = "pipelined" if self.pipelined else "sharded"
        stages = " / ".join("+".join(str(self.depths[int(name[1:])]) for name in names) for names in self.cut)
        return f"{kind}, {mode}, {stages} layers of {self.width}, {self.accumulation} x {self.rows} rows"


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(nn.Sequential(nn.Linear(case.width, case.width), nn.Tanh()) for _ in range(depth))
            )
            for depth in case.depths
        )

    def forward(self, x):
        for place, block in enumerate(self.blocks):
            with poptorch.Block(f"b{place}"):
                x = block(x)
                if place == len(self.blocks) - 1 and self.training:
                    x = poptorch.identity_loss(x.square(), "mean")
        return x


def random_case(numbers: random.Random) -> Case:
    """Two ipus, on which the blocks lie as it happens."""
    count = numbers.randint(2, 5)
    border = numbers.randint(1, count - 1)
    names = tuple(f"b{place}" for place in range(count))
    return Case(
        depths=tuple(numbers.randint(1, 4) for _ in range(count)),
        width=numbers.choice((128, 192, 256)),
        rows=numbers.choice((32, 64)),
        cut=(names[:border], names[border:]),
        accumulation=numbers.choice((3, 4, 6, 12, 24)),
        pipelined=numbers.random() < 0.7,
        training=numbers.random() < 0.7,
    )


class Runner:
    """One case, compiled; `once` is the seconds of a row in one call."""

    def __init__(self, case: Case, folder: str | None) -> None:
        options = poptorch.Options().showCompilationProgressBar(False).replicationFactor(case.replicas)
        if folder is not None:
            options.enableProfiling(folder)
        stages = [poptorch.Stage(*names).ipu(ipu) for ipu, names in enumerate(case.cut)]
        kind = poptorch.PipelinedExecution if case.pipelined else poptorch.ShardedExecution
        options.setExecutionStrategy(kind(*stages))
        torch.manual_seed(0)
        model = Model(case).train(case.training)
        # About the same number of micro-batches in each call, so that calls cost what their steps cost.
        steps = max(1, 48 // (case.accumulation * case.replicas))
        if case.training:
            options.deviceIterations(steps).Training.gradientAccumulation(case.accumulation)
            self.executor = poptorch.trainingModel(
                model, options, torch.optim.SGD(model.parameters(), lr=1e-4)
            )
        else:
            options.deviceIterations(case.accumulation)
            self.executor = poptorch.inferenceModel(model, options)
        self._calls = 1 if case.training else steps
        micro_batches = case.accumulation * case.replicas * (steps if case.training else 1)
        self._batch = torch.randn(micro_batches * case.rows, case.width)
        self.once(), self.once()

    def once(self) -> float:
        start = time.perf_counter()
        for _ in range(self._calls):
            self.executor(self._batch)
        return (time.perf_counter() - start) / len(self._batch) / self._calls


def report(case: Case) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(case, folder)
        for _ in range(4):
            runner.once()
        runner.executor.detachFromDevice()
        return figures(load(next(Path(folder).glob("*/profile.pop"))))


def gain(case: Case, setting: Mapping[str, Any], recorded: bool, rounds: int) -> float:
    """How many times as fast a row is after the change: a median over alternating rounds."""
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        runners = [
            Runner(case, one if recorded else None),
            Runner(case.changed(setting), two if recorded else None),
        ]
        found = []
        for number in range(rounds):
            times = {runner: runner.once() for runner in (runners if number % 2 else runners[::-1])}
            found.append(times[runners[0]] / times[runners[1]])
        for runner in runners:
            runner.executor.destroy()
    return statistics.median(found)


def promises(change: Change, found: Figures) -> list[tuple[str, float, bool]]:
    """Where, how much, and whether it is measured under a recorder."""
    least = 1 + max(LEAST, found.spread)
    machines = (("separate devices", change.apart, True), ("here", change.here, False))
    return [(name, gain, lanes) for name, gain, lanes in machines if gain is not None and gain > least]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    where = environment()
    rows, kept, harmed = [], 0, 0
    for number in range(args.cases):
        case = random_case(random.Random(args.seed * 1000 + number))
        found = report(case)
        for change in found.changes:
            for machine, promised, recorded in promises(change, found):
                measured = gain(case, change.setting, recorded, args.rounds)
                kept += measured - 1 >= (promised - 1) / 2
                harmed += measured < 0.97
                rows.append(
                    [str(number), str(case), change.what, machine, f"{promised:.2f}", f"{measured:.2f}"]
                )
                print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    print(markdown(HEAD, rows))
    print(
        f"\n{len(rows)} promises: {kept} gave at least half of what was promised ({kept / max(1, len(rows)):.0%}),"
        f" {harmed} made a row slower by more than 3 %"
    )
    print(where)


if __name__ == "__main__":
    main()
