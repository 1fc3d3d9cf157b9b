"""What the engine adds to each action: time per action of pipelines whose pieces compute next to nothing."""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from chain import Chain, blocks
from harness import environment, markdown  # pyright: ignore[reportMissingImports]

import poptorch

# Ipus, stages (the stages go round the ipus), micro-batches.
LAYOUTS = [(1, 1, 64), (2, 2, 64), (4, 4, 64), (8, 8, 64), (1, 4, 64), (2, 4, 64), (2, 8, 64), (4, 8, 64)]
LAYOUTS += [(4, 4, 7), (4, 4, 16), (4, 4, 256), (4, 4, 1024)]


def executor(ipus: int, stages: int, micro_batches: int, steps: int) -> poptorch.PoplarExecutor:
    """A pipeline of `stages` stages in order over `ipus` ipus."""
    model = Chain(stages)
    placed = []
    for number, (name, part) in enumerate(blocks(model).items()):
        poptorch.BeginBlock(part, name)
        placed.append(poptorch.Stage(name).ipu(number % ipus))
    options = poptorch.Options().deviceIterations(steps).showCompilationProgressBar(False)
    options.Training.gradientAccumulation(micro_batches)
    options.setExecutionStrategy(poptorch.PipelinedExecution(*placed))
    return poptorch.trainingModel(model, options, poptorch.optim.SGD(model.parameters(), lr=0.0))


def without_work(model: poptorch.PoplarExecutor) -> None:
    """From now on each piece returns what it made last, and computes nothing."""
    assert model._plans.engine is not None
    for codes in model._plans.engine._rows.codes:
        for index, code in enumerate(codes):

            def remember(values: list[Any], codes=codes, index=index, code=code) -> tuple[Tensor, ...]:
                made = code(values)
                codes[index] = lambda values: made
                return made

            codes[index] = remember


def microseconds(model: poptorch.PoplarExecutor, data: Tensor, actions: int, rounds: int) -> list[float]:
    """Of each round: wall time divided by the actions of all ipus together."""
    model(data)
    spent = []
    for _ in range(rounds):
        start = time.perf_counter()
        model(data)
        spent.append((time.perf_counter() - start) / actions * 1e6)
    return spent


def row(ipus: int, stages: int, micro_batches: int, rounds: int) -> list[str]:
    steps = max(1, 4096 // (2 * stages * micro_batches))
    actions = 2 * stages * micro_batches * steps
    data = torch.ones(steps * micro_batches, 1)
    model = executor(ipus, stages, micro_batches, steps)
    small = microseconds(model, data, actions, rounds)
    without_work(model)
    empty = microseconds(model, data, actions, rounds)
    model.destroy()
    found = (statistics.median(empty), min(empty), statistics.median(small))
    return [str(ipus), str(stages), str(micro_batches), *(f"{value:.1f}" for value in found)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="4 ipus, 4 stages and 64 micro-batches only")
    args = parser.parse_args()
    where = environment()
    layouts = [(4, 4, 64)] if args.quick else LAYOUTS
    head = ["ipus", "stages", "micro-batches", "empty pieces (µs)", "fastest", "small pieces (µs)"]
    print(markdown(head, [row(*layout, args.rounds) for layout in layouts]))
    print()
    print("wall time of a call / actions of all ipus; 4,096 actions or one step a call")
    print(where)


if __name__ == "__main__":
    main()
