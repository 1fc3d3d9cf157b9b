"""The command of a training benchmark: all ways to train one task, side by side, as a table."""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import ways  # pyright: ignore[reportMissingImports]
from harness import (  # pyright: ignore[reportMissingImports]
    CALM,
    Contender,
    Measurement,
    environment,
    measure,
    table,
)
from task import Task  # pyright: ignore[reportMissingImports]

BASELINE, LIMIT = "plain PyTorch, 1 thread", "Pando, one core"
LARGE = "plain PyTorch, best layout and one large batch, 2 threads"


@dataclass(frozen=True)
class Ours:
    """One of our layouts: the name of its row, its stages, the number of their replicas, the layout of images in
    memory, and the backend."""

    name: str
    placement: ways.Placement
    replicas: int = 1
    memory_format: str = "preserve"
    backend: str = "eager"


def rivals(task: Task) -> dict[str, Contender]:
    """What a user would pick instead, by its short name."""
    plain, compiled = partial(ways.plain, task=task), partial(ways.compiled, task=task, threads=2)
    pair = {"task": task, "port": 0}
    return {
        "plain1": Contender(BASELINE, partial(plain, threads=1)),
        "plain2": Contender("plain PyTorch, 2 threads", partial(plain, threads=2)),
        "best2": Contender(
            "plain PyTorch in its best layout, 2 threads", partial(plain, threads=2, layout="best")
        ),
        "large2": Contender(LARGE, partial(ways.large, task=task, threads=2, layout="best")),
        "compile2": Contender("torch.compile, 2 threads", compiled),
        "gloo2": Contender(
            "torch.distributed.pipelining, 2 processes",
            partial(ways.pipelining, **{**pair, "port": free_port()}),
            processes=2,
        ),
        "ddp2": Contender(
            "DistributedDataParallel, 2 processes",
            partial(ways.data_parallel, **{**pair, "port": free_port()}),
            processes=2,
        ),
        "ddpc2": Contender(
            "DistributedDataParallel of torch.compile, 2 processes",
            partial(ways.data_parallel, **{**pair, "port": free_port(), "compiles": True}),
            processes=2,
        ),
    }


def contenders(task: Task, layouts: Mapping[str, Ours]) -> dict[str, Contender]:
    """Ours, then the pieces of the first layout one after another on one core, then the rivals."""
    found = {
        name: Contender(
            f"Pando, {layout.name}",
            partial(
                ways.ours,
                task=task,
                placement=layout.placement,
                replicas=layout.replicas,
                layout=layout.memory_format,
                backend=layout.backend,
            ),
        )
        for name, layout in layouts.items()
    }
    first = next(iter(layouts.values())).placement
    return {
        **found,
        "one": Contender(LIMIT, partial(ways.ours, task=task, placement=first, threads=1)),
        **rivals(task),
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def two_core_limit(measurements: list[Measurement], layouts: Mapping[str, Ours]) -> list[str]:
    """Half the time of the same pieces run back to back by one thread, and each layout's share of it."""
    medians = {measured.name: measured.median for measured in measurements}
    if LIMIT not in medians:
        return []
    limit = medians[LIMIT] / 2
    shares = [
        f"{layout.name} {limit / medians[f'Pando, {layout.name}']:.0%}"
        for layout in layouts.values()
        if f"Pando, {layout.name}" in medians
    ]
    return [f"two-core limit: {limit:.3f} s; reached by {', '.join(shares)}"] if shares else []


def calm(measurements: list[Measurement]) -> str:
    """In how many rounds the machine was left alone."""
    counts = [sum(others < CALM for others in measured.others) for measured in measurements]
    if not min(counts):
        return "other programs used the cores: some contender had no calm round, and is shown by all of its rounds"
    return f"medians of {min(counts)} to {max(counts)} calm rounds each"


def disagreement(measurements: list[Measurement]) -> float:
    """How far apart the contenders' losses are after the first unit: rounding, or a mistake.

    Later units say less: rounding grows from update to update. One large batch has the loss of all of its rows, and
    not of the last micro-batch.
    """
    losses = [measured.numbers[0] for measured in measurements if measured.name != LARGE]
    return max(losses) - min(losses)


def main(about: str | None, task: Task, layouts: Mapping[str, Ours], noun: str, rounds: int = 15) -> None:
    """Parse the command line, measure, print the table; `noun` says what a row of the data is."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--updates", type=int, default=task.updates, help="weight updates in a unit")
    parser.add_argument("--patience", type=int, default=1, help="times the rounds, at most, for calm ones")
    names = contenders(task, layouts)
    parser.add_argument("--only", nargs="+", choices=names, default=[*names], help="these and the baseline")
    args = parser.parse_args()
    task = replace(task, updates=args.updates)
    where = environment()
    everybody = contenders(task, layouts)
    chosen = [everybody[name] for name in everybody if name in {*args.only, "plain1"}]
    tell = partial(print, file=sys.stderr)
    measurements = measure(chosen, args.rounds, progress=tell, patience=args.patience)
    print(table(measurements, BASELINE, task.unit_rows, noun))
    print()
    unit = f"{task.updates} weight updates of {task.micro_batches} micro-batches of {task.rows} {noun}"
    print(f"unit: {unit}; {args.rounds} alternating rounds")
    print(calm(measurements))
    for line in two_core_limit(measurements, layouts):
        print(line)
    print(f"losses of the contenders differ by at most {disagreement(measurements):.1e} after the first unit")
    print(where)
