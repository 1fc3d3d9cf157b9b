"""How far is a plan for `this-machine` from the training that it plans?

Each layout is trained and planned in processes of its own, in turns. A layout with two replicas is also planned from
the executor of one replica, with `replicas=[2]`: before a user has such a layout.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1]
sys.path.extend(str(BENCHMARKS / name) for name in ("", "mnist_pipeline", "resnet", "bert", "gpt2"))
import ways  # noqa: E402  # pyright: ignore[reportMissingImports]
from harness import environment, markdown  # noqa: E402  # pyright: ignore[reportMissingImports]

MODELS = "digits", "resnet", "bert", "gpt2"


@dataclass(frozen=True)
class Layout:
    """A model on `ipus` ipus and `replicas` replicas, with `accumulation` micro-batches of each replica an update."""

    model: str
    ipus: int
    replicas: int
    accumulation: int

    def __str__(self) -> str:
        return (
            f"{self.model}, {self.ipus} ipu(s), {self.replicas} replica(s), accumulation {self.accumulation}"
        )


def executor(layout: Layout, replicas: int):
    """Return an executor of one update a call, with this number of replicas, and its batch."""
    import poptorch

    task = importlib.import_module(layout.model).TASK
    task = replace(task, micro_batches=layout.accumulation * replicas, updates=1)
    blocks = [*task.blocks(task.model())]
    size = -(-len(blocks) // layout.ipus)
    placed = [(ipu, " ".join(blocks[ipu * size : (ipu + 1) * size])) for ipu in range(layout.ipus)]
    options = poptorch.Options().replicationFactor(replicas)
    options.setExecutionStrategy(poptorch.PipelinedExecution(*ways.stages(placed)))
    return ways.executor(task, options), task


def planned(layout: Layout, from_one: bool) -> float:
    """Return rows a second by `poptorch.plan`."""
    import poptorch

    model, task = executor(layout, 1 if from_one else layout.replicas)
    found = poptorch.plan(model, None, task.inputs(), on="this-machine", replicas=[layout.replicas])
    return found.estimates[0].items_per_second


def trained(layout: Layout, seconds: float) -> float:
    """Return rows a second of a training: the median of calls that take `seconds` together."""
    model, task = executor(layout, layout.replicas)
    inputs, spent = task.inputs(), list[float]()
    for _ in range(3):
        model(*inputs)
    while sum(spent) < seconds:
        start = time.perf_counter()
        model(*inputs)
        spent.append(time.perf_counter() - start)
    return task.update_rows / statistics.median(spent)


def alone(work: partial[float]) -> float:
    """Return the result of `work` in a new process."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of training in a round")
    args = parser.parse_args()
    where, rows, errors, noise = environment(), [], [], []
    for model in args.models:
        for ipus, replicas, accumulation in ((1, 1, 4), (1, 2, 8), (2, 1, 16), (2, 2, 4)):
            layout = Layout(model, ipus, replicas, accumulation)
            works = {
                "trained": partial(trained, layout, args.seconds),
                "planned": partial(planned, layout, False),
            }
            if replicas > 1:
                works["from one replica"] = partial(planned, layout, True)
            found = {name: [] for name in works}
            for _ in range(args.rounds):
                for name, work in works.items():
                    found[name].append(alone(work))
            middle = {name: statistics.median(values) for name, values in found.items()}
            truth = middle.pop("trained")
            noise.append(max(found["trained"]) / min(found["trained"]) - 1)
            off = {name: value / truth - 1 for name, value in middle.items()}
            errors += map(abs, off.values())
            cells = [f"{off[name]:+.0%}" if name in off else "" for name in ("planned", "from one replica")]
            rows.append([str(layout), f"{truth:,.0f}", *cells, f"{noise[-1]:.0%}"])
            print(*rows[-1], sep="; ", file=sys.stderr, flush=True)
    print(markdown(["layout", "rows/s", "planned", "planned from one replica", "trainings differ by"], rows))
    print(
        f"\n{len(errors)} plans: the median is {statistics.median(errors):.0%} off, the worst {max(errors):.0%};"
    )
    print(
        f"trainings of one layout differ by {statistics.median(noise):.0%} in the median, {max(noise):.0%} at the most"
    )
    print(where)


if __name__ == "__main__":
    main()
