"""Memory that a training process holds at its peak beside its model, against plain PyTorch: AdamW, and GPT-2 small."""

import argparse
import gc
import multiprocessing
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "large"))
from harness import environment, markdown  # pyright: ignore[reportMissingImports]
from tasks import GPT2, words  # pyright: ignore[reportMissingImports]

MB = 1e6


class Layers(nn.Module):
    """24 linear layers of 1020 x 1020: 25 million parameters, as in `../updates`."""

    def __init__(self, width: int = 1020) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(width, width) for _ in range(24)])

    def forward(self, rows: Tensor, wanted: Tensor) -> tuple[Tensor]:
        return (nn.functional.mse_loss(self.layers(rows), wanted),)

    def data(self, rows: int) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, 1020), torch.randn(rows, 1020)


class Words(GPT2):
    """GPT-2 small, 124 million parameters, without dropout."""

    def data(self, rows: int) -> tuple[Tensor, Tensor]:
        return words(rows, torch.Generator())


@dataclass(frozen=True)
class Case:
    """A model that AdamW trains, with `accumulation` micro-batches of `rows` rows to an update."""

    model: Callable[[], Any]
    accumulation: int
    rows: int


CASES = {
    "24 layers, 1 micro-batch of 8 rows": Case(Layers, 1, 8),
    "24 layers, 4 micro-batches of 8 rows": Case(Layers, 4, 8),
    "GPT-2 small, 4 micro-batches of 2 rows": Case(Words, 4, 2),
}


def plain(case: Case, model: Any) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs = model.data(case.rows * case.accumulation)

    def update() -> None:
        optimizer.zero_grad()
        for micro_batch in zip(*(value.split(case.rows) for value in inputs), strict=True):
            (model(*micro_batch)[0] / case.accumulation).backward()
        optimizer.step()

    return update


def ours(case: Case, model: Any) -> Callable[[], None]:
    import poptorch

    options = poptorch.Options().showCompilationProgressBar(False)
    options.Training.gradientAccumulation(case.accumulation)
    trainer = poptorch.trainingModel(model, options, torch.optim.AdamW(model.parameters(), lr=1e-4))
    inputs = model.data(case.rows * case.accumulation)
    return lambda: trainer(*inputs) and None


def measured(way: Callable[[Case, Any], Callable[[], None]], case: Case, updates: int, threads: int) -> int:
    """The bytes that a process holds at its peak beside what it held when its model was made."""
    import poptorch  # noqa: F401  # the same modules in both ways

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = case.model()
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    update = way(case, model)
    for _ in range(updates):
        update()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at their peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES), metavar="CASE")
    given = parser.parse_args()
    where, rows = environment(), []
    for name in given.cases:
        peaks = []
        for way in (plain, ours):
            # A process for each: memory that one has freed would be the other's.
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                peaks.append(pool.apply(measured, (way, CASES[name], given.updates, given.threads)))
        rows.append([name, *(f"{peak / MB:.0f}" for peak in peaks), f"{peaks[1] / peaks[0]:.2f}"])
    print(markdown(["AdamW", "plain PyTorch (MB)", "Pando (MB)", "ratio"], rows))
    print()
    print(f"peak of a process in {given.updates} updates, less what it held with its model alone")
    print(where)


if __name__ == "__main__":
    main()
