"""Time and memory of training large models: GPT-2 small and ViT-B, against what a user would pick instead."""

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import ways  # pyright: ignore[reportMissingImports]
from comparison import calm, disagreement, rivals  # pyright: ignore[reportMissingImports]
from harness import Contender, environment, markdown, measure  # pyright: ignore[reportMissingImports]
from tasks import TASKS

RIVALS = ("plain2", "compile2", "ddp2")


def contenders(name: str) -> dict[str, Contender]:
    task = TASKS[name]
    ours = partial(ways.ours, task=task, placement=((0, "model"),))
    found = {
        "ours": Contender("Pando, 1 ipu", ours),
        "inductor": Contender("Pando, 1 ipu, inductor", partial(ours, backend="inductor")),
    }
    return found | {key: value for key, value in rivals(task).items() if key in RIVALS}


def table(name: str, args: argparse.Namespace) -> None:
    """Measure one model, and print its table: ratios are those to plain PyTorch with two threads."""
    task, everybody = TASKS[name], contenders(name)
    chosen = [each for key, each in everybody.items() if key in {*args.only, "plain2"}]
    tell = partial(print, file=sys.stderr)
    found = measure(chosen, args.rounds, progress=tell, patience=args.patience, lenient=True)
    base = next(each for each in found if each.name == everybody["plain2"].name)
    head = [
        "contender",
        "an update (s)",
        "fastest",
        "slowest",
        "speed",
        "peak memory (GB)",
        "memory",
        "first unit (s)",
    ]
    rows = [
        [
            each.name,
            *(f"{value:.2f}" for value in (each.median, min(each.calm), max(each.calm))),
            f"{base.median / each.median:.2f}×",
            f"{each.memory / 1e9:.2f}",
            f"{each.memory / base.memory:.2f}×",
            f"{each.first:.1f}",
        ]
        for each in found
    ]
    parameters = sum(parameter.numel() for parameter in task.model().parameters())
    print(
        f"{name}: {parameters / 1e6:.0f} M parameters, {task.micro_batches} micro-batches of {task.rows} rows\n"
    )
    print(markdown(head, rows))
    print(
        f"\n{args.rounds} alternating rounds; {calm(found)}; losses differ by at most {disagreement(found):.1e}\n"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--only", nargs="+", default=["ours", *RIVALS], help="these and plain2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--patience", type=int, default=1, help="times the rounds, at most, for calm ones")
    options, where = parser.parse_args(), environment()
    for model in options.models:
        table(model, options)
    print(where)
