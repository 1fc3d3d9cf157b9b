"""Asynchronous loaders of several source trees, side by side: CPU and wall time for each batch.

    python benchmarks/loading/main.py --tree before=../before/src --tree after=src --torch

Alternating rounds; in a round each tree has a process of its own, which loads the same batches in mode Async (with
--torch also one for torch's DataLoader with a worker). CPU time is that of the program and of its worker together;
other programs on the machine change it little.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

CASES = {  # name: (shape of a row, rows of a batch, batches of an epoch, batches that are measured)
    "digits": ((784,), 16, 250, 2000),
    "images": ((3, 64, 64), 32, 50, 400),
    "large images": ((3, 224, 224), 64, 4, 40),
}


def load(case: str, by_torch: bool) -> dict[str, float]:
    """Load a case's batches, and return milliseconds of CPU and wall time per batch."""
    import torch

    import poptorch

    shape, rows, epoch, batches = CASES[case]
    torch.set_num_threads(1)
    data = torch.utils.data.TensorDataset(torch.randn(rows * epoch, *shape), torch.zeros(rows * epoch))
    if by_torch:
        how = {"num_workers": 1, "prefetch_factor": 3, "persistent_workers": True}
        loader = torch.utils.data.DataLoader(data, batch_size=rows, **how)
    else:
        options, how = poptorch.Options(), {"sharing_strategy": "Fork"}
        loader = poptorch.DataLoader(options, data, batch_size=rows, mode="Async", async_options=how)
    taken, start, before = 0, time.perf_counter(), sum(os.times()[:4])
    while taken < batches:
        for images, _ in loader:
            images[:, 0].sum()
            taken += 1
    wall = time.perf_counter() - start
    del loader  # ends the worker: from now on the times of children include it
    return {"cpu": (sum(os.times()[:4]) - before) / taken * 1000, "wall": wall / taken * 1000}


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--tree", action="append", default=[], help="NAME=FOLDER with the packages, several times"
    )
    made.add_argument("--torch", action="store_true", help="load by torch's DataLoader, too")
    made.add_argument("--rounds", type=int, default=7)
    made.add_argument("--case", choices=CASES, help="load in this process, in one way")
    flags = made.parse_args()
    if flags.case:
        print(json.dumps(load(flags.case, flags.torch)))
        return
    here = str(Path(__file__).parents[2] / "src")
    trees = dict(tree.split("=", 1) for tree in flags.tree) or {"here": here}
    if flags.torch:
        trees["torch"] = here
    print("| batches | tree | CPU, ms | wall, ms | CPU, ratio | wall, ratio |\n|---|---|---:|---:|---:|---:|")
    for case in CASES:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
        for turn in range(flags.rounds):
            names = list(trees)[turn % len(trees) :] + list(trees)[: turn % len(trees)]
            for name in names:
                command = [sys.executable, __file__, "--case", case, *["--torch"] * (name == "torch")]
                environment = {**os.environ, "PYTHONPATH": str(Path(trees[name]).resolve())}
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                found[name].append(json.loads(done.stdout))
        first = next(iter(trees))
        for name, rounds in found.items():
            medians = {what: statistics.median(r[what] for r in rounds) for what in ("cpu", "wall")}
            ratios = [
                statistics.median(r[what] / b[what] for r, b in zip(rounds, found[first], strict=True))
                for what in ("cpu", "wall")
            ]
            row = [
                case,
                name,
                *(f"{medians[what]:.3f}" for what in medians),
                *(f"{ratio:.2f}" for ratio in ratios),
            ]
            print("|", " | ".join(row), "|", flush=True)


if __name__ == "__main__":
    main()
