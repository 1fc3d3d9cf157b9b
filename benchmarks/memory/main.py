"""Memory of each ipu at its peak: BERT over four ipus, pipelined, sharded, recomputed, and with state off chip."""

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("", "bert"))
from bert import TASK  # pyright: ignore[reportAttributeAccessIssue]
from harness import environment, markdown  # pyright: ignore[reportMissingImports]
from ways import executor, stages  # pyright: ignore[reportMissingImports]

import popart
import poptorch
from popengine import profile
from popvision.analysis import Figures
from popvision.memory import IpuMemory

PLACEMENT = ((0, "words layer0"), (1, "layer1 layer2"), (2, "layer3"), (3, "head"))
MIB = 2**20


def pipelined(options: poptorch.Options) -> None:
    options.setExecutionStrategy(poptorch.PipelinedExecution(*stages(PLACEMENT)))


def sharded(options: poptorch.Options) -> None:
    options.setExecutionStrategy(poptorch.ShardedExecution(*stages(PLACEMENT)))


def recomputed(options: poptorch.Options) -> None:
    pipelined(options)
    options._Popart.set("autoRecomputation", int(popart.RecomputationType.Standard))


def offloaded(options: poptorch.Options) -> None:
    pipelined(options)
    off_chip = poptorch.TensorLocationSettings().useOnChipStorage(False)
    options.TensorLocations.setOptimizerLocation(off_chip)


LAYOUTS: dict[str, Callable[[poptorch.Options], None]] = {
    "pipelined": pipelined,
    "sharded": sharded,
    "pipelined, recomputed": recomputed,
    "pipelined, optimizer state off chip": offloaded,
}


def measured(lay_out: Callable[[poptorch.Options], None], micro_batches: int) -> list[IpuMemory]:
    """What each ipu needed in the second weight update, from a profile of it."""
    task = replace(TASK, micro_batches=micro_batches, updates=2)
    with tempfile.TemporaryDirectory() as folder:
        options = poptorch.Options().enableProfiling(folder)
        lay_out(options)
        model = executor(task, options)
        model(*task.inputs())
        model.destroy()
        return Figures(profile.load(Path(folder, "training", "profile.pop"))).needs


def row(name: str, found: list[IpuMemory]) -> list[str]:
    parts = [sum(need.activations for need in found), sum(need.optimizer for need in found)]
    parts.append(sum(need.total for need in found))
    return [name, *(f"{size / MIB:.1f}" for size in [*(need.total for need in found), *parts])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--micro-batches", type=int, default=TASK.micro_batches)
    args = parser.parse_args()
    where = environment()
    rows = [row(name, measured(lay_out, args.micro_batches)) for name, lay_out in LAYOUTS.items()]
    ipus = [f"ipu {ipu} (MiB)" for ipu in range(len(PLACEMENT))]
    print(markdown(["layout", *ipus, "activations", "optimizer", "all"], rows))
    print()
    print(f"peaks of each ipu in an update of {args.micro_batches} micro-batches of {TASK.rows} sequences")
    print(where)


if __name__ == "__main__":
    main()
