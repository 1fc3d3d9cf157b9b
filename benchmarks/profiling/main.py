"""What profiling costs: a training without it and with it, two of each, in turns.

Two of each because a trainer's place in memory alone is worth some per cent: the equal ones show how much.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

import poptorch
from popengine.ir import Task
from popengine.profile import load
from popengine.run.recorder import Recorder

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import environment  # pyright: ignore[reportMissingImports]

UPDATES, ACCUMULATION, ROWS = 5, 10, 40
TEAMS = ("not profiled 1", "profiled 1", "profiled 2", "not profiled 2")


class Network(nn.Module):
    """The layers of the MNIST example, over two ipus."""

    def __init__(self) -> None:
        super().__init__()
        layers = [
            nn.Sequential(nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU()),
            nn.Sequential(nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU()),
            nn.Sequential(nn.Flatten(), nn.Linear(320, 256), nn.ReLU(), nn.Linear(256, 10)),
        ]
        self.layers = nn.Sequential(
            *(poptorch.BeginBlock(layer, f"B{i}", ipu_id=min(i, 1)) for i, layer in enumerate(layers))
        )
        self.loss = nn.CrossEntropyLoss()

    def forward(self, images, labels):
        return self.loss(self.layers(images), labels)


def training(folder: str | None) -> poptorch.PoplarExecutor:
    """A compiled trainer, warm; profiled into a folder, if one is given."""
    torch.manual_seed(0)
    options = poptorch.Options().deviceIterations(UPDATES).showCompilationProgressBar(False)
    options.Training.gradientAccumulation(ACCUMULATION)
    if folder is not None:
        options.enableProfiling(folder)
    model = Network()
    trainer = poptorch.trainingModel(model, options, poptorch.optim.AdamW(model.parameters()))
    trainer(*data())  # the steps that are looked at closer are among these
    return trainer


def data() -> tuple[torch.Tensor, torch.Tensor]:
    rows = UPDATES * ACCUMULATION * ROWS
    return torch.randn(rows, 1, 28, 28), torch.randint(10, (rows,))


def recorded_cost(tasks: int = 1000, tries: int = 300) -> float:
    """Seconds that recording adds to a task: the best of many tries, so that others' work is left out."""

    plan = SimpleNamespace(tasks=(Task("forward", 0, 0, "F"),))
    state = SimpleNamespace(device=torch.device("cpu"))
    recorder = Recorder()
    recorder._rows = SimpleNamespace(plan=plan, state=state)  # type: ignore[assignment]

    def best(run: Callable[[int], object]) -> float:
        lasted = []
        for _ in range(tries):
            recorder._runs, start = [], time.perf_counter()
            for index in range(tasks):
                run(index)
            lasted.append(time.perf_counter() - start)
        return min(lasted)

    def work(_: int) -> None:
        pass

    return (best(lambda index: recorder.run_task(0, index, 0, work, 0)) - best(work)) / tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=24)
    rounds = parser.parse_args().rounds
    where = environment()
    os.environ.pop("POPLAR_ENGINE_OPTIONS", None)
    folder = tempfile.mkdtemp()
    trainers = {name: training(None if name.startswith("not") else folder) for name in TEAMS}
    batch = data()
    cores: dict[str, list[float]] = {name: [] for name in TEAMS}
    for number in range(rounds):
        for name in [*TEAMS[number % 4 :], *TEAMS[: number % 4]]:
            start = time.process_time()
            trainers[name](*batch)
            cores[name].append(time.process_time() - start)
    trainers["profiled 1"].detachFromDevice()
    profile = load(Path(folder) / "training" / "profile.pop")
    tasks = UPDATES * profile.facts["step_tasks"]
    print("| training | CPU time of a call, median (s) | fastest |")
    print("| --- | ---: | ---: |")
    for name in sorted(TEAMS):
        print(f"| {name} | {statistics.median(cores[name]):.3f} | {min(cores[name]):.3f} |")
    median = statistics.median(cores["not profiled 1"] + cores["not profiled 2"])
    cost = recorded_cost()
    print(f"\nrecording takes {cost * 1e9:.0f} ns a task;", end=" ")
    print(f"{tasks} of them: {cost * tasks / median:.2%} of a call's CPU time")
    print(
        f"a call: {UPDATES} weight updates of {ACCUMULATION} micro-batches of {ROWS} images; {rounds} rounds"
    )
    print(where)


if __name__ == "__main__":
    main()
