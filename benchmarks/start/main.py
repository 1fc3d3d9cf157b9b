"""How long until it runs: imports; the first call; passes of a long schedule."""

import argparse
import statistics
import sys
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("", "mnist_pipeline", "resnet", "bert"))
sys.path.append(str(Path(__file__).parents[1] / "overhead"))
import torch
from bert import TASK as BERT  # pyright: ignore[reportAttributeAccessIssue]
from chain import Chain, blocks  # pyright: ignore[reportMissingImports]
from digits import TASK as DIGITS  # pyright: ignore[reportMissingImports]
from harness import Contender, environment, markdown, measure  # pyright: ignore[reportMissingImports]
from imports import HEAD, imports
from resnet import TASK as RESNET  # pyright: ignore[reportAttributeAccessIssue]
from task import Task  # pyright: ignore[reportMissingImports]
from ways import Placement, Unit, executor, plain, stages  # pyright: ignore[reportMissingImports]

import poptorch
from popengine.compile import compile_graph
from popengine.compile.capture import capture
from popengine.ir import Graph
from popengine.settings import Counts, Optimizer, Settings, StagePlan, Strategy

TASKS: dict[str, tuple[Task, Placement]] = {
    "MNIST network, 4 ipus": (DIGITS, ((0, "conv1"), (1, "conv2"), (2, "hidden"), (3, "head"))),
    "ResNet-18, 2 ipus": (RESNET, ((0, "stem layer1 layer2"), (1, "layer3 layer4 head"))),
    "BERT, 4 ipus": (
        BERT,
        ((0, "words layer0"), (1, "layer1 layer2"), (2, "layer3"), (3, "head")),
    ),
}
LONGEST = (64, 1024)
SIZES = [(16, 256), (16, 1024), (64, 256), LONGEST]  # ipus, micro-batches


def first_call(rank: int, task: Task, placement: Placement) -> Unit:
    """A unit that returns the seconds of the first call of a new executor; not those of the imports."""
    options = poptorch.Options()
    options.setExecutionStrategy(poptorch.PipelinedExecution(*stages(placement)))
    model, inputs = executor(task, options), task.inputs()
    return partial(seconds, model, *inputs)


def first_update(rank: int, task: Task) -> Unit:
    """The same of plain PyTorch."""
    return partial(seconds, plain(rank, task, threads=2))


def seconds(work, *arguments: torch.Tensor) -> float:
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start


def starts(task: Task, placement: Placement, repeats: int) -> list[str]:
    """Medians: ours, plain PyTorch."""
    task = replace(task, updates=1)
    found: list[list[float]] = [[], []]
    for _ in range(repeats):
        processes = [
            Contender("ours", partial(first_call, task=task, placement=placement)),
            Contender("plain", partial(first_update, task=task)),
        ]
        for numbers, process in zip(found, processes, strict=True):
            numbers += measure([process], rounds=0, progress=lambda text: None)[0].numbers
    return [f"{statistics.median(numbers):.2f}" for numbers in found]


def chain(stages: int) -> tuple[Graph, Strategy]:
    """A model of so many blocks, and the strategy that makes each a stage."""
    model = Chain(stages)
    for ipu, (name, part) in enumerate(blocks(model).items()):
        poptorch.BeginBlock(part, name, ipu_id=ipu)
    graph = capture(model, lambda inputs: [model(*inputs)], [torch.ones(1, 1)], training=True)
    plans = tuple(StagePlan((name,), ipu) for ipu, name in enumerate(blocks(model)))
    return graph, Strategy("1f1b", None, plans)


def passes(ipus: int, micro_batches: int, repeats: int) -> list[str]:
    """Medians of the passes behind the capture, and their sum for each action; in seconds of a core."""
    (graph, strategy), spent = chain(ipus), []
    for _ in range(repeats):
        times = [time.process_time()]
        settings = Settings(
            True, Counts(accumulation=micro_batches), strategy, optimizer=Optimizer("sgd", {})
        )
        compile_graph(graph, settings, lambda name, times=times: times.append(time.process_time()))
        spent.append([end - start for start, end in pairwise(times)])
    medians = [statistics.median(column) for column in zip(*spent, strict=True)]
    actions = 2 * ipus * micro_batches
    each = sum(medians) / actions * 1e6
    return [
        str(ipus),
        str(micro_batches),
        f"{actions:,}",
        *(f"{m:.3f}" for m in [*medians, sum(medians)]),
        f"{each:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=["calls", "passes", "imports"])
    args = parser.parse_args()
    where = environment()
    if args.only in (None, "imports"):
        print(markdown(HEAD, imports(args.repeats)))
        print()
    if args.only in (None, "calls"):
        rows = [[name, *starts(task, placement, args.repeats)] for name, (task, placement) in TASKS.items()]
        print(markdown(["first call, one update", "Pando (s)", "plain PyTorch (s)"], rows))
        print()
    if args.only in (None, "passes"):
        head = ["ipus", "micro-batches", "actions", "partition (s)", "tasks (s)", "all (s)"]
        print(markdown([*head, "µs an action"], [passes(*size, repeats=args.repeats) for size in SIZES]))
        print()
    print(f"medians of {args.repeats}")
    print(where)


if __name__ == "__main__":
    main()
