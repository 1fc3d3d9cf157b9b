"""Large weight updates after few micro-batches: 25 million parameters in 24 layers, one update a call."""

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import (  # pyright: ignore[reportMissingImports]
    Contender,
    environment,
    markdown,
    measure,
)

WIDTH, LAYERS, ROWS = 1020, 24, 8
# An update moves so many tensors of a weight's size: it reads weight, gradient and states, and writes all but gradient.
MOVED = {"AdamW": 7, "Adam": 7, "SGD": 5}


class Layers(nn.Module):
    """Linear layers, returning their loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(width, width) for _ in range(LAYERS)])

    def forward(self, rows: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor]:
        return (nn.functional.mse_loss(self.layers(rows), wanted),)


def made(width: int, threads: int, kind: str, **arguments):
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = Layers(width)
    data = torch.randn(ROWS, width), torch.randn(ROWS, width)
    if kind == "SGD":
        arguments["momentum"] = 0.9
    return model, getattr(torch.optim, kind)(model.parameters(), lr=1e-4, **arguments), data


def plain(rank: int, width: int, threads: int, kind: str, updates: bool = True, **arguments):
    model, step, data = made(width, threads, kind, **arguments)

    def unit() -> float:
        step.zero_grad()
        (loss,) = model(*data)
        loss.backward()
        if updates:
            step.step()
        return loss.item()

    return unit


def ours(rank: int, width: int, threads: int, kind: str, **arguments):
    import poptorch

    model, step, data = made(width, threads, kind, **arguments)
    options = poptorch.Options().showCompilationProgressBar(False)
    trainer = poptorch.trainingModel(model, options, step)
    return lambda: trainer(*data)[-1].flatten()[-1].item()


def bandwidth(threads: int, size: int = 1 << 24) -> float:
    """Bytes a second that a sum of two large tensors reads and writes, at best."""
    torch.set_num_threads(threads)
    one, two = torch.ones(size), torch.ones(size)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        one.add_(two)
        best = min(best, time.perf_counter() - start)
    return 3 * one.nbytes / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--patience", type=int, default=1)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--optimizer", choices=MOVED, default="AdamW")
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    given = parser.parse_args()
    print(environment(), flush=True)
    rows = []
    for threads in given.threads:
        ways = {
            "forward and backward alone": partial(plain, updates=False),
            "plain PyTorch": plain,
            "Pando": ours,
            "plain PyTorch, fused=True": partial(plain, fused=True),
            "Pando, fused=True": partial(ours, fused=True),
        }
        sizes = {"width": given.width, "threads": threads, "kind": given.optimizer}
        taking_part = [Contender(name, partial(way, **sizes)) for name, way in ways.items()]
        found = {m.name: m for m in measure(taking_part, given.rounds, patience=given.patience, warm=3)}
        speed = bandwidth(threads)
        parameters = sum(value.numel() for value in Layers(given.width).parameters())
        bound = found["forward and backward alone"].median + 4 * MOVED[given.optimizer] * parameters / speed
        print(f"{threads} thread(s): the memory moves {speed / 1e9:.1f} GB/s; the bound is {bound:.3f} s")
        for name, it in found.items():
            base = found["plain PyTorch, fused=True" if "fused" in name else "plain PyTorch"]
            rows.append(
                [
                    f"{name}, {threads} thread(s)",
                    f"{it.median:.3f}",
                    f"{min(it.calm):.3f}",
                    f"{base.median / it.median:.2f}×",
                    f"{bound / it.median:.0%}",
                ]
            )
    print(markdown(["contender", "median (s)", "fastest", "speed", "of the bound"], rows))


if __name__ == "__main__":
    main()
