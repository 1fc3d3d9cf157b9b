"""Training speed on one GPU: ours unsplit, in four stages and compiled, and what a user would pick instead."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "mnist_pipeline"))
sys.path.insert(0, str(Path(__file__).parents[1] / "bert"))
sys.path.insert(0, str(Path(__file__).parents[1] / "resnet"))
import ways  # pyright: ignore[reportMissingImports]
from comparison import disagreement  # pyright: ignore[reportMissingImports]
from harness import (  # pyright: ignore[reportMissingImports]
    Contender,
    Measurement,
    environment,
    markdown,
    measure,
)
from task import Task  # pyright: ignore[reportMissingImports]

WAYS = {
    "unsplit": "Pando, 1 ipu",
    "four": "Pando, 4 ipus",
    "inductor": "Pando, 1 ipu, inductor",
    "eager": "plain PyTorch, eager",
    "compile": "torch.compile, reduce-overhead",
}
UNSPLIT, FOUR, INDUCTOR, EAGER, COMPILED = WAYS.values()
STAGES_COST = 1.03  # at most: four stages against none, on the same GPU
WARM = 3  # units before the first round: one runs, one is captured as a graph, one is replayed


@dataclass(frozen=True)
class Case:
    """What is trained, in which four stages, and how fast ours should be."""

    tasks: Callable[[], tuple[Task, Task]]  # in full, and tiny
    stages: tuple[str, str, str, str]
    noun: str
    rival: str  # whom our best layout is held against
    aim: float  # its speed over the rival's


def layers(begin: int, end: int) -> str:
    return " ".join(f"layer{number}" for number in range(begin, end))


# Each is imported where it is trained: transformers takes seconds to load, and only one needs it.
def mnist() -> tuple[Task, Task]:
    import digits  # pyright: ignore[reportMissingImports]

    return digits.TASK, replace(digits.TASK, rows=4, updates=2)


def bert() -> tuple[Task, Task]:
    import bert_base

    return bert_base.BERT, bert_base.TINY


def resnet() -> tuple[Task, Task]:
    import resnet50

    return resnet50.RESNET, resnet50.TINY


CASES = {
    "mnist": Case(
        mnist,
        ("B1", "B2", "B3", "B4"),
        "images",
        EAGER,
        5.0,
    ),
    "bert": Case(
        bert,
        (f"words {layers(0, 3)}", layers(3, 7), layers(7, 11), "layer11 head"),
        "sequences",
        COMPILED,
        1.0,
    ),
    "resnet": Case(
        resnet,
        ("stem layer1", "layer2", "layer3", "layer4 head"),
        "images",
        COMPILED,
        1.0,
    ),
}


def contenders(case: Case, task: Task, device: str) -> dict[str, Contender]:
    """All ways to train a task, by their short names."""
    split, whole = tuple(enumerate(case.stages)), ((0, " ".join(case.stages)),)
    ours, there = partial(ways.ours, task=task), {"task": task, "threads": 1, "device": device}
    setups = {
        "unsplit": partial(ours, placement=whole, backend="eager"),
        "four": partial(ours, placement=split, backend="eager"),
        "inductor": partial(ours, placement=whole, backend="inductor"),
        "eager": partial(ways.plain, **there),
        "compile": partial(ways.compiled, **there, mode="reduce-overhead"),
    }
    return {short: Contender(WAYS[short], setup) for short, setup in setups.items()}


def table(measurements: list[Measurement], rows: int, noun: str) -> str:
    median = {measured.name: measured.median for measured in measurements}
    head = [
        "contender",
        "median (s)",
        "fastest",
        "slowest",
        f"{noun}/s",
        "to eager",
        "peak (GiB)",
        "first unit (s)",
    ]
    cells = [
        [
            measured.name,
            f"{measured.median:.4f}",
            f"{min(measured.rounds):.4f}",
            f"{max(measured.rounds):.4f}",
            f"{rows / measured.median:.0f}",
            f"{median[EAGER] / measured.median:.2f}×" if EAGER in median else "-",
            f"{measured.memory / 2**30:.2f}",
            f"{measured.first:.1f}",
        ]
        for measured in measurements
    ]
    return markdown(head, cells)


def aims(case: Case, median: Mapping[str, float]) -> list[str]:
    """How the figures stand to what they should be."""
    found = []
    if UNSPLIT in median and FOUR in median:
        cost = median[FOUR] / median[UNSPLIT]
        found.append(
            f"four stages / unsplit: {cost:.3f} (aim: at most {STAGES_COST}): {verdict(cost <= STAGES_COST)}"
        )
    ours = [median[name] for name in (UNSPLIT, INDUCTOR) if name in median]
    if ours and case.rival in median:
        speed = median[case.rival] / min(ours)
        found.append(
            f"speed over {case.rival}: {speed:.2f} (aim: {case.aim} or more): {verdict(speed >= case.aim)}"
        )
    return found


def verdict(reached: bool) -> str:
    return "reached" if reached else "missed"


def report(name: str, case: Case, task: Task, measurements: list[Measurement]) -> None:
    median = {measured.name: measured.median for measured in measurements}
    print(f"\n## {name}\n\n{table(measurements, task.unit_rows, case.noun)}\n")
    print(
        f"unit: {task.updates} weight updates of {task.micro_batches} micro-batches of {task.rows} {case.noun}"
    )
    for line in aims(case, median):
        print(line)
    print(f"losses differ by at most {disagreement(measurements):.1e} after the first unit", flush=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--only", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models and batches, to try the program")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "there is no NVIDIA GPU, or this torch is built without CUDA (torch.cuda.is_available() is False)\n"
            "  fix: run it on a machine with a GPU, or try the program with --device cpu --tiny"
        )
    return args


def main() -> None:
    args = parsed()
    os.environ["POPTORCH_DEVICE"] = args.device  # of ours; contenders inherit it
    where = environment()
    if args.device == "cuda":
        where += f"\nGPU: {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    missing = 0
    for name in args.cases:
        case = CASES[name]
        task = case.tasks()[args.tiny]
        chosen = [way for short, way in contenders(case, task, args.device).items() if short in args.only]
        tell = partial(print, file=sys.stderr, flush=True)
        measurements = measure(chosen, args.rounds, tell, warm=WARM, lenient=True)
        missing += len(chosen) - len(measurements)
        if measurements:
            report(name, case, task, measurements)
    print(f"\n{args.rounds} alternating rounds\n{where}")
    if args.tiny or args.device == "cpu":
        print("small models, or no GPU: the aims are not for these figures")
    if missing:
        sys.exit(f"{missing} contenders failed and were left out: see above")


if __name__ == "__main__":
    main()
