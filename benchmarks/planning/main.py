"""The ledger of plans: predicted against published values, and the fit of the constants that no one has published.

python benchmarks/planning/main.py            # prints the table of docs/guide/planning.md
python benchmarks/planning/main.py --fit      # fits first, on the rows that say so, and prints the constants
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from popvision.machine import load_machine
from popvision.plan import Estimate, compile_profiles

EXAMPLES = Path(__file__).parents[2] / "examples"
BERT = (str(EXAMPLES / "bert_pretraining/run_pretraining.py"), "--dataset", "generated", "--config")
RESNET = (str(EXAMPLES / "resnet_training/train.py"), "--data", "generated", "--config")
POD = "published for a Bow Pod16"


@dataclass(frozen=True)
class Row:
    """A published throughput, and the program that is planned for it."""

    what: str
    machine: str
    program: tuple[str, ...]
    published: float
    source: str
    is_fitted: bool = False


ROWS = (
    Row(
        "BERT-base, 128, PyTorch, global batch 65,536",
        "bow-pod16",
        (*BERT, "pretrain_base_128"),
        15911,
        POD,
        True,
    ),
    Row(
        "BERT-large, 128, PopART, global batch 65,536",
        "bow-pod16",
        (*BERT, "pretrain_large_128"),
        5179,
        POD,
        True,
    ),
    Row(
        "ResNet-50, global batch 1,920",
        "bow-pod16",
        (*RESNET, "resnet50", "--micro-batch-size", "20", "--gradient-accumulation", "6"),
        42029,
        POD,
        True,
    ),
    Row(
        "BERT-base, 128, on 4 ipus",
        "bow-pod4",
        (*BERT, "pretrain_base_128_pod4"),
        4035,
        "the original's headline figure",
    ),
    Row(
        "BERT-large, 128, on 64 ipus",
        "bow-pod64",
        (*BERT, "pretrain_large_128_POD64"),
        17692,
        "the original's headline figure",
    ),
    Row(
        "ResNet-50 on 16 ipus",
        "mk2-pod16",
        (*RESNET, "resnet50"),
        26000,
        "the original's headline figure",
    ),
    Row(
        "ResNet-50 on 64 ipus",
        "mk2-pod64",
        (*RESNET, "resnet50-pod64"),
        70000,
        "the original's headline figure",
    ),
)

# What is fitted, and the values that are likely before any row is seen: from what a tile can load, exchange and issue.
# All kinds that are bound by memory share one factor: three rows do not tell them apart.
LIKELY = {
    "matmul": 0.6,
    "convolution": 0.3,
    "normalization": 0.1,
    "elementwise": 0.2,
    "embedding": 0.1,
    "update": 0.2,
    "links": 0.3,
    "streaming": 20e9,
}
TOGETHER = ("normalization", "elementwise", "embedding", "update")
PARAMETERS = (("matmul",), ("convolution",), TOGETHER, ("links",), ("streaming",))
SPREAD, NOISE = math.log(1.5), 0.03  # standard deviations: of a likely value, and of a published one


def constants(logs: list[float]) -> dict[str, float]:
    """Return the constants, from the logarithm of each parameter's ratio to its likely value."""
    return {
        name: LIKELY[name] * math.exp(value)
        for names, value in zip(PARAMETERS, logs, strict=True)
        for name in names
    }


def fitted(predict: Callable[[Row, dict[str, float]], float]) -> dict[str, float]:
    """Return the most probable constants: by a search along one parameter after another."""

    def badness(logs: list[float]) -> float:
        found = constants(logs)
        rows = (math.log(predict(row, found) / row.published) / NOISE for row in ROWS if row.is_fitted)
        return sum(error**2 for error in rows) + sum((value / SPREAD) ** 2 for value in logs)

    logs, step = [0.0] * len(PARAMETERS), 0.2
    best = badness(logs)
    while step > 0.002:
        before = best
        for place in range(len(logs)):
            for change in (step, -step):
                other = [value + change * (place == i) for i, value in enumerate(logs)]
                if (found := badness(other)) < best:
                    best, logs = found, other
        if best == before:
            step /= 2
    return constants(logs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fit", action="store_true")
    does_fit = parser.parse_args().fit
    planned = {row.program: compile_profiles(row.program, ["apart"])["apart"] for row in ROWS}

    def predict(row: Row, own: dict[str, float]) -> float:
        profile, found = planned[row.program], load_machine(row.machine)
        if own:
            kinds = {name: value for name, value in own.items() if name != "streaming"}
            found = replace(
                found, streaming=own["streaming"], efficiency={**(found.efficiency or {}), **kinds}
            )
        micro_batches = profile.facts["schedule_micro_batches"]
        return Estimate(profile, found, profile.counts["replicas"], micro_batches).items_per_second

    own = fitted(predict) if does_fit else {}
    for name, value in own.items():
        print(f"{name} = {value:.3g}")
    print(
        "| row | machine | predicted | published | error | source | fitted |\n|---|---|---:|---:|---:|---|---|"
    )
    for row in ROWS:
        items = predict(row, own)
        print(
            f"| {row.what} | {row.machine} | {items:,.0f} | {row.published:,.0f} | {items / row.published - 1:+.0%}"
            f" | {row.source} | {'yes' if row.is_fitted else 'no'} |"
        )


if __name__ == "__main__":
    main()
