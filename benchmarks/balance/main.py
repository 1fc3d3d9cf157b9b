"""How good is AutoBalance: its placement of an unbalanced BERT, and every other placement, measured.

A pipeline with a device for each ipu runs at the pace of its busiest ipu. So each placement trains, its stages one
after another so that nobody disturbs, and the profile says how long each ipu was at work in an update.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("", "bert"))
from bert import TASK  # pyright: ignore[reportAttributeAccessIssue]
from harness import environment, markdown  # pyright: ignore[reportMissingImports]
from ways import executor  # pyright: ignore[reportMissingImports]

import poptorch
from popengine.profile import load
from popvision.times import steady_events

Cut = tuple[tuple[str, ...], ...]  # the blocks of each ipu


def all_cuts(blocks: Sequence[str], ipus: int) -> list[Cut]:
    """Every way to give consecutive blocks to each ipu."""
    ends = ((0, *inner, len(blocks)) for inner in combinations(range(1, len(blocks)), ipus - 1))
    return [tuple(tuple(blocks[a:b]) for a, b in pairwise(cut)) for cut in ends]


def chosen(ipus: int) -> Cut:
    """What AutoBalance takes."""
    options = poptorch.Options()
    options.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoBalance(ipus)))
    model = executor(TASK, options)
    model.compile(*TASK.inputs())
    names = model._executable.plan.partition.names  # pyright: ignore[reportOptionalMemberAccess]
    model.destroy()
    return tuple(tuple(name.split(", ")) for name in names)


def trained(cut: Cut, folder: str) -> poptorch.PoplarExecutor:
    options = poptorch.Options().enableProfiling(folder)
    stages = [poptorch.Stage(*blocks).ipu(ipu) for ipu, blocks in enumerate(cut)]
    options.setExecutionStrategy(poptorch.ShardedExecution(*stages))
    model = executor(TASK, options)
    for _ in range(2):  # the steps that are looked at closer
        model(*TASK.inputs())
    return model


def busiest(folder: str) -> float:
    """Seconds that the busiest ipu is at work in an update: of each the median over the updates."""
    work: dict[tuple[int, int, int], int] = defaultdict(int)
    for event in steady_events(load(next(Path(folder).rglob("profile.pop")))):
        if event.phase:
            work[event.ipu, event.call, event.step] += event.end - event.start
    ipus = {ipu for ipu, _, _ in work}
    return max(statistics.median(ns for key, ns in work.items() if key[0] == ipu) for ipu in ipus) / 1e9


def measured(cuts: Sequence[Cut], rounds: int) -> list[float]:
    """The busiest ipu's seconds of every placement, trained in turns."""
    with tempfile.TemporaryDirectory() as temporary:
        folders = [f"{temporary}/{number}" for number in range(len(cuts))]
        models = [trained(cut, folder) for cut, folder in zip(cuts, folders, strict=True)]
        for _ in range(rounds):
            for model in models:
                model(*TASK.inputs())
        for model in models:
            model.destroy()
        return [busiest(folder) for folder in folders]


def text(cut: Cut) -> str:
    return " / ".join(" ".join(blocks) for blocks in cut)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ipus", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    where = environment()
    blocks = list(TASK.blocks(TASK.model()))
    rows = []
    for ipus in args.ipus:
        cuts = all_cuts(blocks, ipus)
        choice = chosen(ipus)
        seconds = measured(cuts, args.rounds)
        best, taken = min(seconds), seconds[cuts.index(choice)]
        row = [ipus, len(cuts), text(choice), text(cuts[seconds.index(best)]), f"{best / taken:.0%}"]
        rows.append([*map(str, row), f"{best / max(seconds):.0%}"])
        print(f"{ipus} ipus: {best / taken:.0%} of the best of {len(cuts)}", file=sys.stderr)
    print(
        markdown(
            ["ipus", "placements", "AutoBalance", "best placement", "of its speed", "worst placement"], rows
        )
    )
    print()
    print(where)


if __name__ == "__main__":
    main()
