"""Random small models of blocks in a row, on two ipus, and an executor of one."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace

import torch
from own_cores import give_each_ipu_a_core  # pyright: ignore[reportMissingImports]
from torch import nn

import poptorch
from popvision.virtual import Change

THREADS = torch.get_num_threads()


@dataclass(frozen=True)
class Case:
    """A model of blocks in a row, each some layers deep, and how it runs."""

    depths: tuple[int, ...]  # of each block
    width: int
    rows: int
    cut: tuple[tuple[str, ...], ...]
    accumulation: int
    pipelined: bool
    training: bool = True
    recompute: bool = False
    adam: bool = False  # else SGD, which has no state
    threads: int = 0  # 0: as many as the program has

    def changed(self, change: Change) -> Case:
        if change.kind == "pipeline":
            return replace(self, pipelined=True)
        if change.kind == "stages":
            names, first = sum(self.cut, ()), change.what.split()[-1]
            if first not in names:
                raise ValueError(f"no case cuts a block: {change.what}")
            border = names.index(first)
            return replace(self, cut=(names[:border], names[border:]))
        return replace(self, accumulation=int(change.what.partition("(")[2].rstrip(")")))

    def __str__(self) -> str:
        kind = "training" if self.training else "inference"
        mode = "pipelined" if self.pipelined else "sharded"
        stages = " / ".join("+".join(str(self.depths[int(name[1:])]) for name in names) for names in self.cut)
        more = [name for name in ("recompute", "adam") if getattr(self, name)]
        rows = f"{self.accumulation} x {self.rows} rows"
        return ", ".join([kind, mode, f"{stages} layers of {self.width}", rows, *more])


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
    case = Case(
        depths=tuple(numbers.randint(1, 4) for _ in range(count)),
        width=numbers.choice((128, 192, 256)),
        rows=numbers.choice((32, 64)),
        cut=(names[:border], names[border:]),
        accumulation=numbers.choice((3, 4, 6, 12, 24)),
        pipelined=numbers.random() < 0.7,
        training=numbers.random() < 0.7,
    )
    recompute, adam = (numbers.random() < share for share in (0.4, 0.5))
    return replace(case, recompute=recompute, adam=adam) if case.training else case


class Runner:
    """One case, compiled; `once` is the seconds of a row in one call.

    Args: is_apart: each ipu has a core to itself, as if it were a device of its own
    """

    def __init__(self, case: Case, folder: str | None = None, is_apart: bool = False) -> None:
        self._threads = case.threads or THREADS
        options = poptorch.Options().showCompilationProgressBar(False)
        if folder is not None:
            options.enableProfiling(folder)
        stages = [poptorch.Stage(*names).ipu(ipu) for ipu, names in enumerate(case.cut)]
        strategy = poptorch.PipelinedExecution if case.pipelined else poptorch.ShardedExecution
        options.setExecutionStrategy(strategy(*stages))
        torch.manual_seed(0)
        model = Model(case).train(case.training)
        # About the same number of micro-batches in each call, so that calls cost what their steps cost.
        steps = max(1, 48 // case.accumulation)
        if case.training:
            options.deviceIterations(steps).Training.gradientAccumulation(case.accumulation)
            options._Popart.set("autoRecomputation", 3 * case.recompute)
            kind = torch.optim.Adam if case.adam else torch.optim.SGD
            optimizer = kind(model.parameters(), lr=1e-4)
            self.executor = poptorch.trainingModel(model, options, optimizer)
        else:
            options.deviceIterations(case.accumulation)
            self.executor = poptorch.inferenceModel(model, options)
        self.calls, self.steps = (1, steps) if case.training else (steps, steps)
        micro_batches = case.accumulation * (steps if case.training else 1)
        self._batch = torch.randn(micro_batches * case.rows, case.width)
        if is_apart:
            self.executor.compile(self._batch)
            give_each_ipu_a_core(self.executor)
        self.once(), self.once()

    def once(self) -> float:
        torch.set_num_threads(self._threads)
        start = time.perf_counter()
        for _ in range(self.calls):
            self.executor(self._batch)
        return (time.perf_counter() - start) / len(self._batch) / self.calls
